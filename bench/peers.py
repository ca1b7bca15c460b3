"""Measure the same work by Longmesh and by other packages, in one run, taking turns.

    make peers
    # attention on 2 processes, then training in one
    python -m bench.peers
    python -m bench.peers --only attention --lengths 2048 4096

Attention: forward + backward, causal, 8 heads of 64 in float32, 2 processes pinned to a core each.
Training: steps of llama_tiny in one process with a thread for each core, Longmesh's without and
with --compile.

Every contestant computes the same: outputs and gradients of the attention are compared before they
are timed; in training, all have the same shapes and micro-batches, the mean loss over all tokens,
clipping to norm 1, and torch's fused AdamW in float32, but different random weights. A package that
cannot run on this machine is listed with its reason.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.attention import measure_cpu
from bench.harness import add_rounds, clocked, measured
from bench.shapes import MaskedShape
from data.loader import batches
from data.text.prepare import Request, prepare
from model.hf import config_to_hf
from runtime.errors import UserError
from runtime.machine import describe, results_file, usable_cores
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import write_records
from tools.common.training import Records, trainer_of
from train.batches import sum_over_ranks
from train.gradients import reduce_and_clip
from train.tasks.language import LanguageTask

OURS = ("zigzag", "striped")
CONFIG = Path("configs/models/llama_tiny.toml")
FLAGS: tuple[list[str], ...] = ([], ["--compile"])
"""Sets of flags to add to Longmesh's training; each set is measured by itself."""
SETTLE = 2
"""Number of training steps at the start that do not count."""
MODULES = {"ring-attention-pytorch": "ring_attention_pytorch", "transformers": "transformers"}
"""Modules of the packages to compare with, keyed by package: one for attention, then one for
training. docs/evidence/speed.md says why other packages are not measured."""
ATTENTION, TRAINING = MODULES


def installed(name: str) -> bool:
    """Return True if a package is installed; only then is it measured."""
    return find_spec(MODULES[name]) is not None


@contextmanager
def steps_of(
    packages: Sequence[str], config: Path, data: Path, flags: Sequence[str]
) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield an optimizer step of "longmesh" and of each package, on the same tokens.

    The steps are keyed by name; each returns its loss.

    Args:
        config: configuration of ``pretrain_gpt.py``; ``flags`` are added.
        data: prefix of the text, with its tokenizer in the same folder.
    """
    run_flags = ["--config", str(config), "--save", str(data.parent / "run")]
    run_flags += ["--data-path", str(data), "--tokenizer-model", f"{data}.model"]
    run_flags += ["--context-parallel-size", "1", *flags]
    with trainer_of(LanguageTask, run_flags, Records()) as trainer:
        mesh = trainer.mesh
        step = next(batches(trainer.train_data, trainer.batches.batching, 0))
        local = [trainer.task.objective.local(batch) for batch in step]
        valid = sum(int(batch["count"]) for batch in local)

        def longmesh_step() -> float:
            loss = sum_over_ranks(trainer.runner.forward_backward(local, valid), mesh)
            mean, _ = reduce_and_clip(
                trainer.runner, mesh.dp_cp, trainer.config.optimizer.clip_grad, loss
            )
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
            return mean

        sequences = [(batch["tokens"], batch["labels"]) for batch in local]
        length = len(sequences[0][0][0])
        steps = {"longmesh": longmesh_step}
        if TRAINING in packages:
            from transformers import LlamaConfig, LlamaForCausalLM

            hf_config = config_to_hf(trainer.config.model, {"max_position_embeddings": length})
            hf_config = hf_config | {"use_cache": False}
            model = LlamaForCausalLM(LlamaConfig.from_dict(hf_config)).train()
            steps[TRAINING] = _step(model, sequences)
        yield steps


def _step(model: nn.Module, sequences: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        total = 0.0
        for tokens, labels in sequences:
            logits = model(tokens).logits
            logits = logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100) / len(sequences)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def attention(length: int, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time the methods of Longmesh and the packages, forward and backward; return a ``row``.

    Raises UserError and MeasureError as ``bench.attention.measure_cpu`` does.
    """
    others = [f"ring@{ATTENTION}"] if installed(ATTENTION) else []
    work = MaskedShape(seq_length=length)
    result = measure_cpu(work, (*OURS, *others), repeats=repeats, max_seconds=max_seconds)
    seconds = {}
    for name, figures in result["contestants"].items():
        seconds[name] = figures["seconds"]
    return {"length": length, **row(seconds, OURS, others)}


