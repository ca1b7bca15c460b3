"""LASP (Sun et al. 2024, arXiv:2404.02882): its table of convergence at small scale, with every data-parallel backend.

A tiny TransNormer and a tiny Linear Transformer train on the standard library's sources, on 4 processes of a CPU:
data parallel 4, and data parallel 2 x context parallel 2 with LASP, each with the same batches of the same tokens. A
finished run is written at once, and a table that is begun goes on where it stopped.

    python -m papers.convergence                                           # 26 runs
    python -m papers.convergence --rows transnormer/fsdp transnormer/ddp   # some of them; the table has what there is
    make lasp-table ARGS="--rows transnormer/ddp --iterations 5 --results runs/lasp"   # a short one
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pretrain_gpt
from data.text.prepare import Request, prepare
from papers.table import FOLDER
from papers.table import published as rows_of
from parallel.context.linear import state
from runtime.errors import UserError
from runtime.machine import describe, in_words, stamp
from runtime.ranks import run_ranks
from tools.arguments import one_line_errors, parser_for, run_command
from tools.report import markdown as markdown_table
from tools.report import read_records, write_records
from tools.training import Records, trainer_of

NAME = "lasp_convergence"
RESULTS = FOLDER / "results" / f"{NAME}.jsonl"
"""A line for each run, beside the table and the picture; git ignores the curves in NAME.curves.jsonl."""
MODELS = {"transnormer": "TransNormer", "linear_transformer": "LinearTransformer"}
BACKENDS = {
    "ddp": "DDP",
    "legacy_ddp": "LegacyDDP",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
WAYS = ("without", "lasp")
CONTROL = "dropped"
"""With LASP, but no rank gets the state of the one before: what a table must tell apart to mean anything."""
CONTROLLED = "ddp"
"""The backend of the rows that have such a run besides."""
RANKS, CONTEXT, BATCH, LENGTH, VOCABULARY = 4, 2, 8, 256, 1024
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --global-batch-size {BATCH}
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --eval-iters 0 --save none --save-interval none --device cpu
    --context-parallel-method lasp
"""
LAST = 10
"""Final updates whose mean loss is the table's figure, besides the last loss."""
BOUND = 0.005
"""Largest relative difference of the loss with LASP from without."""
SIZES = {"ranks": RANKS, "sequences": BATCH, "seq_length": LENGTH, "vocabulary": VOCABULARY}
Result = dict[str, Any]
"""The settings, the machine, and each finished run's figures by name, with its losses if kept."""


def rows() -> list[str]:
    """Return the names of the table's rows in the paper's order."""
    return [f"{model}/{backend}" for model in MODELS for backend in BACKENDS]


def published() -> dict[str, dict[str, float]]:
    """Return the losses of the paper's models of 0.4B parameters, with LASP and without, by our row names."""
    models, backends = ({title: name for name, title in names.items()} for names in (MODELS, BACKENDS))
    return {
        f"{models[row['model']]}/{backends[row['backend']]}": {
            "without": float(row["loss_without_lasp"]),
            "lasp": float(row["loss_with_lasp"]),
        }
        for row in rows_of(NAME)
    }


def runs(row: str) -> list[str]:
    """Return the names of a row's two runs, and of its control if it has one."""
    return [f"{row}/{way}" for way in (*WAYS, *[CONTROL] * row.endswith(f"/{CONTROLLED}"))]


def command_line(run: str, data: Path, iterations: int) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run: a row of the table, with LASP or without."""
    model, backend, way = run.split("/")
    dp = RANKS if way == "without" else RANKS // CONTEXT
    flags = {
        "model-type": model,
        "data-path": data,
        "tokenizer-model": f"{data}.model",
        "micro-batch-size": BATCH // dp,
        "train-iters": iterations,
        "lr-warmup-iters": min(10, iterations - 1),
        "log-interval": iterations,
        "data-parallel-sharding-strategy": backend,
        "context-parallel-size": RANKS // dp,
    }
    return [*FLAGS.split(), *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]


def figures(losses: Sequence[float]) -> dict[str, float]:
    """Return the table's figures of a run: the mean loss of the last updates, and the last."""
    return {"loss": fmean(losses[-LAST:]), "last": losses[-1]}


def difference(without: Mapping[str, float], lasp: Mapping[str, float]) -> float:
    """Return the larger relative difference with LASP from without, of the final mean loss and of the last loss.

    Infinite if either is not finite.
    """
    found = [abs(lasp[name] / without[name] - 1) for name in ("loss", "last")]
    return max(found) if all(x == x for x in found) else float("inf")


