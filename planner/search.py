"""Search over the arrangements of a run: enumerate, predict each, and rank those that fit.

An arrangement is a mesh (tp x pp x cp, the rest dp), a method with its options, and settings that
save memory. There are thousands, so the order of the work matters: invalid ones are refused first;
memory is counted next, which is cheap; only the time of those that fit is predicted. Settings that
take less memory are tried only if nothing fits without them (`planner.levers.ladder`), and all
settings with the same method and lengths share an attention plan.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

from parallel.context import ContextConfig, Plan, make_plan
from parallel.context.layout import BALANCED, PLACEMENTS
from parallel.context.methods import METHODS, STATE_METHODS
from planner.cluster import Cluster
from planner.host_memory import pinned
from planner.layers.float8 import float8_recipe
from planner.levers import MOMENTS, OFFLOAD, AnyConfig, described, ladder, untried_fields
from planner.optimizer_cost import optimizer_shape
from planner.step_cost import Prediction, step_seconds
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from planner.workload import typical_documents, with_softmax_layers, workload_of
from runtime.errors import UserError, divisors
from runtime.progress import Progress
from train.config.checks import check_slices
from train.config.common import CommonConfig
from train.config.derive import with_joined_ranks
from train.config.sizes import validate_sizes

C = TypeVar("C", bound=CommonConfig)
ROOM = 0.9
"""Share of the memory in which varied settings should fit: allocators need the rest."""


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits, and its predicted time and memory."""

    config: Any
    prediction: Prediction


@dataclass(frozen=True)
class Ranking:
    """Configurations that fit, fastest first, and why the others do not."""

    candidates: list[Candidate]
    refused: Counter[str]
    """Number of invalid configurations, keyed by the reason."""
    over_memory: list[float]
    """Minimum bytes, over all settings tried, of each configuration too large for the device."""
    over_host_memory: list[float]
    """Bytes in host memory of each configuration for which only host memory is too small."""
    saving: tuple[str, ...] = ()
    """Fields that would save memory, but were not tried; an error suggests them."""
    moving: tuple[str, ...] = ()
    """Fields that offload to host memory and were set in every configuration tried; an error
    suggests leaving them out."""


class MemoryEstimate(NamedTuple):
    """A configuration and its memory; predicting its time takes far longer and comes later."""

    config: AnyConfig
    inputs: tuple[StepShape, Plan, Arrangement]
    """The configuration converted to the cost model's inputs."""
    memory: dict[str, float]
    """Bytes of the busiest rank, keyed by cause."""
    host: float
    """Bytes in host memory."""

    @property
    def device(self) -> float:
        """Return the bytes on the device."""
        return sum(self.memory.values())

    def fits(self, cluster: Cluster) -> bool:
        """Return True if the step fits in device memory and, if its size is known, host memory."""
        if self.device > 1e9 * cluster.memory_gb:
            return False
        is_host_known = bool(cluster.host_gb_per_s)
        return not is_host_known or self.host <= 1e9 * cluster.host_memory_gb

    def predicted(self, cluster: Cluster) -> Prediction:
        """Predict the time, and return it together with the memory."""
        work, plan, arrangement = self.inputs
        cluster = cluster.running(self.config.context.attention_backend, self.config.packed)
        work = with_softmax_layers(work, self.config, cluster)
        seconds, links = step_seconds(work, plan, arrangement, cluster)
        return Prediction(seconds, self.memory, links, self.host)


def weigh(
    config: AnyConfig, world_size: int, cluster: Cluster, cu_seqlens: tuple[int, ...] | None
) -> MemoryEstimate:
    """Count the memory of a validated configuration (with method ``none`` only if cp is 1).

    ``cu_seqlens`` are the cumulative document lengths of a typical micro-batch, if tokens attend
    only within documents.
    """
    inputs = cost_inputs(config, world_size, cluster, cu_seqlens)
    return MemoryEstimate(config, inputs, memory_of(*inputs), pinned(*inputs))


def predicted(
    config: AnyConfig, world_size: int, cluster: Cluster, cu_seqlens: tuple[int, ...] | None = None
) -> Prediction:
    """Predict time and memory of a configuration; the arguments are those of ``weigh``.

    A search instead weighs all configurations, then predicts the time only of those that fit.
    """
    return weigh(config, world_size, cluster, cu_seqlens).predicted(cluster)


