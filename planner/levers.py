"""Levers (settings that save memory), the combinations to try, and their descriptions.

A lever sets fields of the configuration to one of a few values, each of which takes less memory
than the one before. Levers differ in what they cost: a loss in chunks costs little, recomputation
costs part of a forward pass, full sharding costs messages, and copies to the host cost time if
computing does not hide them. ``ORDER`` has roughly the cheapest first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from parallel.context.config import ContextConfig
from parallel.context.layout import can_split
from parallel.context.methods import METHODS
from parallel.mesh import SIZES
from planner.cluster import Cluster
from runtime.errors import UserError
from train.config.flags import value_of
from train.optimizers import OPTIMIZERS

AnyConfig = Any
"""Configuration of either entry script (pretrain_gpt.py, pretrain_dit.py)."""
RECOMPUTE = (("none",), ("attention_boundary",), ("full",))
"""Recomputation policies to try, the leanest (with the least memory) last.

``selective`` is left out: with a flash kernel it keeps as much as ``none``.
"""
LOSS_CHUNK = 2048
"""Number of tokens per chunk of the loss if memory is short: enough to keep a GPU busy."""
FFN_CHUNK = 8192
"""Number of tokens per chunk of the feed-forward if memory is short."""
LAYER_CHUNK = 16384
"""Number of tokens per slice of a layer if memory is short.

So many that a GPU computes for longer than its kernels take to launch, and that the sums of keys'
gradients are seldom read and written (planner/layers/slice_cost.py). Inner activations then take
1.3 GB in LLaMA 3 8B; slices of half as many tokens would save little more.
"""


@dataclass(frozen=True)
class Lever:
    """A setting that saves memory: configuration fields and their values, the leanest last."""

    fields: tuple[str, ...]
    values: Callable[[AnyConfig, Cluster], Sequence[tuple[Any, ...]]]
    exact: bool = True
    """False if it changes the results of a run by more than the order of sums."""

    def of(self, config: AnyConfig) -> tuple[Any, ...]:
        """Return the values of these fields in a configuration."""
        return tuple(value_of(config, name) for name in self.fields)

    def further(self, config: AnyConfig, cluster: Cluster) -> list[tuple[Any, ...]]:
        """Return the values that take less memory than the configuration's current ones."""
        values = list(self.values(config, cluster))
        current = self.of(config)
        current_index = 0
        for index, value in enumerate(values):
            if value == current:
                current_index = index
        return list(dict.fromkeys(values[current_index + 1 :]))


def _chunks(config: AnyConfig, cluster: Cluster) -> list[tuple[int, int]]:
    """Return the configured chunk sizes, then a chunked loss, then a chunked feed-forward too."""
    loss = config.recompute.loss_chunk_size
    ffn = config.recompute.ffn_chunk_size
    chunked_loss = loss
    if not loss and config.causal:
        chunked_loss = LOSS_CHUNK
    return [(loss, ffn), (chunked_loss, ffn), (chunked_loss, ffn or FFN_CHUNK)]


def _shardings(config: AnyConfig, cluster: Cluster) -> list[tuple[str]]:
    """Return the configured strategy, then those with a sharded optimizer, the leanest last."""
    name = config.data_parallel.data_parallel_sharding_strategy
    strategy = config.data_parallel.strategy
    between = [(other,) for other in ("zero1", "zero2") if other != strategy]
    leanest = "zero3"
    if strategy == "zero3":
        leanest = name  # the configured name may be an alias
    return [(name,), *between, (leanest,)]


def _stages(config: AnyConfig, cluster: Cluster) -> list[tuple[int]]:
    """Return the configured number of stages, then one stage per head that a rank receives."""
    context = config.context
    tp = config.mesh.tensor_model_parallel_size
    degree = context.ulysses_degree
    method = METHODS.get(context.context_parallel_method)
    if method and method.splits_heads:
        degree = config.mesh.context_parallel_size
    num_stages = config.model.num_attention_heads // (tp * degree)
    values = [(context.ulysses_head_chunks,)]
    if degree > 1 and num_stages > 1:
        values.append((num_stages,))
    return values