def markdown(result: Result) -> str:
    """Format our table beside the paper's."""
    settings, theirs = result["settings"], published()
    last = min(LAST, settings["iterations"])
    lines = [
        "# LASP: convergence",
        "",
        f"{settings['iterations']} updates of {settings['sequences']} sequences of {settings['seq_length']} tokens, "
        f"2 layers of 64 channels, {settings['vocabulary']} vocabulary entries, on {settings['ranks']} processes: data "
        f"parallel {RANKS}, and data parallel {RANKS // CONTEXT} x context parallel {CONTEXT} with LASP. Loss in nats "
        f"per token, the mean of the last {last} updates, and in brackets the last. The difference is relative, of the "
        f"mean or of the last, whichever is more; it must be within {BOUND:.1%}. Beside it the paper's losses, of "
        f"models of 0.4B parameters.",
        "",
        f"{in_words(result['machine'])}.",
        "",
    ]
    body = []
    for row, pair in _pairs(result).items():
        model, backend = row.split("/")
        without, lasp = theirs[row].values()
        ours = [f"{run['loss']:.4f} ({run['last']:.4f})" for run in pair]
        beside = [f"{without:.3f}", f"{lasp:.3f}", f"{abs(lasp / without - 1):.1e}"]
        body.append([MODELS[model], BACKENDS[backend], *ours, f"{difference(*pair):.1e}", *beside])
    head = ["model", "backend", "without LASP", "with LASP", "difference", "paper: without", "with", "difference"]
    return "\n".join([*lines, *markdown_table(head, body), *_controls(result)]) + "\n"


def _controls(result: Result) -> list[str]:
    """Say what the loss is where states are dropped between ranks, for each model whose runs there are."""
    done, found = result["runs"], []
    for model, title in MODELS.items():
        without, dropped = (done.get(f"{model}/{CONTROLLED}/{way}") for way in ("without", CONTROL))
        if without and dropped:
            told = f"{dropped['loss']:.4f} ({dropped['last']:.4f}), {difference(without, dropped):.1e} apart"
            found.append(f"* {title}, {BACKENDS[CONTROLLED]}: {told}")
    return ["", "Control: the same with LASP where no rank gets the state of the one before.", "", *found] * bool(found)


def _pairs(result: Result) -> dict[str, list[dict[str, float]]]:
    """Return the two runs of each finished row, in the paper's order."""
    done = result["runs"]
    pairs = {row: [f"{row}/{way}" for way in WAYS] for row in rows()}
    return {row: [done[name] for name in pair] for row, pair in pairs.items() if all(name in done for name in pair)}


def outside(result: Result) -> list[str]:
    """Return the finished rows whose losses differ by more than the bound, and the controls that differ no more."""
    done, pairs = result["runs"], _pairs(result)
    wrong = [row for row, pair in pairs.items() if not difference(*pair) <= BOUND]
    for model in MODELS:
        row = f"{model}/{CONTROLLED}"
        if row in pairs and (control := done.get(f"{row}/{CONTROL}")):
            exact, dropped = difference(*pairs[row]), difference(pairs[row][0], control)
            wrong += [f"{row}/{CONTROL}"] * (not dropped > 100 * exact)
    return wrong


def apart(without: Sequence[float], lasp: Sequence[float]) -> list[float]:
    """Return per update the relative difference with LASP from without, averaged over the last updates."""
    each = [abs(b / a - 1) for a, b in zip(without, lasp, strict=True)]
    return [fmean(each[max(0, update + 1 - LAST) : update + 1]) for update in range(len(each))]


def train(rank: int, world_size: int, flags: Sequence[str], dropped: bool = False) -> list[float]:
    """Train one rank of a run of pretrain_gpt.py, with states dropped if asked; return the first rank's losses."""
    log = Records()
    if dropped:  # in this rank's process alone
        plain = state.passages
        state.passages = lambda *given: tuple(replace(one, source=None, target=None) for one in plain(*given))  # type: ignore[assignment]
    with trainer_of(pretrain_gpt, flags, log) as trainer:
        trainer.run()
    return [record["lm_loss"] for record in log.records]


def finished(wanted: Sequence[str], iterations: int, data: Path, path: Path) -> Result:
    """Train the wanted rows that ``path`` lacks, saving each run; return all that ``path`` then holds.

    Raises UserError: ``path`` holds runs of other settings, or another format; RuntimeError: a rank failed.
    """
    settings = {"iterations": iterations, **SIZES}
    result = kept(path) or {"settings": settings, "runs": {}}
    if result["settings"] != settings:
        raise UserError(f"{path} holds runs of {result['settings']}, not of {settings}; give another --results")
    names = [name for row in wanted for name in runs(row)]
    missing = [name for name in names if name not in result["runs"]]
    if missing:
        prepare(Request(vocab_size=VOCABULARY, max_bytes=4 << 20), data, progress=False)
        result.setdefault("machine", describe("cpu"))  # of the first runs; each has its date and commit
    else:
        print(f"all {len(names)} runs are in {path} already, nothing trained; --results DIR starts afresh")
    for name in missing:
        start = time.perf_counter()
        flags = command_line(name, data, iterations)
        losses = run_ranks(train, RANKS, flags, name.endswith(f"/{CONTROL}"), timeout=1800)[0]
        found = {**figures(losses), "seconds": time.perf_counter() - start, **stamp()}
        result["runs"][name] = {**found, "losses": losses}
        curves = {key: {"losses": run["losses"]} for key, run in result["runs"].items() if "losses" in run}
        bare = {key: {k: v for k, v in run.items() if k != "losses"} for key, run in result["runs"].items()}
        write_records(curves_of(path), {"runs": curves})
        write_records(path, {**result, "runs": bare})
        row, _, way = name.rpartition("/")
        said = f"loss {found['loss']:.6f} (last {found['last']:.6f}), {found['seconds']:.0f} s"
        print(f"{row:32}{way:9} {said}", flush=True)
    return result


