"""Measure the same work by us and by other packages, in one run, taking turns.

    make peers python -m bench.peers                                        # attention on 2
    processes, then training in one python -m bench.peers --only attention --lengths 2048 4096

Attention: forward + backward, causal, 8 heads of 64 in float32, 2 processes pinned to a core each.
Training: steps of llama_tiny in one process with a thread for each core, ours as it is and with
--compile. Every contestant computes the same: outputs and gradients of the attention are compared
before they are timed; in training everyone has the same shapes, micro-batches, mean loss over all
tokens, clipping to norm 1 and torch's fused AdamW in float32, and each its own draw of weights. A
package that cannot run here is listed with its reason.
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
"""More flags of our training, each measured."""
SETTLE = 2
"""First steps of a training that do not count."""


MODULES = {"ring-attention-pytorch": "ring_attention_pytorch", "transformers": "transformers"}
"""Packages whose attention and whose training are measured; docs/evidence/speed.md says why others
are not.
"""
ATTENTION, TRAINING = MODULES


def installed(name: str) -> bool:
    """Return whether a package is measured here."""
    return find_spec(MODULES[name]) is not None


@contextmanager
def steps_of(
    packages: Sequence[str], config: Path, data: Path, flags: Sequence[str]
) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield an optimizer step on fixed tokens, which returns its loss, of "longmesh" and of each
    package.

    Args:
        config: of ``pretrain_gpt.py``, with more ``flags``.
        data: prefix of the text, with its tokenizer beside it.
    """
    flags_of_run = ["--config", str(config), "--save", str(data.parent / "run")]
    flags_of_run += ["--data-path", str(data), "--tokenizer-model", f"{data}.model"]
    with trainer_of(
        LanguageTask, [*flags_of_run, "--context-parallel-size", "1", *flags], Records()
    ) as trainer:
        mesh = trainer.mesh
        step = next(batches(trainer.train_data, trainer.batches.batching, 0))
        local = [trainer.task.objective.local(batch) for batch in step]
        valid = sum(int(batch["count"]) for batch in local)

        def ours() -> float:
            loss = sum_over_ranks(trainer.runner.forward_backward(local, valid), mesh)
            mean, _ = reduce_and_clip(
                trainer.runner, mesh.dp_cp, trainer.config.optimizer.clip_grad, loss
            )
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
            return mean

        sequences = [(batch["tokens"], batch["labels"]) for batch in local]
        length = len(sequences[0][0][0])
        steps = {"longmesh": ours}
        if TRAINING in packages:
            from transformers import LlamaConfig, LlamaForCausalLM

            theirs = config_to_hf(trainer.config.model, {"max_position_embeddings": length})
            model = LlamaForCausalLM(LlamaConfig.from_dict(theirs | {"use_cache": False})).train()
            steps[TRAINING] = _step(model, sequences)
        yield steps


def _step(model: nn.Module, sequences: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        total = 0.0
        for tokens, labels in sequences:
            logits = model(tokens).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100
            ) / len(sequences)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def attention(length: int, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time our methods and the packages', forward and backward; a row as ``row``'s.

    Raises UserError, MeasureError: as ``bench.attention.measure_cpu``.
    """
    theirs = [f"ring@{ATTENTION}"] if installed(ATTENTION) else []
    measured_rows = measure_cpu(
        MaskedShape(seq_length=length), (*OURS, *theirs), repeats=repeats, max_seconds=max_seconds
    )
    return {
        "length": length,
        **row(
            {name: figures["seconds"] for name, figures in measured_rows["contestants"].items()},
            OURS,
            theirs,
        ),
    }


def training(repeats: int, flags: list[str]) -> dict[str, Any]:
    """Time training steps of ours and of the packages; a row as ``row``'s."""
    packages = [TRAINING] if installed(TRAINING) else []
    torch.set_num_threads(len(usable_cores()))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "stdlib"
        prepare(Request(), data, progress=False)
        with steps_of(packages, CONFIG, data, flags) as steps:
            seconds = measured(
                {name: clocked(step) for name, step in steps.items()}, repeats + SETTLE
            )
    return {
        "flags": flags,
        **row({name: all_of[SETTLE:] for name, all_of in seconds.items()}, ("longmesh",), packages),
    }


def row(
    seconds: dict[str, list[float]], ours: Sequence[str], theirs: Sequence[str]
) -> dict[str, Any]:
    """Return medians and quartiles by contestant, and how many times as fast our fastest is as
    their fastest.
    """
    medians = {name: median(all_of) for name, all_of in seconds.items()}
    return {
        "median": medians,
        "quartiles": {
            name: quantiles(all_of, n=4, method="inclusive") for name, all_of in seconds.items()
        },
        "against_best": min(map(medians.__getitem__, theirs)) / min(map(medians.__getitem__, ours))
        if theirs
        else None,
    }


def line_of(row: dict[str, Any]) -> str:
    """Show a row in a line."""
    spread = {
        name: f"({low:.3f} to {high:.3f})" for name, (low, _, high) in row["quartiles"].items()
    }
    times = ", ".join(
        f"{name} {middle:.3f} s {spread[name]}" for name, middle in row["median"].items()
    )
    ratio = (
        ""
        if row["against_best"] is None
        else f"; our best is {row['against_best']:.2f} times as fast as theirs"
    )
    return f"{row['length'] if 'length' in row else ' '.join(['training', *row['flags']])}: {times}{ratio}"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.peers", __doc__)
    parser.add_argument("--only", choices=("attention", "training"), help="measure this alone")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[2048, 4096, 8192],
        metavar="N",
        help="tokens",
    )
    add_rounds(parser, 9, 150)
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="write them there too, as into bench/results"
    )
    args = parser.parse_args(argv)
    if args.repeats < 2:
        raise UserError(f"--repeats is {args.repeats}; it must be 2 or more, to have quartiles")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    versions = {name: version(name) for name in MODULES if installed(name)}
    machine = describe("cpu")
    result: dict[str, Any] = {"benchmark": "peers", "machine": machine, "versions": versions}
    print(
        f"{machine['device']}, torch {machine['torch']}; {', '.join(map(' '.join, versions.items()))}"
    )
    for name in MODULES.keys() - versions.keys():
        print(f"not measured: {name} is not installed; make peers installs it")
    if not versions:
        raise UserError("no other package is installed; make peers installs them")
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