def _slices(config: AnyConfig, cluster: Cluster) -> list[tuple[int, int, str]]:
    """Return the configured slices, stages of heads and method, then slices in place of stages.

    Slices need full recomputation, and keys that stay on their rank.
    """
    recompute = config.recompute
    context = config.context
    name = context.context_parallel_method
    current = (recompute.layer_chunk_size, context.ulysses_head_chunks, name)
    is_full = recompute.recompute_granularity == "full"
    if recompute.layer_chunk_size or not is_full or not takes_slices(config):
        return [current]

    ranks = config.mesh.context_parallel_size
    team = 1
    if ranks > 1:
        name = METHODS[name].in_slices
        if not METHODS[name].splits_heads:  # a rank attends for the queries of all groups
            team = ranks // context.ulysses_degree
    unit = config.slice_unit
    chunk = max(1, LAYER_CHUNK // team // unit) * unit
    if config.joined_length // ranks * config.sharded_sequences <= chunk:
        return [current]
    return [current, (chunk, 1, name)]


def takes_slices(config: AnyConfig) -> bool:
    """Return True if layers can take the sequence slice by slice, maybe with another method."""
    if not config.causal or config.model.linear_attention:
        return False
    if config.train.compile or config.float8.fp8_format is not None:
        return False
    if config.context.context_parallel_layout not in config.layouts_of_slices:
        return False

    ranks = config.mesh.context_parallel_size
    if ranks == 1:
        return True
    method = METHODS.get(config.context.context_parallel_method)
    if method is None or not method.in_slices:
        return False
    if not config.delta:
        return True
    if config.context.delta_rule_schedule != "auto":
        return False
    tp = config.mesh.tensor_model_parallel_size
    return can_split(config.model.value_heads // tp, config.model.key_heads // tp, ranks)


def _on_host(config: AnyConfig, cluster: Cluster) -> list[tuple[bool]]:
    """Return False (on the device), then True (on the host) if the rate of copies is known."""
    if not cluster.host_gb_per_s:
        return [(False,)]
    return [(False,), (True,)]


def _moments(config: AnyConfig, cluster: Cluster) -> list[tuple[bool]]:
    """Return the values of ``_on_host`` if the optimizer supports offload, else only False."""
    if not config.optimizer.spec.offloads:
        return [(False,)]
    return _on_host(config, cluster)


def _rounded_states(config: AnyConfig, cluster: Cluster) -> list[tuple[Any, ...]]:
    """Return the configured values of ``LEANER_FIELDS``, then those that the optimizer proposes."""
    optimizer = config.optimizer
    current = {name: getattr(optimizer, name) for name in LEANER_FIELDS}
    values = [tuple(current.values())]
    for leaner in optimizer.spec.leaner_settings(optimizer):
        values.append(tuple((current | leaner).values()))
    return values


def _leaner_fields() -> tuple[str, ...]:
    """Return the settings by which any optimizer stores its states in fewer bits."""
    names: dict[str, None] = {}
    for spec in OPTIMIZERS.values():
        names |= dict.fromkeys(spec.leaner_fields)
    return tuple(names)


CHUNKS = Lever(("loss_chunk_size", "ffn_chunk_size"), _chunks)
POLICY = Lever(("recompute_granularity",), lambda *_: RECOMPUTE)
SHARDING = Lever(("data_parallel_sharding_strategy",), _shardings)
OFFLOAD = Lever(("recompute_offload",), _on_host)
STAGES = Lever(("ulysses_head_chunks",), _stages)
SLICES = Lever(("layer_chunk_size", "ulysses_head_chunks", "context_parallel_method"), _slices)
MOMENTS = Lever(("optimizer_cpu_offload",), _moments)
LEANER_FIELDS = _leaner_fields()
ROUNDED_STATES = Lever(LEANER_FIELDS, _rounded_states, exact=False)
ORDER = (
    CHUNKS,
    POLICY,
    CHUNKS,
    POLICY,
    SHARDING,
    OFFLOAD,
    STAGES,
    SLICES,
    MOMENTS,
    ROUNDED_STATES,
)
"""Order in which levers are used, as in docs/tasks/long_context.md, which first adds processes.

A lever that occurs twice moves one value further each time; the others move to their last value.
The last one is not exact; only ``tools.plan --fits`` proposes it, and no search uses it.
"""


def with_levers(config: AnyConfig, *lever_values: tuple[Lever, tuple[Any, ...]]) -> AnyConfig:
    """Return the configuration with levers set to values. Raises UserError if it is invalid."""
    overrides: dict[str, Any] = {}
    for lever, values in lever_values:
        for field, value in zip(lever.fields, values, strict=True):
            overrides[field] = value
    return config.updated(**overrides)


def _combinations(
    config: AnyConfig, options: Sequence[tuple[Lever, Iterable[tuple[Any, ...]]]]
) -> Iterator[AnyConfig]:
    """Yield the configuration with each valid combination; the last lever varies fastest."""
    levers = [lever for lever, _ in options]
    distinct_values = [dict.fromkeys(values) for _, values in options]
    for combination in product(*distinct_values):
        try:
            yield with_levers(config, *zip(levers, combination, strict=True))
        except UserError:  # for example offload without activations to move
            continue


def settings(config: AnyConfig, cluster: Cluster) -> Iterator[AnyConfig]:
    """Yield the configuration, then it with other sharding, offload, recomputation and chunks."""
    yield config
    levers = (SHARDING, OFFLOAD, POLICY, CHUNKS)
    options = [(lever, lever.values(config, cluster)) for lever in levers]
    for combination in _combinations(config, options):
        if combination != config:
            yield combination


def least_memory(config: AnyConfig, cluster: Cluster) -> Iterator[AnyConfig]:
    """Yield the leanest settings, with and without offload: zero3, full recomputation, chunks."""
    moments = [MOMENTS.of(config), *MOMENTS.further(config, cluster)]
    options: list[tuple[Lever, Sequence[tuple[Any, ...]]]] = [
        (MOMENTS, moments),
        (OFFLOAD, OFFLOAD.values(config, cluster)),
    ]
    for lever in (SHARDING, POLICY, CHUNKS):
        leanest = lever.values(config, cluster)[-1]
        options.append((lever, [leanest]))
    yield from _combinations(config, options)


def ladder(tried: list[AnyConfig], cluster: Cluster, moments: bool) -> Iterator[list[AnyConfig]]:
    """Yield lists of settings to try: as given, in stages of heads, in slices, moments on the host.

    The last two lists exist only with ``moments``, if settings are varied. None of these makes a
    step faster, so they are worth trying only if nothing before them fits.
    """
    yield tried
    levers = (STAGES, SLICES, MOMENTS) if moments else (STAGES,)
    for lever in levers:
        leaner = []
        for config in tried:
            for values in lever.further(config, cluster):
                candidate = with_levers(config, (lever, values))
                if candidate not in tried and candidate not in leaner:
                    leaner.append(candidate)
        tried = tried + leaner
        yield leaner


def ever_leaner(config: AnyConfig, cluster: Cluster, *, exact: bool = True) -> Iterator[AnyConfig]:
    """Yield the configuration, then copies in which one more lever saves memory each time.

    With ``exact``, levers that change a run's results are left out.
    """
    yield config
    for lever in ORDER:
        if exact and not lever.exact:
            continue
        further = lever.further(config, cluster)
        if further:
            values = further[-1]
            if ORDER.count(lever) > 1:
                values = further[0]
            config = with_levers(config, (lever, values))
            yield config


def least_changed(
    config: AnyConfig, original: AnyConfig, cluster: Cluster, fits: Callable[[Any], bool]
) -> AnyConfig:
    """Return the configuration with each lever as near to its original value as still fits.

    The last levers in ``ORDER`` are reset first.
    """
    for lever in reversed(tuple(dict.fromkeys(ORDER))):
        for values in (lever.of(original), *lever.further(original, cluster)):
            try:
                nearer = with_levers(config, (lever, values))
            except UserError:
                continue
            if fits(nearer):
                config = nearer
                break
    return config


def untried_fields(config: AnyConfig, cluster: Cluster) -> tuple[str, ...]:
    """Return the fields that could still save memory, except stages of heads; errors name them."""
    untried = []
    for lever in dict.fromkeys(ORDER):
        if lever is STAGES:
            continue
        leanest = lever.values(config, cluster)[-1]
        for name, current, lean in zip(lever.fields, lever.of(config), leanest, strict=True):
            is_told = name not in (*STAGES.fields, "context_parallel_method")
            if lean and current != lean and is_told:
                untried.append(name)
    return tuple(untried)


def method_of(config: AnyConfig) -> str:
    """Describe a configuration's method in a few words."""
    return title_of(config.context)


def title_of(context: ContextConfig) -> str:
    """Describe a method in a few words, with the placement of its teams."""
    if context.context_parallel_team_size > 1:
        return f"{context.title}, {context.context_parallel_placement}"
    return context.title


def mesh_of(config: AnyConfig) -> str:
    """Describe the mesh in a few words."""
    dimensions = []
    for name in SIZES:
        size = getattr(config.mesh, name)
        if size > 1:
            dimensions.append(f"{name.split('_')[0]} {size}")
    return ", ".join(dimensions) or "data"


def memory_of(config: AnyConfig) -> str:
    """Describe sharding, recomputation, chunks and offload in a few words."""
    recompute = config.recompute
    words = [config.data_parallel.strategy, recompute.recompute_granularity]
    chunks = []
    if recompute.loss_chunk_size:
        chunks.append("loss")
    if recompute.ffn_chunk_size:
        chunks.append("FFN")
    if chunks:
        words.append(f"{' and '.join(chunks)} in chunks")
    if recompute.layer_chunk_size:
        words.append(f"layers in slices of {recompute.layer_chunk_size}")
    if recompute.recompute_offload:
        words.append("offload")
    if config.optimizer.optimizer_cpu_offload:
        words.append("moments on the host")
    words.append(config.optimizer.spec.states_title(config.optimizer))
    return ", ".join(word for word in words if word not in ("none", ""))


def described(config: AnyConfig) -> str:
    """Describe the method, the mesh and the settings that save memory, in a few words each."""
    return ", ".join(filter(None, (method_of(config), mesh_of(config), memory_of(config))))
