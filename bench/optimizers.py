"""Compare optimizers: the losses of equal runs with each, and the time of a step.

A LLaMA of 1.9 million parameters trains on the sources of Python's standard library, on one CPU
thread, with AdamW and with Muon: the same batches, tokens and schedule. Each optimizer first gets
the same learning rates with one seed. If its best rate is the first or the last, the next one
beyond follows. Its best rate then trains with further seeds. A finished run is written at once,
and the same command resumes the rest.

The time of a step is that of the optimizer alone, at five million parameters; the optimizers take
turns.

    python -m bench.optimizers                  # 11 runs, an hour on 2 busy cores; then times
    python -m bench.optimizers --only steps
    python -m bench.optimizers --iterations 4 --rates 2e-3 4e-3 --seeds 1 2 --results runs/bench \\
        --picture runs/bench/optimizers.png
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from bench.harness import add_outputs, clocked, measured
from bench.runs import Result, flags_of, keep_run, read_runs
from data.text.prepare import Request, prepare
from model.registry import build_model
from runtime.errors import UserError
from runtime.machine import describe, results_file
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import PALETTE, Column, Table, plain, write_records
from tools.common.training import Records, trainer_of
from tools.prepare_data import DEFAULT_PREFIX, DEFAULT_VOCAB_SIZE
from train.config.language import parse_args
from train.optimizers.config import build_optimizer
from train.tasks.language import LanguageTask

OPTIMIZERS = {"adam": "AdamW", "muon": "Muon"}
FLAGS = """
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4
    --seq-length 256 --micro-batch-size 8 --global-batch-size 8 --split 95,5,0
    --min-lr 0 --lr-decay-style cosine --eval-iters 16 --log-interval 10
    --save none --save-interval none --device cpu
"""
RATES = (2e-3, 4e-3, 8e-3)
SEEDS = (1234, 1235, 1236)
MAX_RATES = 8
"""Number of rates of an optimizer beyond which none follows."""
STEPS = {
    "AdamW": "--optimizer adam",
    "Muon, high": "--optimizer muon --muon-fp32-matmul-prec high",
    "Muon, low": "--optimizer muon --muon-fp32-matmul-prec low",
}
"""Flags of each timed step."""
STEP_MODEL = f"""
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 4
    --num-query-groups 2 --vocab-size {DEFAULT_VOCAB_SIZE} --mock-data --lr 1e-3
