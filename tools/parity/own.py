"""Compare a shrunk run on its mesh with one process, in the order of a step."""

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

LOSS = 2e-6
"""Relative bound on the difference of losses."""
NORM = 1e-6
"""Relative bound on the difference of gradient norms."""
MODULES = 1e-4
"""Relative bound for modules' outputs and their gradients; rounding makes some differ by 1e-6."""
PARAMETERS = 2e-5
"""Relative bound for gradients of parameters."""
TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class MergedRun:
    """Results of a finished run, merged from those of its ranks; see ``RankResult``."""

    records: list[dict[str, Any]]
    tensors: dict[str, dict[str, torch.Tensor]]
    memory_mb: float
    copies_differ: tuple[str, ...]
    """Names of the tensors whose copies differ between ranks."""
    pieces: list[dict[str, list[Piece]]]
    """Each rank's outputs and gradients of modules, keyed by module name; see ``Piece``."""


class Difference(NamedTuple):
    """A comparison of values on the mesh with those of one process.

    ``what`` names the values and ``size`` is their largest difference. ``largest`` is its scale, as
    a rule the largest value in one process; ``bound`` is the maximum of ``size / largest``.
    """

    what: str
    size: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        """True if the difference is within the bound; False for NaN."""
        return self.size <= self.bound * self.largest

    def __str__(self) -> str:
        return f"{self.what}, by {self.size:.1e} of {self.largest:.1e}"


def merged(ranks: list[RankResult]) -> MergedRun:
    """Merge the results of a run's ranks."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    digests: dict[tuple[str, str], set[str]] = {}
    for rank in ranks:
        for moment, values in rank.tensors.items():
            tensors.setdefault(moment, {}).update(values)
        for moment, names in rank.digests.items():
            for name, digest in names.items():
                digests.setdefault((moment, name), set()).add(digest)

    differing = []
    for (moment, name), copies in digests.items():
        if len(copies) > 1:
            differing.append(f"{name} ({moment})")

    return MergedRun(
        records=ranks[0].records,
        tensors=tensors,
        memory_mb=max(rank.memory_mb for rank in ranks),
        copies_differ=tuple(differing),
        pieces=[rank.pieces for rank in ranks],
    )


def furthest(actual: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any element; infinite if a name or shape differs."""
    if actual.keys() != reference.keys():
        return float("inf")

    differences = []
    for name, expected in reference.items():
        if actual[name].shape != expected.shape:
            return float("inf")
        differences.append((actual[name] - expected).abs().max().item())

    return max(differences)


def compared(
    requested: CommonConfig,
    world_size: int | None = None,
    sabotage: Callable[[], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Difference]:
    """Train a shrunk run on its mesh and in one process; return all comparisons in order.

    Args:
        world_size: number of processes of the run before it is shrunk.
        sabotage: called in each process of the mesh to break something, to test the comparison.
        say: called with each line of progress.

    Raises UserError if the run cannot be shrunk or its data cannot be read, and RuntimeError, with
    the traceback, if a process failed.
    """
    small, alone, ranks = shrunk(requested, world_size)
    shape = small.model
    pp, cp, tp = small.mesh.sizes
    say(
        f"{shape.num_layers} layers of {shape.hidden_size} channels, "
        f"{shape.num_attention_heads} heads in {shape.query_groups} groups, "
        f"sequences of {small.sequence_length}, {small.context.title}; {ranks} processes: "
        f"pp {pp} x dp {ranks // (pp * cp * tp)} x cp {cp} x tp {tp}"
    )
    samples, source = samples_of(requested, small, 3 * small.train.batch_size(1))
    say(f"samples: {source}")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.pt"
        torch.save(samples, file)

        def trained(
            config: CommonConfig, size: int, broken: Callable[[], None] | None
        ) -> MergedRun:
            say(f"two steps and a validation, processes: {size} ...")
            toml = Path(folder) / "small.toml"
            toml.write_text(write_toml(config), encoding="utf-8")
            flags = ["--config", str(toml)]
            task = task_of(config)
            results = run_ranks(train, size, flags, broken, task, file, timeout=TIMEOUT_SECONDS)
            return merged(results)

        one_process = trained(alone, 1, None)
        on_mesh = trained(small, ranks, sabotage)

    return list(_differences(on_mesh, one_process))


def report(differences: list[Difference]) -> str:
    """Return a text that names the first comparisons out of bounds.

    If all are within their bounds, it names the one that is nearest to its bound.
    """
    wrong = [str(difference) for difference in differences if not difference.within]
    if wrong:
        first = "\n  then: ".join(wrong[:5])
        return f"differs first: {first}\n{len(wrong)} of {len(differences)} comparisons differ"

    nearest = max(
        differences,
        key=lambda difference: difference.size / (difference.bound * difference.largest or 1),
    )
    return (
        f"equal to one process in {len(differences)} comparisons; "
        f"the nearest to its bound, {nearest.bound:.0e}: {nearest}"
    )


def _differences(actual: MergedRun, reference: MergedRun) -> Iterator[Difference]:
    """Yield every comparison, in the order of a step.

    Initial weights; the first batch and the outputs of modules; the loss; gradients of the outputs;
    gradients of parameters, last layer first; their norm; loss and norm of the second step; the
    validation after it; copies of weights on ranks.
    """
    initial = reference.tensors["initial"]
    gradients = reference.tensors["gradients"]
    loss = loss_name(reference.records[0])

    def of_step(step: int, name: str, bound: float) -> Difference:
        value = actual.records[step][name]
        expected = reference.records[step][name]
        return Difference(f"{name} of step {step + 1}", abs(value - expected), abs(expected), bound)

    def distance(moment: str, name: str) -> float:
        missing = torch.empty(0)
        value = actual.tensors[moment].get(name, missing)
        expected = reference.tensors[moment].get(name, missing)
        return furthest({name: value}, {name: expected})

    for name in initial:
        yield Difference(f"initial weight {name}", distance("initial", name), 1.0, 0.0)

    outputs: list[Difference] = []
    output_gradients: list[Difference] = []
    for name, size, largest in furthest_of_modules(actual.pieces, reference.pieces[0]):
        group = output_gradients if name.startswith(GRADIENT) else outputs
        group.append(Difference(name, size, largest, MODULES))

    yield from outputs
    yield of_step(0, loss, LOSS)
    yield from output_gradients

    # Tiny gradients are measured against a thousandth of the largest gradient.
    scales = {name: gradient.abs().max().item() for name, gradient in gradients.items()}
    min_scale = max(scales.values()) / 1000
    with_gradient = [name for name in initial if name in gradients]
    for name in reversed(with_gradient):
        scale = max(scales[name], min_scale)
        size = distance("gradients", name)
        yield Difference(f"gradient of the parameter {name}", size, scale, PARAMETERS)

    yield of_step(0, "grad_norm", NORM)

    # From here on the bounds are wider: Adam has divided tiny gradients by their own size, which
    # enlarges their rounding errors.
    yield of_step(1, loss, 10 * LOSS)
    yield of_step(1, "grad_norm", 100 * NORM)
    yield of_step(1, "validation_loss", 10 * LOSS)
    for name in actual.copies_differ:
        yield Difference(f"copies of {name} on two ranks", float("inf"), 1.0, 0.0)
