"""The planner's choice from a calibration, against measured training steps, on emulated links.

Four links between two nodes of 4 ranks, four models and three lengths, each link with each model once. A link is
calibrated by ``tools.calibrate``, which sees no training step: rates of the device at the models' width, and exchanges
of bytes. The planner then predicts every candidate of a setting; its eight best and a few others train in turns. The
first turn, twice as long, is a profile, as ``tools.plan --profile`` makes one, and chooses among the eight together
with the predictions; by the others choices are judged. A setting that the results have already is not measured again.

    python -m bench.link.choices --results bench/results             # all 16 settings, half an hour
    python -m bench.link.choices --results /tmp --links "shared 200mbit" --models gpt --turns 1
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pretrain_dit
from bench.harness import add_results, heading, interleaved
from bench.link.cases import RANKS, VOCAB_SIZE, Case, case_for, command_line, corpus
from bench.link.network import Network, prepare_machine
from bench.link.ranks import calibrated, profile
from bench.shapes import AttentionShape
from planner.choice import combine_prediction_and_profile
from planner.cluster import Cluster
from planner.search import rank
from runtime.errors import UserError
from runtime.machine import describe, results_file, stamp
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Column, Table, read_records, write_tables
from train.config.derive import with_vocabulary
from train.config.language import parse_args

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
"""Tokens of a step, in sequences."""
SEEN, SEEN_LENGTHS = AttentionShape(num_heads=8, head_dim=16, batch=4), (128, 512)
"""Measured by the calibration: the models' heads, at lengths of a rank."""
BEST = 8
OTHERS = ("ulysses", "zigzag_u4", "double_ring", "wallfacer_c2_u2")
"""Measured besides the best predictions: each was among the best of a setting of ``bench.link``."""
ITERATIONS = 2
WITHIN = 0.03
"""A choice counts as good within this share of the best measured."""
CLUSTERS = Path(__file__).parent / "clusters"
COLUMNS: dict[str, Column] = {
    "link": "{link}",
    "model": "{model}",
    "length": "{length}",
    "first predicted, s": "{predicted} {predicted_time:.2f}",
    "measured, s": "{predicted_measured:.2f}",
    "behind": "{predicted_behind:.1%}",
    "choice with a profile, predicted, s": "{choice} {choice_time:.2f}",
    "measured, s ": "{choice_measured:.2f}",
    "behind ": "{behind:.1%}",
    "best measured, s": "{best} {best_measured:.2f}",
    "predicted ranks, fastest measured first": lambda row: " ".join(map(str, row["ranks"])),
    "of": "{candidates}",
    "spread": "{spread:.0%}",
}
RATES = (
    *("peak_tflops", "matmul_fraction", "attention_fraction", "masked_share", "launch_us"),
    *("inside_gb_per_s", "inside_latency_us", "between_gb_per_s", "between_latency_us"),
    *("posted_overlap", "shared_overlap"),
)


def settings(links: list[str], models: list[str]) -> list[tuple[str, str, int]]:
    """Return the settings of these links and models, each a link, a model and a length."""
    found = [
        (link, model, LENGTHS[(row + column) % len(LENGTHS)])
        for row, link in enumerate(LINKS)
        for column, model in enumerate(MODELS)
    ]
    return [one for one in found if one[0] in links and one[1] in models]


def cluster_of(network: Network, name: str) -> dict[str, Any]:
    """Return the fields of a cluster whose link is calibrated on the ranks of a network."""
    figures = {key: value for key, (value, _) in calibrated(network, SEEN, SEEN_LENGTHS).items()}
    return {"name": name, "device": "cpu", **figures}


def predictions(
    cluster: Cluster, model: str, data: Path, seq_length: int, batch: int, more: Sequence[str] = ()
) -> dict[str, tuple[Case, float]]:
    """Return case and predicted seconds of every candidate on 8 ranks by name, fastest first."""
    shape: dict[str, Any] = {"seq_length": seq_length, "batch": batch, "iterations": ITERATIONS + 1, "more": more}
    asked = command_line(model, Case(cp=RANKS, method="auto"), data, **shape)
    config = pretrain_dit.parse_args(asked) if model == "dit" else with_vocabulary(parse_args(asked), VOCAB_SIZE)
    found: dict[str, tuple[Case, float]] = {}
    for one in rank([config], RANKS, cluster).candidates:
        name, case = case_for(one.config.context, RANKS)
        found[name] = case, one.prediction.time
    return found