def curves_of(path: Path) -> Path:
    """Return the file of all updates' losses, which stays out of the tree."""
    return path.with_suffix(".curves.jsonl")


def kept(path: Path) -> Result | None:
    """Read a file of results and its curves; None if it does not exist."""
    if not path.exists():
        return None
    result = {"runs": {}, **read_records(path)}
    if "settings" not in result:
        raise UserError(f"{path} holds no settings of runs; give another --results")
    curves = read_records(curves_of(path)).get("runs", {}) if curves_of(path).exists() else {}
    for name, run in result["runs"].items():
        run |= curves.get(name, {})
    return result


def picture(result: Result, path: Path) -> None:
    """Draw a column per model: the losses of all runs, with LASP dotted, and below each pair's difference."""
    from matplotlib.figure import Figure

    from tools.pictures import FAINT, PALETTE, plain

    figure = Figure(figsize=(10, 6.6), layout="constrained")
    axes = figure.subplots(2, len(MODELS), sharex=True, sharey="row", height_ratios=(2, 3))
    for (losses, differences), (model, title) in zip(axes.T, MODELS.items(), strict=True):
        own = [name for name in result["runs"] if name.startswith(f"{model}/") and not name.endswith(CONTROL)]
        curves = {name: result["runs"][name]["losses"] for name in own}
        for name, curve in curves.items():
            losses.plot(curve, ":" if name.endswith("/lasp") else "-", color=PALETTE[0], linewidth=1.2, alpha=0.5)
        losses.set_title(f"{title}: loss of {len(curves)} runs", loc="left", fontsize=11)
        alike: dict[tuple[float, ...], list[str]] = {}
        for backend in BACKENDS:
            pair = [curves[name] for way in WAYS if (name := f"{model}/{backend}/{way}") in curves]
            if len(pair) == len(WAYS):
                alike.setdefault(tuple(apart(*pair)), []).append(BACKENDS[backend])
        colours = PALETTE[:4] + PALETTE[5:6] + PALETTE[7:]
        for colour, (difference, names) in zip(colours, alike.items(), strict=False):
            differences.plot(difference, color=colour, linewidth=1.4, label=", ".join(names))
        differences.axhline(BOUND, color=FAINT, linestyle="--", linewidth=1)
        at = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 4), "textcoords": "offset points"}
        differences.annotate(f"bound {BOUND:.1%}", (1, BOUND), ha="right", color=FAINT, fontsize=9, **at)
        differences.set(yscale="log", xlabel="update")
        if alike:
            differences.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0, 0.66))
        differences.set_title("difference with LASP from without, by backend", loc="left", fontsize=11)
        plain(losses)
        plain(differences)
    axes[0, 0].set_ylabel("loss (nats per token)")
    axes[1, 0].set_ylabel(f"relative difference, mean of {LAST} updates")
    figure.savefig(path, dpi=110)


def table(wanted: Sequence[str], iterations: int, data: Path, path: Path) -> list[str]:
    """Train missing runs, write and print the table; return the rows outside the bound. Raises as ``finished``."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks' server
    if iterations < 2:
        raise UserError(f"--iterations is {iterations}; it must be 2 or more")
    result = finished(wanted, iterations, data, path)
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    if without := [name for name, run in result["runs"].items() if "losses" not in run]:
        print(f"no picture: the curves of {len(without)} runs are not in {curves_of(path)}; --results DIR has all")
    else:
        picture(result, path.with_suffix(".png"))
    print("\n" + markdown(result))
    return outside(result)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command; finished runs stay, and the same command goes on. Return its exit status."""
    parser, every, data = parser_for("python -m papers.convergence", __doc__), rows(), Path("runs/papers/stdlib")
    parser.add_argument("--rows", nargs="+", choices=every, default=every, metavar="ROW", help="of: %(choices)s")
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="updates (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS.parent, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--data", type=Path, default=data, metavar="PREFIX", help="%(default)s")
    args = parser.parse_args(argv)
    if wrong := table(args.rows, args.iterations, args.data, args.results / RESULTS.name):
        raise UserError(f"with LASP the loss differs by more than {BOUND:.1%} in {', '.join(wrong)}")


if __name__ == "__main__":
    run_command(main)
