"""The levers by which a run takes less memory, in one table, the settings that they lead to, and
these in words.

A lever sets fields to one of a few values, each of which takes less memory than the one before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from parallel.context.methods import METHODS
from parallel.mesh import SIZES
from planner.cluster import Cluster
from runtime.errors import UserError
from train.config.flags import value_of

AnyConfig = Any
"""A configuration of either entry."""
RECOMPUTE = (("none",), ("attention_boundary",), ("full",))
"""``selective`` recomputation is not among them: it keeps as much as ``none``, for a flash kernel.
"""
LOSS_CHUNK, FFN_CHUNK = 2048, 8192
"""Tokens at once, where memory is short: enough to keep a GPU busy."""


@dataclass(frozen=True)
class Lever:
    """Fields of the configuration, and the values to set them to, the leanest last."""

    fields: tuple[str, ...]
    values: Callable[[AnyConfig, Cluster], Sequence[tuple[Any, ...]]]

    def of(self, config: AnyConfig) -> tuple[Any, ...]:
        """Return the values of a configuration."""
        return tuple(value_of(config, name) for name in self.fields)

    def further(self, config: AnyConfig, cluster: Cluster) -> list[tuple[Any, ...]]:
        """Return the values that take less than those of a configuration."""
        values, own = [*self.values(config, cluster)], self.of(config)
        places = [place for place, value in enumerate(values) if value == own]
        return [*dict.fromkeys(values[max(places, default=0) + 1 :])]


def _chunks(config: AnyConfig, cluster: Cluster) -> list[tuple[int, int]]:
    """Return the loss in chunks, then the feed-forward too; chunks that are set stay as they are."""
    loss, ffn = config.recompute.loss_chunk_size, config.recompute.ffn_chunk_size
    in_chunks = loss or LOSS_CHUNK * config.causal
    return [(loss, ffn), (in_chunks, ffn), (in_chunks, ffn or FFN_CHUNK)]


def _shardings(config: AnyConfig, cluster: Cluster) -> list[tuple[str]]:
    """Return the given strategy and those that hold one copy of the optimizer's state, the most
    divided last.
    """
    name, strategy = (
        config.data_parallel.data_parallel_sharding_strategy,
        config.data_parallel.strategy,
    )
    between = [(other,) for other in ("zero1", "zero2") if other != strategy]
    return [(name,), *between, (name if strategy == "zero3" else "zero3",)]


def _stages(config: AnyConfig, cluster: Cluster) -> list[tuple[int]]:
    """Return all heads at once, then one head of each rank in a stage, where ranks exchange
    several.
    """
    context, tp, cp = (
        config.context,
        config.mesh.tensor_model_parallel_size,
        config.mesh.context_parallel_size,
    )
    method = METHODS.get(context.context_parallel_method)
    degree = cp if method and method.splits_heads else context.ulysses_degree
    stages = config.model.num_attention_heads // (tp * degree)
    return [(context.ulysses_head_chunks,), *[(stages,)] * (degree > 1 and stages > 1)]


def _on_host(config: AnyConfig, cluster: Cluster) -> list[tuple[bool]]:
    """Return the device, then its host's memory, where the rate of its copies is known."""
    return [(False,), *[(True,)] * bool(cluster.host_gb_per_s)]


def _moments(config: AnyConfig, cluster: Cluster) -> list[tuple[bool]]:
    """Return the device, then its host's memory, if the optimizer can step with its state there."""
    return _on_host(config, cluster) if config.optimizer.spec.offloads else [(False,)]


CHUNKS = Lever(("loss_chunk_size", "ffn_chunk_size"), _chunks)
POLICY = Lever(("recompute_granularity",), lambda *_: RECOMPUTE)
SHARDING = Lever(("data_parallel_sharding_strategy",), _shardings)
OFFLOAD = Lever(("recompute_offload",), _on_host)
STAGES = Lever(("ulysses_head_chunks",), _stages)
MOMENTS = Lever(("optimizer_cpu_offload",), _moments)
ORDER = (CHUNKS, POLICY, CHUNKS, POLICY, SHARDING, OFFLOAD, STAGES, MOMENTS)
"""As docs/tasks/long_context.md pulls them after more context-parallel processes; a lever that is
there twice goes one value further each time, and all others to their last."""


def with_levers(config: AnyConfig, *pulled: tuple[Lever, tuple[Any, ...]]) -> AnyConfig:
    """Return the configuration with these levers at these values; UserError if they contradict each
    other.
    """
    changed: dict[str, Any] = {}
    for lever, values in pulled:
        changed |= zip(lever.fields, values, strict=True)
    return config.updated(**changed)


