"""Measure steps of a video transformer over ranks, by Longmesh and by diffusers itself.

    python -m bench.video
    python -m bench.video --only packed --ranks 2

`ulysses`: forward and backward of one clip by parallel.diffusers and by diffusers' own Ulysses, on
the same ranks in turns; their gradients are compared before they are timed. `packed`: clips of
three sizes, either packed into one sequence, or run one after the other, or padded to the largest.
The ranks share the cores of this machine, with one thread each.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness import MeasureError, add_rounds, as_measure_errors
from parallel.diffusers import shard
from runtime.machine import describe
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, parser_for, positive, run_command

SHAPE: dict[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 64,
    "ffn_dim": 1024,
    "num_layers": 4,
}
"""Configuration of the Wan model that is measured."""
GRIDS = {"ulysses": [(5, 12, 20)], "packed": [(5, 12, 20), (2, 8, 12), (1, 12, 12)]}
"""Frames, height and width of each clip, in tokens, keyed by kind."""
TEXT_LEN = 32
MAX_DIFFERENCE = 1e-4
"""Maximum difference of two float32 gradients, relative to the largest element."""
Step = Callable[[], list[Tensor]]


def clip_of(grid: tuple[int, int, int], batch: int = 1) -> dict[str, Tensor]:
    """Return the model's inputs for ``batch`` clips; ``grid`` is their size in tokens."""
    frames, height, width = grid
    generator = torch.Generator().manual_seed(frames * height * width)
    return {
        "hidden_states": torch.randn(batch, 16, frames, 2 * height, 2 * width, generator=generator),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, TEXT_LEN, 64, generator=generator),
    }


def step_of(
    model: nn.Module,
    clips: list[dict[str, Tensor]],
    predict: Callable[[list[dict[str, Tensor]]], list[Tensor]],
    divisor: int,
) -> Step:
    """Return a step that computes gradients, summed over ranks and divided by ``divisor``."""
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        loss = torch.zeros(())
        for prediction in predict(clips):
            loss = loss + prediction.square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= divisor
        return list(gradients)

    return step


def forwards(model: nn.Module) -> Callable[[list[dict[str, Tensor]]], list[Tensor]]:
    """Return a function that runs the model's own forward pass on one clip after another."""
    return lambda clips: [model(**clip, return_dict=False)[0] for clip in clips]


@contextmanager
def counting_ranks(size: int) -> Iterator[None]:
    """Let diffusers count ``size`` accelerators, since it divides by their number (0 on a CPU)."""
    originals = [(torch.accelerator, "device_count"), (torch._C, "_get_accelerator")]
    functions = [getattr(module, name) for module, name in originals]
    replacements = [lambda: size, lambda: torch.device("cpu")]
    try:
        for (module, name), replacement in zip(originals, replacements, strict=True):
            setattr(module, name, replacement)
        yield
    finally:
        for (module, name), function in zip(originals, functions, strict=True):
            setattr(module, name, function)


def contestants_of(kind: str, size: int) -> dict[str, Step]:
    """Return the steps of a kind's contestants, keyed by name; all have the same weights."""
    from diffusers import ContextParallelConfig, WanTransformer3DModel

    torch.manual_seed(0)
    plain: Any = WanTransformer3DModel(**SHAPE)
    clips = [clip_of(grid) for grid in GRIDS[kind]]
    ours: Any = deepcopy(plain)
    if kind == "ulysses":
        shard(ours, dist.group.WORLD, method="ulysses")
        theirs = deepcopy(plain)
        with counting_ranks(size):
            theirs.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size))
        return {
            "longmesh ulysses": step_of(ours, clips, forwards(ours), size),
            "diffusers ulysses": step_of(theirs, clips, forwards(theirs), 1),
        }

    cp = shard(ours, dist.group.WORLD, method="exchange")
    padded = deepcopy(plain)
    shard(padded, dist.group.WORLD, method="exchange")
    largest = [clip_of(GRIDS[kind][0], batch=len(clips))]
    return {
        "packed": step_of(ours, clips, cp.packed, size),
        "one after the other": step_of(ours, clips, forwards(ours), size),
        "padded to the largest": step_of(padded, largest, forwards(padded), size),
    }


def measure(rank: int, size: int, kind: str, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time the contestants' steps in turns; compare the gradients of the first two."""
    torch.set_num_threads(1)
    steps = contestants_of(kind, size)
    first, second, *_ = (step() for step in steps.values())
    difference = 0.0
    for x, y in zip(first, second, strict=True):
        difference = max(difference, float((x - y).abs().max() / y.abs().max().clamp(min=1e-12)))

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    start = time.monotonic()
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
        spent = torch.tensor(time.monotonic() - start)
        dist.broadcast(spent, 0)
        if spent > max_seconds:
            break
    return {"seconds": seconds, "difference": difference}


def line_of(kind: str, ranks: int, result: Mapping[str, Any]) -> str:
    """Format the result of a kind on ``ranks`` ranks as one line."""
    times = []
    for name, seconds in result["seconds"].items():
        times.append(f"{name} {median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    tokens = [frames * height * width for frames, height, width in GRIDS[kind]]
    return (
        f"{kind}, {ranks} ranks, tokens {tokens}: {', '.join(times)}; gradients of the first two "
        f"differ by {result['difference']:.1e}"
    )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time the contestants of each kind, and check that their gradients agree."""
    parser = parser_for("python -m bench.video", __doc__)
    parser.add_argument("--only", choices=[*GRIDS], help="measure only this kind (default: all)")
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[2, 4], help="numbers of ranks"
    )
    add_rounds(parser, 7, 150)
    args = parser.parse_args(argv)
    machine = describe("cpu")
    print(f"{machine['device']}, torch {machine['torch']}")
    for kind in [args.only] if args.only else GRIDS:
        for ranks in args.ranks:
            with as_measure_errors():
                result = run_ranks(measure, ranks, kind, args.repeats, args.max_seconds)[0]
            print(line_of(kind, ranks, result), flush=True)
            if not result["difference"] <= MAX_DIFFERENCE:
                raise MeasureError(
                    "the gradients of the first two contestants differ too much, so they do not "
                    "compute the same and their times mean nothing"
                )


if __name__ == "__main__":
    run_command(main)
