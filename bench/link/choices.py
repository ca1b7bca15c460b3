"""The planner's choice from a calibration, against measured training steps, on emulated links.

Four links between two nodes of 4 ranks, four models and three lengths, each link with each model once. A link is
calibrated by ``bench.calibration``, which sees no training step: rates of the device at the models' width, and
exchanges of bytes. The planner then predicts every candidate of a setting; its eight best and a few others train in
turns. The first turn, twice as long, is a profile, as ``tools.plan --profile`` makes one, and chooses among the eight
together with the predictions; by the others choices are judged. A setting that the results have already is not measured
again.

    python -m bench.link.choices --results bench/results             # all 16 settings, half an hour
    python -m bench.link.choices --results /tmp --links "shared 200mbit" --models gpt --turns 1
"""

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.link.cases import command_line
from bench.link.measure import CORPUS
from bench.link.network import Network, prepare_machine
from bench.link.planned import predictions
from bench.link.ranks import calibrated, profile
from bench.link.report import add_results, heading
from bench.rounds import turns
from bench.workload import Workload
from data.text.prepare import prepare
from planner.cluster import Cluster
from planner.ranking import weighed
from runtime.errors import UserError
from runtime.files import write_text
from runtime.machine import describe, results_file, stamp
from tools.arguments import one_line_errors, parser_for, positive, run_command
from tools.report import markdown as markdown_table
from tools.report import read_records, write_records

LINKS = ("shared 100mbit", "shared 200mbit", "rails 50mbit", "rails 100mbit")
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt": ("gpt", ()),
    "llama": ("llama", ()),
    "llama_kv2": ("llama", ("--num-query-groups", "2")),
    "transnormer": ("transnormer", ()),
}
"""A model of ``bench.link``, and more flags; of linear attention the planner has two candidates alone."""
LENGTHS = (768, 1536, 3072)
TOKENS = 6144
"""Of a step, in sequences."""
SEEN = Workload(num_heads=8, head_dim=16, batch=4)
"""What the calibration measures: the models' heads, at the lengths of a rank below."""
SEEN_LENGTHS = (128, 512)
BEST = 8
OTHERS = ("ulysses", "zigzag_u4", "double_ring", "wallfacer_c2_u2")
"""Measured besides the best predictions: each was among the best of a setting of ``bench.link``."""
ITERATIONS = 2
RATES = (
    *("peak_tflops", "matmul_fraction", "attention_fraction", "masked_share", "launch_us"),
    *("inside_gb_per_s", "inside_latency_us", "between_gb_per_s", "between_latency_us"),
    *("posted_overlap", "shared_overlap"),
)
WITHIN = 0.03
"""Of the best measured, for a choice to count as good."""


def settings(links: list[str], models: list[str]) -> list[tuple[str, str, int]]:
    """Return the settings of these links and models, each a link, a model and a length."""
    found = [
        (link, model, LENGTHS[(row + column) % len(LENGTHS)])
        for row, link in enumerate(LINKS)
        for column, model in enumerate(MODELS)
    ]
    return [one for one in found if one[0] in links and one[1] in models]