def _every(
    config: AnyConfig, ways: Iterable[tuple[Lever, Iterable[tuple[Any, ...]]]]
) -> Iterator[AnyConfig]:
    """Yield every combination of values that does not contradict itself; the last lever varies
    fastest.
    """
    levers, values = zip(*ways, strict=True)
    for found in product(*map(dict.fromkeys, values)):
        try:
            yield with_levers(config, *zip(levers, found, strict=True))
        except UserError:  # what no policy keeps is not moved
            continue


def settings(config: AnyConfig, cluster: Cluster) -> Iterator[AnyConfig]:
    """Yield the configuration as it is, then with every sharding, recomputation and offload of
    activations.
    """
    yield config
    ways = [(lever, lever.values(config, cluster)) for lever in (SHARDING, OFFLOAD, POLICY, CHUNKS)]
    yield from (one for one in _every(config, ways) if one != config)


def least_memory(config: AnyConfig, cluster: Cluster) -> Iterator[AnyConfig]:
    """Yield what takes the least memory: all sharded, full recomputation in chunks, with and
    without offload.
    """
    ways = [(lever, lever.values(config, cluster)[-1:]) for lever in (SHARDING, POLICY, CHUNKS)]
    moments = [MOMENTS.of(config), *MOMENTS.further(config, cluster)]
    yield from _every(
        config, [(MOMENTS, moments), (OFFLOAD, OFFLOAD.values(config, cluster)), *ways]
    )


def ladder(tried: list[AnyConfig], cluster: Cluster, moments: bool) -> Iterator[list[AnyConfig]]:
    """Yield settings, then with heads in stages, then with moments on the host: what saves memory
    alone comes last.
    """
    yield tried
    for lever in (STAGES, *[MOMENTS] * moments):
        leaner = [
            with_levers(one, (lever, values))
            for one in tried
            for values in lever.further(one, cluster)
        ]
        leaner = [one for one in leaner if one not in tried]
        tried = tried + leaner
        yield leaner


def ever_leaner(config: AnyConfig, cluster: Cluster) -> Iterator[AnyConfig]:
    """Yield the configuration with one lever more pulled each time."""
    yield config
    for lever in ORDER:
        if further := lever.further(config, cluster):
            config = with_levers(config, (lever, further[0 if ORDER.count(lever) > 1 else -1]))
            yield config


def least_changed(
    config: AnyConfig, given: AnyConfig, cluster: Cluster, fits: Callable[[Any], bool]
) -> AnyConfig:
    """Return the configuration with each lever as near to the given one as still fits, the last one
    first.
    """
    for lever in reversed(tuple(dict.fromkeys(ORDER))):
        for values in (lever.of(given), *lever.further(given, cluster)):
            try:
                nearer = with_levers(config, (lever, values))
            except UserError:
                continue
            if fits(nearer):
                config = nearer
                break
    return config


def untried_fields(config: AnyConfig, cluster: Cluster) -> tuple[str, ...]:
    """Return the fields by which a configuration would take less memory, but for stages of heads."""
    levers = [lever for lever in dict.fromkeys(ORDER) if lever is not STAGES]
    ends = [
        zip(lever.fields, lever.of(config), lever.values(config, cluster)[-1], strict=True)
        for lever in levers
    ]
    return tuple(name for end in ends for name, own, least in end if least and own != least)


def method_of(config: AnyConfig) -> str:
    """Describe the method in a few words."""
    context = config.context
    return context.title + (
        f", {context.context_parallel_placement}" if context.context_parallel_team_size > 1 else ""
    )


def mesh_of(config: AnyConfig) -> str:
    """Describe the mesh in a few words."""
    named = ((name.split("_")[0], getattr(config.mesh, name)) for name in SIZES)
    return ", ".join(f"{name} {size}" for name, size in named if size > 1) or "data"


def memory_of(config: AnyConfig) -> str:
    """Describe the sharding and what is computed again, in chunks or moved, in a few words."""
    again = config.recompute
    chunks = [
        name
        for name, size in (("loss", again.loss_chunk_size), ("FFN", again.ffn_chunk_size))
        if size
    ]
    words = [config.data_parallel.strategy, again.recompute_granularity]
    words += [f"{' and '.join(chunks)} in chunks"] * bool(chunks) + [
        "offload"
    ] * again.recompute_offload
    words += ["moments on the host"] * config.optimizer.optimizer_cpu_offload
    return ", ".join(word for word in words if word != "none")


def described(config: AnyConfig) -> str:
    """Describe the method, the mesh and the memory, as far as there is something to say."""
    return ", ".join(filter(None, (method_of(config), mesh_of(config), memory_of(config))))
