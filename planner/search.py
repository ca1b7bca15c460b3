"""Enumerate the arrangements of a run and predict each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from model.config import ModelConfig
from model.registry import flops_per_token, num_parameters, num_trained
from parallel.context import ContextConfig, Plan, make_plan
from parallel.context.layout import PLACEMENTS
from parallel.context.methods.registry import METHODS, STATE_METHODS
from parallel.recompute import RecomputeConfig
from planner.cluster import Cluster
from planner.documents import typical_documents
from planner.step_cost import Arrangement, Prediction, Workload, memory_of, predict
from runtime.errors import UserError
from train.config.common import with_joined_ranks
from train.config.flags import ConfigError
from train.config.language import Config
from train.config.sizes import validate_sizes

GATED = ("llama", "transnormer")
RECOMPUTE = ("none", "selective", "attention_boundary", "full")
LOSS_CHUNK, FFN_CHUNK = 2048, 8192
"""Tokens at once, where memory is short: enough to keep a GPU busy."""


@dataclass(frozen=True)
class Candidate:
    """A configuration and its prediction."""

    config: Config
    prediction: Prediction


@dataclass(frozen=True)
class Ranking:
    """Configurations that fit, fastest first; refusals by reason; what does not fit in memory."""

    candidates: list[Candidate]
    refused: Counter[str]
    too_large: list[float]
    """Bytes that each of the others needs."""


def workload_of(config: Config, dp: int) -> Workload:
    """Return the work of a step. The vocabulary must be known. Raises ConfigError for a hybrid."""
    model = config.model
    if model.softmax_every is not None:
        raise ConfigError(
            f"softmax_every is {model.softmax_every}, and the planner knows models of one kind of attention alone"
        )
    parameters, trained, matrix_weights = _weights(model)
    windows = [window for window in map(model.window, range(model.num_layers)) if window]
    return Workload(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        gated=model.model_type in GATED,
        heads=model.num_attention_heads,
        kv_heads=model.query_groups,
        head_dim=model.head_dim,
        vocab=model.vocabulary,
        parameters=parameters,
        matrix_weights=matrix_weights,
        element_size=2 if config.train.bf16 else 4,
        micro_batch=1 if config.packed else config.train.micro_batch_size,
        micro_batches=config.train.micro_batches(dp),
        window=windows[0] if windows else None,
        windowed_layers=len(windows),
        trained=trained,
    )


@lru_cache
def _weights(model: ModelConfig) -> tuple[int, int, int]:
    """Count all parameters, the trained ones, and the weights of all matrix products, on the meta device."""
    products = int(flops_per_token(model.merged(), 0) / 6)  # at length 0 there is no attention
    return num_parameters(model), num_trained(model), products


def predicted(
    config: Config, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None = None
) -> Prediction:
    """Predict time and memory of a validated configuration with a method.

    ``documents`` are those of a typical micro-batch, where documents attend apart.
    """
    return predict(*_problem(config, world_size, cluster, documents), cluster)


def bytes_needed(config: Config, world_size: int, cluster: Cluster) -> float:
    """Return the bytes of the busiest rank's memory alone, which take far less to predict than the time."""
    return sum(memory_of(*_problem(config, world_size, cluster, None)).values())


