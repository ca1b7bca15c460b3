"""A run on its mesh against the same in one process, both shrunk: everything compared in the order
of a step.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.ranks import run_ranks
from tools.parity.modules import GRADIENT, Piece, furthest_of_modules
from tools.parity.rank import RankResult, samples_of, train
from tools.parity.shrink import shrunk
from train.callbacks.metrics import loss_name
from train.config.common import CommonConfig
from train.config.flags import write_toml
from train.tasks.registry import task_of

LOSS, NORM = 2e-6, 1e-6
"""Bounds on the loss, and relative on the gradient norm."""
MODULES, PARAMETERS = 1e-4, 2e-5
"""Bounds on what modules return and its gradients, and on parameters' gradients; rounding makes
some 1e-6.
"""
SECONDS = 900.0


@dataclass(frozen=True)
class Run:
    """A finished run, merged from its ranks."""

    records: list[dict[str, Any]]
    tensors: dict[str, dict[str, torch.Tensor]]
    memory_mb: float
    copies_differ: tuple[str, ...]
    """Tensors of which two ranks hold different copies."""
    pieces: list[dict[str, list[Piece]]]
    """Notes of each rank on its modules."""


class Difference(NamedTuple):
    """A difference from one process, the largest value there, and the bound on the one by the
    other.
    """

    what: str
    size: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        """True where the bound holds; it does not for NaN."""
        return self.size <= self.bound * self.largest

    def __str__(self) -> str:
        return f"{self.what}, by {self.size:.1e} of {self.largest:.1e}"


def merged(ranks: list[RankResult]) -> Run:
    """Merge the results of a run's ranks."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    digests: dict[tuple[str, str], set[str]] = {}
    for rank in ranks:
        for moment, values in rank.tensors.items():
            tensors.setdefault(moment, {}).update(values)
        for moment, names in rank.digests.items():
            for name, digest in names.items():
                digests.setdefault((moment, name), set()).add(digest)
    differing = tuple(
        f"{name} ({moment})" for (moment, name), seen in digests.items() if len(seen) > 1
    )
    memory, pieces = max(rank.memory_mb for rank in ranks), [rank.pieces for rank in ranks]
    return Run(ranks[0].records, tensors, memory, differing, pieces)


def furthest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any element; infinite if a name or shape differs."""
    if {n: t.shape for n, t in got.items()} != {n: t.shape for n, t in want.items()}:
        return float("inf")
    return max((got[name] - want[name]).abs().max().item() for name in want)


def compared(
    asked: CommonConfig,
    world_size: int | None = None,
    sabotage: Callable[[], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Difference]:
    """Train a run of ``world_size`` processes, shrunk, on its mesh and in one process; return all
    differences in order.

    Args:
        sabotage: breaks something in each process of the mesh.
        say: takes lines about the progress.

    Raises UserError: the run cannot be shrunk, or its data cannot be read; RuntimeError: a process
    failed, with its traceback.
    """
    small, alone, ranks = shrunk(asked, world_size)
    shape, batch = small.model, small.train.batch_size(1)
    pp, cp, tp = small.mesh.sizes
    say(
        f"{shape.num_layers} layers of {shape.hidden_size} channels, {shape.num_attention_heads} heads in "
        f"{shape.query_groups} groups, sequences of {small.sequence_length}, {small.context.title}; {ranks} processes: "
        f"pp {pp} x dp {ranks // (pp * cp * tp)} x cp {cp} x tp {tp}"
    )
    samples, source = samples_of(asked, small, 3 * batch)
    say(f"samples: {source}")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        file, toml = Path(folder) / "samples.pt", Path(folder) / "small.toml"
        torch.save(samples, file)
        for config, size, broken in ((alone, 1, None), (small, ranks, sabotage)):
            say(f"two steps and a validation, processes: {size} ...")
            toml.write_text(write_toml(config), encoding="utf-8")
            flags = ["--config", str(toml)]
            runs.append(
                merged(
                    run_ranks(train, size, flags, broken, task_of(config), file, timeout=SECONDS)
                )
            )
    return list(_differences(runs[1], runs[0]))


def report(found: list[Difference]) -> str:
    """Say what differs first and what then, or what is nearest to its bound."""
    wrong = [str(one) for one in found if not one.within]
    if wrong:
        first = "\n  then: ".join(wrong[:5])
        return f"differs first: {first}\n{len(wrong)} of {len(found)} comparisons differ"
    nearest = max(found, key=lambda one: one.size / (one.bound * one.largest or 1))
    return f"equal to one process in {len(found)} comparisons; the nearest to its bound, {nearest.bound:.0e}: {nearest}"


def _differences(got: Run, want: Run) -> Iterator[Difference]:
    """Yield every comparison.

    Initial weights; the first batch, and what modules return; the loss; gradients of that; those of
    parameters, last layer first; their norm; loss and norm of the second step; the validation after
    it; copies of weights on ranks.
    """
    start, gradients, loss = (
        want.tensors["initial"],
        want.tensors["gradients"],
        loss_name(want.records[0]),
    )

    def of_step(step: int, name: str, bound: float) -> Difference:
        a, b = (run.records[step][name] for run in (got, want))
        return Difference(f"{name} of step {step + 1}", abs(a - b), abs(b), bound)

    def away(moment: str, name: str) -> float:
        one, other = ({name: run.tensors[moment].get(name, torch.empty(0))} for run in (got, want))
        return furthest(one, other)

    yield from (
        Difference(f"initial weight {name}", away("initial", name), 1.0, 0.0) for name in start
    )
    modules = [
        Difference(*found, MODULES) for found in furthest_of_modules(got.pieces, want.pieces[0])
    ]
    yield from (one for one in modules if not one.what.startswith(GRADIENT))
    yield of_step(0, loss, LOSS)
    yield from (one for one in modules if one.what.startswith(GRADIENT))
    largest = {name: whole.abs().max().item() for name, whole in gradients.items()}
    least = max(largest.values()) / 1000
    for name in reversed([name for name in start if name in gradients]):
        size = away("gradients", name)
        yield Difference(
            f"gradient of the parameter {name}", size, max(largest[name], least), PARAMETERS
        )
    yield of_step(0, "grad_norm", NORM)
    # From here on Adam has divided by the roots of tiny gradients.
    for name, bound in (
        (loss, 10 * LOSS),
        ("grad_norm", 100 * NORM),
        ("validation_loss", 10 * LOSS),
    ):
        yield of_step(1, name, bound)
    yield from (
        Difference(f"copies of {name} on two ranks", float("inf"), 1.0, 0.0)
        for name in got.copies_differ
    )