def cost_inputs(
    config: AnyConfig, world_size: int, cluster: Cluster, cu_seqlens: tuple[int, ...] | None
) -> tuple[StepShape, Plan, Arrangement]:
    """Convert a configuration to the inputs of the cost model.

    They are the work of the model, the attention's plan over cp, and the division over ranks.
    """
    recompute = config.recompute
    pp, cp, tp = config.mesh.sizes
    stage_layers = -(-config.model.num_layers // pp)
    arrangement = Arrangement(
        pp=pp,
        dp=world_size // (cp * tp * pp),
        tp=tp,
        strategy=config.data_parallel.strategy,
        copies=config.data_parallel.num_distributed_optimizer_instances,
        recompute=recompute.recompute_granularity,
        offload=recompute.recompute_offload,
        optimizer=optimizer_shape(config.optimizer, config.model, stage_layers),
        moments_on_host=config.optimizer.optimizer_cpu_offload,
        loss_chunk=recompute.loss_chunk_size,
        ffn_chunk=recompute.ffn_chunk_size,
        layer_chunk=recompute.layer_chunk_size,
        pipeline=config.pipeline,
        compiled=config.train.compile,
        float8_recipe=float8_recipe(config.float8, cluster),
    )
    method = config.context.context_parallel_method
    if method == "none" and cp == 1:  # all methods are the same on one rank
        method = next(contexts(config, 1)).context_parallel_method
    per_node = max(1, cluster.gpus_per_node // tp)
    plan = _plan_of(
        config.context,
        method,
        per_node,
        recompute.layer_chunk_size > 0,
        config.joined_length,
        cp,
        tp,
        config.causal,
        cu_seqlens,
    )
    return workload_of(config, arrangement.dp, cluster.device), plan, arrangement


@lru_cache(maxsize=512)
def _plan_of(
    context: ContextConfig,
    method: str,
    per_node: int,
    in_slices: bool,
    seq_len: int,
    cp: int,
    tp: int,
    causal: bool,
    cu_seqlens: tuple[int, ...] | None,
) -> Plan:
    """Return the attention's plan, which most settings of recomputation and sharding share.

    With ``in_slices`` the plan of the whole sequence stands for those of its slices: keys stay, and
    the work is nearly even in any layout of a slice.
    """
    options = context.plan_arguments(per_node)
    options["documents"] = cu_seqlens
    if in_slices:
        options |= {"backward": "kv", "layout": "auto"}
    return make_plan(method, seq_len=seq_len, size=cp, multiple=tp, causal=causal, **options)


def contexts(config: AnyConfig, gpus_per_node: int) -> Iterator[ContextConfig]:
    """Yield every method x team size x Ulysses degree x placement that fits the ranks, each once.

    Linear attention has only the methods that pass states, without these options. Duplicates are
    left out: teams of one rank, double rings in one node, and a Ulysses degree of all ranks.
    """
    size = config.mesh.context_parallel_size
    base_method = "ring"
    if config.causal:
        # A delta rule passes states along consecutive tokens, which the striped layout separates.
        base_method = "zigzag" if config.delta else "striped"
    base = type(config.context)(
        attention_backend=config.context.attention_backend, context_parallel_method=base_method
    )
    if config.model.linear_attention:
        state_methods = list(STATE_METHODS)
        if size == 1:
            state_methods = state_methods[:1]
        for state_method in state_methods:
            yield _with_method(base, state_method)
        return
    if size == 1:
        yield base
        return

    ranks_per_node = max(1, gpus_per_node // config.mesh.tensor_model_parallel_size)
    for name, method in METHODS.items():
        fits = not method.for_slices_only
        if config.recompute.layer_chunk_size:
            fits = method.takes_slices
        if fits and _suits_mask(config, method):
            yield from variants(base, name, size, ranks_per_node)


def _suits_mask(config: AnyConfig, method: Any) -> bool:
    """Return True if a method may be fastest under the model's mask, and has a layout for it."""
    if method.needed_only and not config.packed:
        return False  # every query sees all earlier tokens: all rows travel anyway
    if not config.causal and method.layout(causal=False) not in ("contiguous", BALANCED):
        return False  # full attention needs no balanced layout
    return not (config.delta and method.layout(causal=True) == "striped")


def variants(
    base: ContextConfig, name: str, size: int, ranks_per_node: int
) -> Iterator[ContextConfig]:
    """Yield a method with every Ulysses degree, team size and placement that fits the ranks."""
    method = METHODS[name]
    if method.splits_heads:
        yield _with_method(base, name)
        return
    team_sizes = [1]
    placements: tuple[str, ...] = PLACEMENTS[:1]
    if method.teams:
        team_sizes = [team for team in range(2, size + 1) if size % team**2 == 0]
        placements = PLACEMENTS

    for degree, team, placement in product(divisors(size)[:-1], team_sizes, placements):
        ring_size = size // degree
        spans_nodes = method.nodes and degree < ranks_per_node < size
        if ring_size % team**2:
            continue
        if method.nodes and not spans_nodes:
            in_one_node = method.needed_only and ranks_per_node >= size
            if not in_one_node:
                continue
        if placement != PLACEMENTS[0] and ring_size == team**2:
            continue  # there are no rings to place

        options: dict[str, Any] = {
            "ulysses_degree": degree,
            "context_parallel_team_size": team,
            "context_parallel_placement": placement,
        }
        if spans_nodes:
            options["context_parallel_ranks_per_node"] = ranks_per_node
        yield _with_method(base, name, **options)


def _with_method(base: ContextConfig, name: str, **options: Any) -> ContextConfig:
    fields: dict[str, Any] = {"context_parallel_method": name, **options}
    return replace(base, **fields)


def arrangements(config: C, world_size: int) -> Iterator[C]:
    """Yield the configuration with every mesh (tp x pp x cp, the rest dp) but the same method."""
    sizes = divisors(world_size)
    for tp, pp, cp in product(sizes, sizes, sizes):
        if world_size % (tp * pp * cp) == 0:
            yield config.updated(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                context_parallel_size=cp,
            )


def candidates_of(
    configs: Iterable[AnyConfig], world_size: int, cluster: Cluster, refused: Counter[str]
) -> Iterator[Any]:
    """Yield each configuration with every method that suits it.

    Invalid sizes, such as heads that do not divide, are counted in ``refused``, keyed by their
    message: if nothing is left, the first message is reported.
    """
    for config in configs:
        joined = with_joined_ranks(config, world_size)
        for context in contexts(joined, cluster.gpus_per_node):
            candidate = replace(joined, context=context)
            try:
                validate_sizes(candidate, world_size)
                if candidate.recompute.layer_chunk_size:
                    check_slices(candidate)
            except UserError as error:
                refused[str(error)] += 1
                continue
            yield candidate


def suits(
    config: AnyConfig, world_size: int, check: Callable[[Any, int], object] = validate_sizes
) -> bool:
    """Return True if a configuration passes the check of its sizes."""
    try:
        check(config, world_size)
    except UserError:
        return False
    return True


def rank(
    configs: Sequence[AnyConfig],
    world_size: int,
    cluster: Cluster,
    lengths: tuple[int, ...] = (),
    vary: Callable[[AnyConfig, Cluster], Iterable[AnyConfig]] | None = None,
) -> Ranking:
    """Predict every method of these configurations, each with the fastest settings that fit.

    Args:
        lengths: document lengths to draw from, if tokens attend only within documents; by default
            the data's lengths.
        vary: yields the settings to try, as `levers.settings` does; by default only the given ones.
    """
    fitting: list[Candidate] = []
    over_memory: list[float] = []
    over_host_memory: list[float] = []
    refused = Counter[str]()
    candidates = list(candidates_of(configs, world_size, cluster, refused))
    with Progress() as progress:
        for number, candidate in enumerate(candidates, 1):
            estimates: list[MemoryEstimate] = []
            cu_seqlens = typical_documents(candidate, lengths)
            for configs_to_try in _ladder(candidate, world_size, cluster, vary):
                for config in configs_to_try:
                    progress(
                        f"searching: {described(config)}, candidate {number} of {len(candidates)}"
                    )
                    estimates.append(weigh(config, world_size, cluster, cu_seqlens))
                if any(estimate.fits(cluster) for estimate in estimates):
                    break

            fits = [estimate for estimate in estimates if estimate.fits(cluster)]
            host_bytes = [
                estimate.host
                for estimate in estimates
                if estimate.device <= 1e9 * cluster.memory_gb
            ]
            if fits:
                fitting.append(_fastest(fits, cluster))
            elif host_bytes:
                over_host_memory.append(min(host_bytes))
            else:
                over_memory.append(min(estimate.device for estimate in estimates))

    fitting.sort(key=lambda candidate: candidate.prediction.time)

    # Fields for the message if nothing fits.
    saving: tuple[str, ...] = ()
    moving: list[str] = []
    if configs:
        if not vary:
            saving = untried_fields(configs[0], cluster)
        for lever in (MOMENTS,) if vary else (OFFLOAD, MOMENTS):
            if lever.of(configs[0]) == (True,):
                moving.append(lever.fields[0])
    return Ranking(fitting, refused, over_memory, over_host_memory, saving, tuple(moving))


def _ladder(
    candidate: AnyConfig,
    world_size: int,
    cluster: Cluster,
    vary: Callable[[AnyConfig, Cluster], Iterable[AnyConfig]] | None,
) -> Iterator[list[AnyConfig]]:
    """Yield a candidate's valid settings, then ever leaner ones, to be tried until any fits."""
    varied = vary(candidate, cluster) if vary else [candidate]
    valid = [
        config
        for config in varied
        if config.mesh.pipeline_model_parallel_size == 1 or suits(config, world_size)
    ]
    return ladder(valid, cluster, moments=vary is not None)


def _fastest(fits: Sequence[MemoryEstimate], cluster: Cluster) -> Candidate:
    """Return the fastest candidate that leaves the allocator spare memory; else the fastest."""
    candidates = [Candidate(estimate.config, estimate.predicted(cluster)) for estimate in fits]
    limit = ROOM * 1e9 * cluster.memory_gb
    roomy = [candidate for candidate in candidates if candidate.prediction.bytes <= limit]
    return min(roomy or candidates, key=lambda candidate: candidate.prediction.time)