def training(repeats: int, flags: list[str]) -> dict[str, Any]:
    """Time training steps of Longmesh and of the packages; return a ``row``."""
    packages = [TRAINING] if installed(TRAINING) else []
    torch.set_num_threads(len(usable_cores()))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "stdlib"
        prepare(Request(), data, progress=False)
        with steps_of(packages, CONFIG, data, flags) as steps:
            clocks = {name: clocked(step) for name, step in steps.items()}
            seconds = measured(clocks, repeats + SETTLE)
    counted = {name: step_seconds[SETTLE:] for name, step_seconds in seconds.items()}
    return {"flags": flags, **row(counted, ("longmesh",), packages)}


def row(
    seconds: dict[str, list[float]], ours: Sequence[str], others: Sequence[str]
) -> dict[str, Any]:
    """Return each contestant's median time and quartiles, and Longmesh's speedup.

    The speedup, ``against_best``, is that over the best other package; None if none is installed.
    """
    medians = {}
    quartiles = {}
    for name, step_seconds in seconds.items():
        medians[name] = median(step_seconds)
        quartiles[name] = quantiles(step_seconds, n=4, method="inclusive")

    against_best = None
    if others:
        best_other = min(medians[name] for name in others)
        against_best = best_other / min(medians[name] for name in ours)
    return {"median": medians, "quartiles": quartiles, "against_best": against_best}


def line_of(row: dict[str, Any]) -> str:
    """Format the result of ``row`` as one line."""
    times = []
    for name, median_seconds in row["median"].items():
        low, _, high = row["quartiles"][name]
        times.append(f"{name} {median_seconds:.3f} s ({low:.3f} to {high:.3f})")

    title = str(row["length"]) if "length" in row else " ".join(["training", *row["flags"]])
    line = f"{title}: {', '.join(times)}"
    if row["against_best"] is not None:
        line += f"; Longmesh's best is {row['against_best']:.2f} times as fast as the best other"
    return line


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time Longmesh and other packages in turns, and print and write the figures."""
    parser = parser_for("python -m bench.peers", __doc__)
    parser.add_argument(
        "--only", choices=("attention", "training"), help="measure only this kind (default: both)"
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[2048, 4096, 8192],
        metavar="N",
        help="numbers of tokens per sequence",
    )
    add_rounds(parser, 9, 150)
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="folder to which figures are also written, as in bench/results",
    )
    args = parser.parse_args(argv)
    if args.repeats < 2:
        raise UserError(f"--repeats is {args.repeats}; it must be 2 or more to compute quartiles")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    versions = {name: version(name) for name in MODULES if installed(name)}
    machine = describe("cpu")
    result: dict[str, Any] = {"benchmark": "peers", "machine": machine, "versions": versions}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"{machine['device']}, torch {machine['torch']}; {packages}")
    for name in MODULES.keys() - versions.keys():
        print(f"{name} is not measured because it is not installed; run `make peers` to install it")
    if not versions:
        raise UserError(
            "none of the packages to compare with is installed; run `make peers` to install them"
        )
    if args.only != "training":
        for length in args.lengths:
            result.setdefault("attention", []).append(
                attention(length, args.repeats, args.max_seconds)
            )
            print(line_of(result["attention"][-1]), flush=True)
    if args.only != "attention":
        for flags in FLAGS:
            result.setdefault("training", []).append(training(args.repeats, flags))
            print(line_of(result["training"][-1]), flush=True)
    if args.results:
        path = results_file(args.results, "peers", machine)
        write_records(path, result)
        print(f"written: {path}")


if __name__ == "__main__":
    run_command(main)