def _problem(
    config: Config, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> tuple[Workload, Plan, Arrangement]:
    mesh, recompute = config.mesh, config.recompute
    cp, tp, pp = mesh.context_parallel_size, mesh.tensor_model_parallel_size, mesh.pipeline_model_parallel_size
    dp = world_size // (cp * tp * pp)
    arranged = Arrangement(
        pp=pp,
        dp=dp,
        tp=tp,
        strategy=config.data_parallel.strategy,
        copies=config.data_parallel.num_distributed_optimizer_instances,
        recompute=recompute.recompute_granularity,
        offload=recompute.recompute_offload,
        loss_chunk=recompute.loss_chunk_size,
        ffn_chunk=recompute.ffn_chunk_size,
    )
    plan = make_plan(
        config.context.context_parallel_method,
        seq_len=config.joined_length,
        size=cp,
        multiple=tp,
        documents=documents,
        **config.context.plan_arguments(max(1, cluster.gpus_per_node // tp)),
    )
    return workload_of(config, dp), plan, arranged


def contexts(config: Config, gpus_per_node: int) -> Iterator[ContextConfig]:
    """Yield every method x team size x Ulysses degree x placement that fits the ranks, each once.

    Linear attention has only the methods that pass states, without these options.
    One rank per team is zigzag, one node is no double ring, and a degree of all ranks is Ulysses alone.
    """
    size = config.mesh.context_parallel_size
    inner = max(1, gpus_per_node // config.mesh.tensor_model_parallel_size)
    base = replace(
        ContextConfig(), attention_backend=config.context.attention_backend, context_parallel_method="striped"
    )
    if config.model.linear_attention:
        for state_method in list(STATE_METHODS)[: None if size > 1 else 1]:
            fields: dict[str, Any] = {"context_parallel_method": state_method}
            yield replace(base, **fields)
        return
    if size == 1:
        yield base
        return
    degrees = [degree for degree in range(1, size) if size % degree == 0]
    for name, method in METHODS.items():
        able = method.capabilities()
        if able.needed_only and not config.packed:
            continue  # of one document it brings nothing
        if able.splits_heads:
            fields = {"context_parallel_method": name}
            yield replace(base, **fields)
            continue
        teams = [c for c in range(2, size + 1) if size % c**2 == 0] if able.teams else [1]
        for degree, team, placement in product(degrees, teams, PLACEMENTS if able.teams else PLACEMENTS[:1]):
            nodes = able.nodes and degree < inner < size
            if size // degree % team**2 or (able.nodes and not (nodes or (able.needed_only and inner >= size))):
                continue
            if placement != PLACEMENTS[0] and size // degree == team**2:
                continue  # there are no rings to place
            fields = {"context_parallel_method": name, "ulysses_degree": degree}
            fields |= {"context_parallel_team_size": team, "context_parallel_placement": placement}
            fields |= {"context_parallel_ranks_per_node": inner} if nodes else {}
            yield replace(base, **fields)


def recomputations(given: RecomputeConfig) -> Iterator[RecomputeConfig]:
    """Yield every policy; those that save most, also with the chunks that ``given`` leaves out."""
    for policy in RECOMPUTE:
        try:
            plain = replace(given, recompute_granularity=policy)  # type: ignore[arg-type]
        except UserError:  # offload needs certain policies
            continue
        yield plain
        if policy in ("attention_boundary", "full") and (chunked := _in_chunks(plain)) != plain:
            yield chunked


def leanest(given: RecomputeConfig) -> RecomputeConfig:
    """Return what takes the least memory: full recomputation, in chunks."""
    return _in_chunks(replace(given, recompute_granularity="full"))


def _in_chunks(given: RecomputeConfig) -> RecomputeConfig:
    return replace(
        given,
        loss_chunk_size=given.loss_chunk_size or LOSS_CHUNK,
        ffn_chunk_size=given.ffn_chunk_size or FFN_CHUNK,
    )


def arrangements(
    config: Config, world_size: int, recomputed: Sequence[RecomputeConfig] | None = None
) -> Iterator[Config]:
    """Yield every tp x pp x cp (the rest is dp) with each recomputation, by default all, without a method."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    recomputed = list(recomputations(config.recompute)) if recomputed is None else recomputed
    for tp, pp, cp, recompute in product(sizes, sizes, sizes, recomputed):
        if world_size % (tp * pp * cp):
            continue
        mesh = replace(
            config.mesh, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
        )
        yield replace(config, mesh=mesh, recompute=recompute)


def rank(configs: Sequence[Config], world_size: int, cluster: Cluster, lengths: tuple[int, ...] = ()) -> Ranking:
    """Predict every method of these configurations on a cluster.

    ``lengths`` of documents are to draw from where these attend apart; by default those of the data.
    """
    fitting: list[Candidate] = []
    too_large: list[float] = []
    refused = Counter[str]()
    for config in (with_joined_ranks(config, world_size) for config in configs):
        documents = typical_documents(config, lengths)
        for context in contexts(config, cluster.gpus_per_node):
            candidate = replace(config, context=context)
            try:
                validate_sizes(candidate, world_size)
            except UserError as error:
                refused[str(error)] += 1
                continue
            if (needed := bytes_needed(candidate, world_size, cluster)) > 1e9 * cluster.memory_gb:
                too_large.append(needed)
            else:
                fitting.append(Candidate(candidate, predicted(candidate, world_size, cluster, documents)))
    fitting.sort(key=lambda candidate: candidate.prediction.time)
    return Ranking(fitting, refused, too_large)


def nothing_left(found: Ranking, cluster: Cluster) -> str:
    """Say why there is no candidate, and what to do."""
    if found.too_large:
        least = min(found.too_large)
        return (
            f"memory_gb of {cluster.name} is {cluster.memory_gb:g} and the smallest of {len(found.too_large)} "
            f"arrangements takes {least / 1e9:.1f}; use more processes, recompute_granularity, loss_chunk_size or "
            "a lower seq_length"
        )
    reason = next(iter(found.refused), "there is no arrangement of these processes")
    return f"context_parallel_method is auto, and no method suits: {reason}"