def measured(network: Network, cluster: Cluster, model: str, length: int, data: Path, rounds: int) -> dict[str, Any]:
    """Predict a setting's candidates; train its best and ``OTHERS`` in a turn to profile them and in ``rounds`` more.

    Returns predicted seconds of all candidates, and ``turns``, measured ones, of which the first is the profile.
    """
    base, more = MODELS[model]
    shape: dict[str, Any] = {"seq_length": length, "batch": TOKENS // length, "more": more}
    found = predictions(cluster, base, data, **shape)
    chosen = {name: case for place, (name, (case, _)) in enumerate(found.items()) if place < BEST or name in OTHERS}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    turns = ((list(chosen), 2 * ITERATIONS), (list(interleaved([*chosen], rounds)), ITERATIONS))
    for order, iterations in turns:
        lines = [command_line(base, chosen[name], data, **shape, iterations=iterations + 1) for name in order]
        for name, taken in zip(order, profile(network, lines, iterations), strict=True):
            seconds[name].append(_short(taken))
    return {"predicted": {name: _short(time) for name, (_, time) in found.items()}, "turns": seconds}


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
    both = combine_prediction_and_profile(*([way[name] for name in best] for way in (row["predicted"], profiled)))
    choice = min(zip(both, best, strict=True))[1]
    named = {"predicted": predicted[0], "choice": choice, "best": order[0]}
    return {
        **named,
        **{f"{which}_measured": times[name] for which, name in named.items()},
        **{f"{which}_time": row["predicted"][name] for which, name in named.items() if which != "best"},
        "behind": times[choice] / times[order[0]] - 1,
        "predicted_behind": times[predicted[0]] / times[order[0]] - 1,
        "ranks": [1 + predicted.index(name) for name in order],
        "candidates": len(predicted),
        "spread": max((max(taken) - min(taken)) / times[name] for name, taken in seconds.items()),
    }


def markdown(result: dict[str, Any]) -> str:
    """Format the settings, and what was calibrated."""
    rows, good = list[dict[str, Any]](), dict[bool, list[tuple[bool, bool]]]({True: [], False: []})
    for row in result["settings"]:
        rows.append({**{name: row[name] for name in ("link", "model", "length")}, **judged(row)})
        within = rows[-1]["behind"] <= WITHIN, rows[-1]["predicted_behind"] <= WITHIN
        good[rows[-1]["candidates"] > 2].append(within)
    counts = {softmax: [sum(each) for each in zip(*found, strict=True)] or [0, 0] for softmax, found in good.items()}
    known = [{"link": link, "masked_share": Cluster.masked_share} | found for link, found in result["clusters"].items()]
    rates = {"link": "{link}", **{key: f"{{{key}:.3g}}" for key in RATES}, "between_link": "{between_link}"}
    lines = [
        "# The planner's choices from a calibration\n",
        *heading(result),
        f"Two nodes of 4 ranks, {TOKENS} tokens a step; medians of {result['turns']} turns of {ITERATIONS} training "
        "steps; spread: the widest of a candidate's turns, over its median.",
        f"The choice by prediction and a profile of the {BEST} best is within {WITHIN:.0%} of the best measured in "
        f"{counts[True][0]} of {len(good[True])} settings of softmax attention, and the first predicted in "
        f"{counts[True][1]}; of linear attention, which has two candidates, in {counts[False][0]} and "
        f"{counts[False][1]} of {len(good[False])}.\n",
        *Table(COLUMNS, rows).markdown(),
        "\nCalibrated, each link by itself:\n",
        *Table(rates, known).markdown(),
    ]
    return "\n".join(lines) + "\n"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.link.choices", __doc__)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS), help="default: all")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="default: all")
    turns = "after that of the profile (default: %(default)s)"
    parser.add_argument("--turns", type=positive, default=2, help=turns)
    add_results(parser)
    args = parser.parse_args(argv)
    machine = describe("cpu")
    path = results_file(args.results or Path(tempfile.mkdtemp(prefix="longmesh-choices-")), "choices", machine)
    result: dict[str, Any] = {"settings": [], "clusters": {}, "turns": args.turns}
    result |= read_records(path) if path.exists() else {}
    if result["turns"] != args.turns:
        raise UserError(f"{path} holds medians of {result['turns']} turns, not {args.turns}; give another --results")
    prepare_machine()
    result |= {"machine": machine, "note": args.note}
    done = {(row["link"], row["model"], row["length"]) for row in result["settings"]}
    with corpus() as data:
        for link, model, length in settings(args.links, args.models):
            if (link, model, length) in done:
                continue
            kind, rate = link.split()
            with Network(rails=kind == "rails") as network:
                network.limit(rate)
                if link not in result["clusters"]:
                    print(f"{link}: calibrating", flush=True)
                    result["clusters"][link] = cluster_of(network, link)
                cluster = Cluster(**result["clusters"][link])
                found = measured(network, cluster, model, length, data, args.turns)
            result["settings"].append({"link": link, "model": model, "length": length, **stamp(), **found})
            said = judged(result["settings"][-1])
            print(f"{link} {model} {length}: {said['choice']}, {said['behind']:.1%} behind {said['best']}", flush=True)
            result["load_average"] = list(os.getloadavg())
            write_tables(path, result, markdown(result))
    print(f"in {path.with_suffix('.md')} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