"""
LOSSES: dict[str, Column] = {
    "optimizer": "{name}",
    "rate": "{rate:g}",
    "seeds": "{seeds}",
    "validation loss": "{loss:.4f}",
    "standard deviation": "{spread:.4f}",
}
TIMES: dict[str, Column] = {
    "step": "{name}",
    "median, ms": lambda row: f"{1e3 * row['median']:.1f}",
    "of AdamW's": "{ratio:.1f}",
    "minimum, ms": lambda row: f"{1e3 * min(row['seconds']):.1f}",
}


def command_line(optimizer: str, rate: float, seed: int, iterations: int, data: Path) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run."""
    flags = {
        "optimizer": optimizer,
        "lr": rate,
        "seed": seed,
        "train-iters": iterations,
        "lr-warmup-iters": iterations // 10,
        "eval-interval": max(1, iterations // 5),
        "data-path": data,
        "tokenizer-model": f"{data}.model",
    }
    return [*FLAGS.split(), *flags_of(flags)]


def train(flags: Sequence[str]) -> dict[str, Any]:
    """Train in this process; return the final validation loss, and its curve over tokens."""
    log = Records()
    with trainer_of(LanguageTask, flags, log) as trainer:
        trainer.train()
    curve = []
    for record in log.records:
        if "validation_loss" in record:
            curve.append([record["consumed_tokens"], record["validation_loss"]])
    return {"loss": curve[-1][1], "tokens": curve[-1][0], "curve": curve}


def name_of(optimizer: str, rate: float, seed: int) -> str:
    """Return a run's name in the results."""
    return f"{optimizer} {rate:g} {seed}"


def search(
    optimizer: str, rates: Sequence[float], seeds: Sequence[int], run: Callable[..., float]
) -> float:
    """Run the rates with the first seed, then the best with the others; return the best rate.

    A rate that is twice the largest, or half of the smallest, follows as long as this one is best.

    Args:
        run: trains with (optimizer, rate, seed) and returns the loss.
    """
    losses = {rate: run(optimizer, rate, seeds[0]) for rate in sorted(rates)}
    while True:
        best = min(losses, key=losses.__getitem__)
        following = None
        if best == max(losses):
            following = 2 * best
        elif best == min(losses):
            following = best / 2
        if following is None or len(losses) >= MAX_RATES:
            break
        losses[following] = run(optimizer, following, seeds[0])
    for seed in seeds[1:]:
        run(optimizer, best, seed)
    return best


def compare(args: argparse.Namespace, result: Result, path: Path) -> None:
    """Train and save all runs that ``result`` lacks, and the best rate of each optimizer."""
    prepare(Request(), args.data, progress=False)

    def run(optimizer: str, rate: float, seed: int) -> float:
        name = name_of(optimizer, rate, seed)
        if name not in result["runs"]:
            flags = command_line(optimizer, rate, seed, args.iterations, args.data)
            figures = keep_run(result, path, name, partial(train, flags))
            print(f"{name}: loss {figures['loss']:.4f}, {figures['seconds']:.0f} s", flush=True)
        loss = float(result["runs"][name]["loss"])
        return loss if loss == loss else float("inf")  # a loss that is not a number is no best

    result["best"] = {}
    for optimizer in OPTIMIZERS:
        result["best"][optimizer] = search(optimizer, args.rates, args.seeds, run)
    write_records(path, result)


def step_of(flags: str) -> tuple[Callable[[], None], int]:
    """Return a step of an optimizer over a model with drawn gradients, and its parameters."""
    config = parse_args([*STEP_MODEL.split(), *flags.split()])
    model = build_model(config.model)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer = build_optimizer(config.optimizer, model)
    return optimizer.step, sum(parameter.numel() for parameter in model.parameters())


def time_steps(repeats: int) -> list[dict[str, Any]]:
    """Return a row for each timed step: its median seconds on one thread, and the ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = {}
    for name, flags in STEPS.items():
        step, parameters = step_of(flags)
        step()  # creates the state
        steps[name] = clocked(step)
    times = measured(steps, repeats)
    torch.set_num_threads(threads)

    rows = []
    first = median(times["AdamW"])
    for name, seconds in times.items():
        ratio = median(seconds) / first
        row = {"name": name, "parameters": parameters, "median": median(seconds)}
        rows.append(row | {"ratio": ratio, "seconds": seconds})
    return rows


def losses_of(result: Mapping[str, Any], optimizer: str, rate: float) -> list[float]:
    """Return the final losses of an optimizer's runs with a rate, a run for each seed."""
    losses = []
    for name, run in result["runs"].items():
        if name.rpartition(" ")[0] == f"{optimizer} {rate:g}":
            losses.append(run["loss"])
    return losses


def paired(result: Mapping[str, Any]) -> list[float]:
    """Return Muon's final loss less AdamW's at their best rates, for each seed of both."""
    losses: dict[str, dict[str, float]] = {}
    for optimizer, rate in result["best"].items():
        losses[optimizer] = {}
        for name, run in result["runs"].items():
            start, _, seed = name.rpartition(" ")
            if start == f"{optimizer} {rate:g}":
                losses[optimizer][seed] = run["loss"]
    differences = []
    for seed, loss in losses["adam"].items():
        if seed in losses["muon"]:
            differences.append(losses["muon"][seed] - loss)
    return differences


def loss_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each optimizer and rate: the mean loss, and its spread over seeds."""
    rows = []
    for optimizer, title in OPTIMIZERS.items():
        rates = {float(name.split()[1]) for name in result["runs"] if name.startswith(optimizer)}
        for rate in sorted(rates):
            losses = losses_of(result, optimizer, rate)
            row = {"name": title, "rate": rate, "seeds": len(losses), "loss": fmean(losses)}
            if len(losses) > 1:
                row["spread"] = stdev(losses)
            rows.append(row)
    return rows


def tables(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of both tables, as Markdown."""
    lines = []
    if result["runs"]:
        lines += Table(LOSSES, loss_rows(result)).markdown("---:")
    if "best" in result:
        words = ", ".join(f"{difference:+.4f}" for difference in paired(result))
        lines += ["", f"Muon's loss less AdamW's at the best rates, seed by seed: {words}"]
    if "steps" in result:
        lines += ["", *Table(TIMES, result["steps"]).markdown("---:")]
    return lines


def picture(result: Mapping[str, Any], path: Path) -> None:
    """Draw the validation losses of each optimizer's best rate over tokens, a line per seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (optimizer, title), colour in zip(OPTIMIZERS.items(), PALETTE, strict=False):
        rate = result["best"][optimizer]
        label = f"{title}, lr {rate:g}"
        for name, run in result["runs"].items():
            if name.rpartition(" ")[0] == f"{optimizer} {rate:g}":
                tokens, losses = zip(*run["curve"], strict=True)
                axes.plot(tokens, losses, "o-", color=colour, label=label, markersize=3)
                label = "_"  # a name for the first line alone
    axes.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    plain(axes)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_for("python -m bench.optimizers", __doc__)
    add = parser.add_argument
    add("--only", choices=("losses", "steps"), help="measure one of the two (default: both)")
    add(
        "--iterations",
        type=positive,
        default=200,
        metavar="N",
        help="number of updates of a run (default: %(default)s)",
    )
    add("--rates", type=float, nargs="+", default=RATES, help="learning rates to begin with")
    add("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of the best rates")
    add("--repeats", type=positive, default=21, help="number of timed steps (default: %(default)s)")
    add(
        "--data",
        type=Path,
        default=Path(DEFAULT_PREFIX),
        metavar="PREFIX",
        help="prefix of the text, written if it is missing (default: %(default)s)",
    )
    add_outputs(parser, "optimizers", "optimizers.png")
    args = parser.parse_args(argv)
    if args.iterations < 2:
        raise UserError(f"--iterations is {args.iterations}; it must be 2 or more")
    return args


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Train the runs that are missing, time the steps, print the tables, and write them."""
    args = _parse(argv)
    path = results_file(args.results, "optimizers", describe("cpu"))
    result = read_runs(path, {"iterations": args.iterations, "flags": " ".join(FLAGS.split())})
    if args.only != "steps":
        compare(args, result, path)
        picture(result, args.picture)
        print(f"written: {args.picture}")
    if args.only != "losses":
        result.setdefault("machine", describe("cpu"))
        result["steps"] = time_steps(args.repeats)
        result["load_average"] = list(os.getloadavg())
        write_records(path, result)
    print("\n".join(tables(result)))
    print(f"written: {path}")


if __name__ == "__main__":
    run_command(main)