def measured(network: Network, cluster: Cluster, model: str, length: int, data: Path, rounds: int) -> dict[str, Any]:
    """Predict a setting's candidates; train its best and ``OTHERS`` in a turn to profile them and in ``rounds`` more.

    Returns predicted seconds of all candidates, and ``turns``, measured ones, of which the first is the profile.
    """
    shape = {"size": network.size, "seq_length": length, "batch": TOKENS // length}
    base, more = MODELS[model]
    found = predictions(cluster, base, data, more, **shape)
    names = [name for place, name in enumerate(found) if place < BEST or name in OTHERS]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for order, iterations in ((names, 2 * ITERATIONS), (list(turns(names, rounds)), ITERATIONS)):
        lines = [command_line(base, found[name][0], data, **shape, iterations=iterations + 1) for name in order]
        for name, taken in zip(order, profile(network, lines, iterations), strict=True):
            seconds[name].append(_short(taken))
    return {
        "predicted": {name: _short(time) for name, (_, time) in found.items()},
        "turns": seconds,
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Return the choices by prediction and with a profile, the best measured, how far they are behind, and the spread.

    ``ranks`` are the predicted ranks of those measured, fastest first; ``spread`` the largest of (most - least) over
    median of a candidate's turns.
    """
    profiled = {name: taken[0] for name, taken in row["turns"].items()}
    seconds = {name: taken[1:] for name, taken in row["turns"].items()}
    times = {name: median(taken) for name, taken in seconds.items()}
    order, predicted = sorted(times, key=lambda name: times[name]), list(row["predicted"])
    best = predicted[:BEST]
    both = weighed(*([way[name] for name in best] for way in (row["predicted"], profiled)))
    choice = min(zip(both, best, strict=True))[1]
    return {
        "predicted": predicted[0],
        "choice": choice,
        "best": order[0],
        "behind": times[choice] / times[order[0]] - 1,
        "predicted_behind": times[predicted[0]] / times[order[0]] - 1,
        "ranks": [1 + predicted.index(name) for name in order],
        "times": {name: times[name] for name in order},
        "spread": max((max(taken) - min(taken)) / times[name] for name, taken in seconds.items()),
    }


def markdown(result: dict[str, Any]) -> str:
    """Format the settings, and what was calibrated."""
    rows, good = list[list[str]](), dict[bool, list[tuple[bool, bool]]]({True: [], False: []})
    for row in result["settings"]:
        said, time = judged(row), row["predicted"]
        good[len(time) > 2].append((said["behind"] <= WITHIN, said["predicted_behind"] <= WITHIN))
        cells = [row["link"], row["model"], str(row["length"])]
        for name, behind in ((said["predicted"], said["predicted_behind"]), (said["choice"], said["behind"])):
            cells += [f"{name} {time[name]:.2f}", f"{said['times'][name]:.2f}", f"{behind:.1%}"]
        cells += [f"{said['best']} {said['times'][said['best']]:.2f}", " ".join(map(str, said["ranks"]))]
        rows.append([*cells, str(len(time)), f"{said['spread']:.0%}"])
    head = ["link", "model", "length", "first predicted, s", "measured, s", "behind"]
    head += ["choice with a profile, predicted, s", "measured, s", "behind", "best measured, s"]
    head += ["predicted ranks, fastest measured first", "of", "spread"]
    counts = {softmax: [sum(each) for each in zip(*found, strict=True)] or [0, 0] for softmax, found in good.items()}
    known = [(link, {"masked_share": Cluster.masked_share} | found) for link, found in result["clusters"].items()]
    show = [[link, *(f"{found[key]:.3g}" for key in RATES), found["between_link"]] for link, found in known]
    lines = [
        "# The planner's choices from a calibration\n",
        *heading(result),
        f"Two nodes of 4 ranks, {TOKENS} tokens a step; medians of {result['turns']} turns of {ITERATIONS} training "
        "steps; spread: the widest of a candidate's turns, over its median.",
        f"The choice by prediction and a profile of the {BEST} best is within {WITHIN:.0%} of the best measured in "
        f"{counts[True][0]} of {len(good[True])} settings of softmax attention, and the first predicted in "
        f"{counts[True][1]}; of linear attention, which has two candidates, in {counts[False][0]} and "
        f"{counts[False][1]} of {len(good[False])}.\n",
        *markdown_table(head, rows),
        "\nCalibrated, each link by itself:\n",
        *markdown_table(["link", *RATES, "between_link"], show),
    ]
    return "\n".join(lines) + "\n"


def measure_all(result: dict[str, Any], path: Path, links: list[str], models: list[str]) -> None:
    """Measure the settings that ``result`` lacks, and write it to ``path`` and as Markdown after each."""
    done = {(row["link"], row["model"], row["length"]) for row in result["settings"]}
    with tempfile.TemporaryDirectory(prefix="longmesh-link-") as folder:
        data = Path(folder) / "stdlib"
        prepare(CORPUS, data, progress=False)
        for link, model, length in settings(links, models):
            if (link, model, length) in done:
                continue
            kind, rate = link.split()
            with Network(rails=kind == "rails") as network:
                network.limit(rate)
                if link not in result["clusters"]:
                    print(f"{link}: calibrating", flush=True)
                    figures = {key: value for key, (value, _) in calibrated(network, SEEN, SEEN_LENGTHS).items()}
                    result["clusters"][link] = {"name": link, "device": "cpu", **figures}
                cluster = Cluster(**result["clusters"][link])
                found = measured(network, cluster, model, length, data, result["turns"])
            result["settings"].append({"link": link, "model": model, "length": length, **stamp(), **found})
            said = judged(result["settings"][-1])
            print(f"{link} {model} {length}: {said['choice']}, {said['behind']:.1%} behind {said['best']}", flush=True)
            result["load_average"] = list(os.getloadavg())
            write_records(path, result)
            write_text(path.with_suffix(".md"), markdown(result))


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.link.choices", __doc__)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS), help="default: all")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument(
        "--turns",
        type=positive,
        default=2,
        help="after that of the profile (default: %(default)s)",
    )
    add_results(parser)
    args = parser.parse_args(argv)
    machine = describe("cpu")
    path = results_file(args.results or Path(tempfile.mkdtemp(prefix="longmesh-choices-")), "choices", machine)
    result = {"settings": [], "clusters": {}, "turns": args.turns} | (read_records(path) if path.exists() else {})
    if any("turns" not in row for row in result["settings"]):
        raise UserError(f"{path} holds settings without a profile, of an earlier version; give another --results")
    if result["turns"] != args.turns:
        raise UserError(f"{path} holds medians of {result['turns']} turns, not {args.turns}; give another --results")
    prepare_machine()
    measure_all(result | {"machine": machine, "note": args.note}, path, args.links, args.models)
    print(f"in {path.with_suffix('.md')} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
