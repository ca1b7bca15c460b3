"""Enumerate the arrangements of a run, predict each, and rank those that fit."""

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
from planner.levers import MOMENTS, OFFLOAD, AnyConfig, described, ladder, untried_fields
from planner.step_cost import Prediction, step_seconds
from planner.step_memory import Arrangement, StepShape, memory_of, pinned
from planner.workload import typical_documents, with_softmax_layers, workload_of
from runtime.errors import UserError, divisors
from runtime.progress import Progress
from train.config.common import CommonConfig
from train.config.derive import with_joined_ranks
from train.config.sizes import validate_sizes

C = TypeVar("C", bound=CommonConfig)
ROOM = 0.9
"""Share of the memory that varied settings take where some do: an allocator needs the rest."""


@dataclass(frozen=True)
class Candidate:
    """A configuration and its prediction."""

    config: Any
    prediction: Prediction


@dataclass(frozen=True)
class Ranking:
    """Configurations that fit, fastest first; refusals by reason; what does not fit in memory."""

    candidates: list[Candidate]
    refused: Counter[str]
    over_memory: list[float]
    """Bytes that each of the others needs, in the settings that need least."""
    over_host_memory: list[float]
    """Bytes that each of those that would fit moves to host memory, which has less."""
    saving: tuple[str, ...] = ()
    """Fields by which a configuration takes less memory, and which were not tried."""
    moving: tuple[str, ...] = ()
    """Fields by which all that was tried moves something to host memory."""


class Weighed(NamedTuple):
    """A configuration as the cost model takes it, and the bytes of its busiest rank by cause, and
    on the host.
    """

    config: AnyConfig
    inputs: tuple[StepShape, Plan, Arrangement]
    memory: dict[str, float]
    host: float

    @property
    def device(self) -> float:
        """Return the bytes on the device."""
        return sum(self.memory.values())

    def fits(self, cluster: Cluster) -> bool:
        """Return whether a process has enough memory, and its host, where known, for what is moved
        there.
        """
        known = bool(cluster.host_gb_per_s)
        return self.device <= 1e9 * cluster.memory_gb and not (
            known and self.host > 1e9 * cluster.host_memory_gb
        )

    def predicted(self, cluster: Cluster) -> Prediction:
        """Predict the time too, which takes far longer."""
        work, plan, arranged = self.inputs
        cluster = cluster.running(self.config.context.attention_backend, self.config.packed)
        seconds, links = step_seconds(
            with_softmax_layers(work, self.config, cluster), plan, arranged, cluster
        )
        return Prediction(seconds, self.memory, links, self.host)


def weigh(
    config: AnyConfig, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> Weighed:
    """Count the memory of a validated configuration with a method, or of one rank without.

    ``documents`` are those of a typical micro-batch, where documents attend apart.
    """
    inputs = cost_inputs(config, world_size, cluster, documents)
    return Weighed(config, inputs, memory_of(*inputs), pinned(*inputs))


def predicted(
    config: AnyConfig, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None = None
) -> Prediction:
    """Predict time and memory of what ``weigh`` takes."""
    return weigh(config, world_size, cluster, documents).predicted(cluster)


def cost_inputs(
    config: AnyConfig, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> tuple[StepShape, Plan, Arrangement]:
    """Return the configuration as the cost model takes it."""
    recompute = config.recompute
    pp, cp, tp = config.mesh.sizes
    arranged = Arrangement(
        pp=pp,
        dp=world_size // (cp * tp * pp),
        tp=tp,
        strategy=config.data_parallel.strategy,
        copies=config.data_parallel.num_distributed_optimizer_instances,
        recompute=recompute.recompute_granularity,
        offload=recompute.recompute_offload,
        state_bytes=config.optimizer.spec.state_bytes,
        moments_on_host=config.optimizer.optimizer_cpu_offload,
        loss_chunk=recompute.loss_chunk_size,
        ffn_chunk=recompute.ffn_chunk_size,
        pipeline=config.pipeline,
        compiled=config.train.compile,
    )
    method = config.context.context_parallel_method
    if method == "none" and cp == 1:  # one rank runs every method alike
        method = next(contexts(config, 1)).context_parallel_method
    per_node = max(1, cluster.gpus_per_node // tp)
    plan = _plan_of(
        config.context, method, per_node, config.joined_length, cp, tp, config.causal, documents
    )
    return workload_of(config, arranged.dp, cluster.device), plan, arranged


@lru_cache(maxsize=512)
def _plan_of(
    context: ContextConfig,
    method: str,
    per_node: int,
    seq_len: int,
    cp: int,
    tp: int,
    causal: bool,
    documents: tuple[int, ...] | None,
) -> Plan:
    """Return the attention's plan, the same for all settings that save other memory."""
    options = context.plan_arguments(per_node)
    return make_plan(
        method, seq_len=seq_len, size=cp, multiple=tp, causal=causal, documents=documents, **options
    )


def contexts(config: AnyConfig, gpus_per_node: int) -> Iterator[ContextConfig]:
    """Yield every method x team size x Ulysses degree x placement that fits the ranks, each once.

    Linear attention has only the methods that pass states, without these options. One rank per team
    is zigzag, one node is no double ring, and a degree of all ranks is Ulysses alone.
    """
    size = config.mesh.context_parallel_size
    inner = max(1, gpus_per_node // config.mesh.tensor_model_parallel_size)
    delta = config.delta  # whose states pass along consecutive tokens
    base = type(config.context)(
        attention_backend=config.context.attention_backend,
        context_parallel_method=("zigzag" if delta else "striped") if config.causal else "ring",
    )
    if config.model.linear_attention:
        for state_method in list(STATE_METHODS)[: None if size > 1 else 1]:
            fields: dict[str, Any] = {"context_parallel_method": state_method}
            yield replace(base, **fields)
        return
    if size == 1:
        yield base
        return
    degrees = divisors(size)[:-1]
    for name, method in METHODS.items():
        if method.needed_only and not config.packed:
            continue  # of one document it brings nothing
        if not config.causal and method.layout(causal=False) not in ("contiguous", BALANCED):
            continue  # full attention needs no balance
        if delta and method.layout(causal=True) == "striped":
            continue
        if method.splits_heads:
            fields = {"context_parallel_method": name}
            yield replace(base, **fields)
            continue
        teams = [c for c in range(2, size + 1) if size % c**2 == 0] if method.teams else [1]
        for degree, team, placement in product(
            degrees, teams, PLACEMENTS if method.teams else PLACEMENTS[:1]
        ):
            nodes = method.nodes and degree < inner < size
            if size // degree % team**2 or (
                method.nodes and not (nodes or (method.needed_only and inner >= size))
            ):
                continue
            if placement != PLACEMENTS[0] and size // degree == team**2:
                continue  # there are no rings to place
            fields = {"context_parallel_method": name, "ulysses_degree": degree}
            fields |= {"context_parallel_team_size": team, "context_parallel_placement": placement}
            fields |= {"context_parallel_ranks_per_node": inner} if nodes else {}
            yield replace(base, **fields)


def arrangements(config: C, world_size: int) -> Iterator[C]:
    """Yield every tp x pp x cp (the rest is dp), without a method."""
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
    """Yield these configurations with every method that suits them; count the others' reasons in
    ``refused``.
    """
    for config in (with_joined_ranks(config, world_size) for config in configs):
        for context in contexts(config, cluster.gpus_per_node):
            candidate = replace(config, context=context)
            try:
                validate_sizes(candidate, world_size)
            except UserError as error:
                refused[str(error)] += 1
                continue
            yield candidate


def suits(
    config: AnyConfig, world_size: int, check: Callable[[Any, int], object] = validate_sizes
) -> bool:
    """Return whether a configuration passes the check of its sizes."""
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
    """Predict every method of these configurations on a cluster, each in the fastest of its
    settings that fits.

    Args:
        lengths: of documents to draw from where these attend apart; by default those of the data.
        vary: the settings to try, such as ``settings``; by default those that are given alone.
    """
    fitting: list[Candidate] = []
    over_memory: list[float] = []
    over_host_memory: list[float] = []
    refused = Counter[str]()
    every = list(candidates_of(configs, world_size, cluster, refused))
    with Progress() as progress:
        for number, candidate in enumerate(every, 1):
            documents = typical_documents(candidate, lengths)
            varied = vary(candidate, cluster) if vary else [candidate]
            suiting = [
                one
                for one in varied
                if one.mesh.pipeline_model_parallel_size == 1 or suits(one, world_size)
            ]
            tried: list[Weighed] = []
            for more in ladder(suiting, cluster, moments=vary is not None):
                for one in more:
                    progress(f"searching: {described(one)}, candidate {number} of {len(every)}")
                    tried.append(weigh(one, world_size, cluster, documents))
                if fit := [one for one in tried if one.fits(cluster)]:
                    break
            if fit:
                found = [Candidate(one.config, one.predicted(cluster)) for one in fit]
                roomy = [
                    one for one in found if one.prediction.bytes <= ROOM * 1e9 * cluster.memory_gb
                ]
                fitting.append(min(roomy or found, key=lambda one: one.prediction.time))
            elif inside := [one.host for one in tried if one.device <= 1e9 * cluster.memory_gb]:
                over_host_memory.append(min(inside))
            else:
                over_memory.append(min(one.device for one in tried))
    fitting.sort(key=lambda candidate: candidate.prediction.time)
    saving = untried_fields(configs[0], cluster) if configs and not vary else ()
    on_host = (OFFLOAD, MOMENTS) if vary is None else (MOMENTS,)
    moving = tuple(
        lever.fields[0] for one in configs[:1] for lever in on_host if lever.of(one) == (True,)
    )
    return Ranking(fitting, refused, over_memory, over_host_memory, saving, moving)


def nothing_left(found: Ranking, cluster: Cluster) -> str:
    """Say why there is no candidate, and what to do."""
    if found.over_memory:
        least = min(found.over_memory)
        more = "".join(f", {name}" for name in found.saving)
        asked = " (python -m tools.plan --fits says what brings most)" if found.saving else ""
        return (
            f"memory_gb of {cluster.name} is {cluster.memory_gb:g} and the smallest of "
            f"{len(found.over_memory)} tried takes {least / 1e9:.1f}; use more processes{more} or a lower seq_length"
            f"{asked}"
        )
    if found.over_host_memory:
        without = f", or leave {' or '.join(found.moving)} out" if found.moving else ""
        return (
            f"host_memory_gb of {cluster.name} is {cluster.host_memory_gb:g} and the least of "
            f"{len(found.over_host_memory)} tried moves there {min(found.over_host_memory) / 1e9:.1f}; "
            f"use more processes or a lower seq_length{without}"
        )
    reason = next(iter(found.refused), "there is no arrangement of these processes")
    return f"context_parallel_method is auto, and no method suits: {reason}"
