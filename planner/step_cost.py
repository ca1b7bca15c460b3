"""Predict time and memory of a training step on a cluster. Needs no process.

A model is given by numbers: this package imports none.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel.context.mask import Window
from parallel.context.plan import Plan
from parallel.context.traffic import Moves, Sizes, sizes
from parallel.data import Strategy
from parallel.offload import FETCH_AHEAD, SEVERAL
from parallel.pinned import in_slabs
from planner.attention_cost import BACKWARD, FORWARD, GB, MICRO, AttentionCost, Links, most_rows_held
from planner.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and one step of it, before tensor parallelism."""

    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    matrix_weights: int
    """Weights of all matrix products, the output projection included."""
    element_size: int
    micro_batch: int
    micro_batches: int
    window: Window | None = None
    """Keys that a query of a layer with a window sees before and after its own."""
    windowed_layers: int = 0
    trained: int | None = None
    """Parameters that are trained, besides which the others lie frozen in element_size bytes; None: all."""
    softmax_layers: int = 0
    """Layers of a hybrid with softmax attention, which the plan is not of."""
    softmax_seconds: float = 0.0
    """What one of them takes forward and backward, in its own layout."""
    modulated: int = 0
    """Widths of the residual stream that a layer looks up for every token: a DiT's shifts, scales and gates."""
    averages: int = 0
    """Bytes per parameter of averages of the weights."""

    @property
    def trained_share(self) -> float:
        """Return the share of the parameters that have gradients and an optimizer's state."""
        return 1.0 if self.trained is None else self.trained / self.parameters


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How ranks share the work, besides the attention's plan."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    strategy: Strategy = "zero3"
    copies: int = 1
    recompute: str = "none"
    offload: bool = False
    moments_on_host: bool = False
    loss_chunk: int = 0
    ffn_chunk: int = 0


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and bytes of the busiest rank's memory, each by cause."""

    seconds: dict[str, float]
    memory: dict[str, float]
    links: Links

    @property
    def time(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        """Return the bytes of memory at the peak."""
        return sum(self.memory.values())


def predict(work: Workload, plan: Plan, arranged: Arrangement, cluster: Cluster) -> Prediction:
    """Predict time and memory of one step of ``work``, with the attention's ``plan`` over cp."""
    tp = arranged.tp
    of = _own_sizes(work, plan, tp)
    layers = -(-work.layers // arranged.pp)
    rows = work.micro_batch * plan.local_len
    rate = 1e12 * cluster.peak_tflops * cluster.matmul_fraction
    output = work.vocab * work.hidden
    layer = 2 * rows * (work.matrix_weights - output) / work.layers / tp / rate  # seconds forward
    head = 2 * rows * output / tp / rate
    forward, backward, links = _mean_attention(work, plan, of, cluster, tp)
    passes = 2 + work.trained_share  # forward, and backward to the inputs and to the weights
    linear = layers * layer * passes + head * passes
    again = layers * (layer if arranged.recompute in ("full", "attention_boundary") else 0.0)
    again += layers * (forward if arranged.recompute in ("full", "selective") else 0.0)
    again += layers * (layer * _ffn_share(work) if arranged.ffn_chunk else 0.0)
    steps = work.micro_batches + arranged.pp - 1  # fills and drains the pipeline
    seconds = {
        "attention": steps * layers * (forward + backward),
        "linear": steps * linear,
        "recompute": steps * again,
        "tensor parallel": steps * layers * _tensor(work, plan, tp, cluster),
        "pipeline": steps * _pipeline(work, plan, arranged, cluster),
    }
    if arranged.offload and cluster.host_gb_per_s:
        copy = offloaded(work, plan, arranged) / (cluster.host_gb_per_s * GB)  # each way, beside the computation
        there = max(0.0, copy - layers * (layer + forward))
        behind = layers * (layer * (passes - 1) + backward) + again
        back = max(0.0, copy - behind) if _fetched_ahead(work, plan, arranged) else copy
        seconds["offload"] = work.micro_batches * (there + back)
    if arranged.moments_on_host and cluster.host_gb_per_s:
        seconds["optimizer offload"] = moments(work, plan, arranged) / (cluster.host_gb_per_s * GB)  # each way, alone
    exchanged = _data(work, plan, arranged, cluster)
    hidden = 0.0 if arranged.strategy == "legacy_ddp" else seconds["linear"] + seconds["attention"]
    seconds["data parallel"] = max(0.0, exchanged - hidden)
    return Prediction(seconds, memory_of(work, plan, arranged), links)


def _mean_attention(work: Workload, plan: Plan, of: Sizes, cluster: Cluster, tp: int) -> tuple[float, float, Links]:
    """Return the mean seconds of all layers, forward and backward, and the bytes of one, without a window if any is."""
    whole = _attention(plan, of, cluster, tp)
    if work.softmax_layers:
        share, forward = work.softmax_layers / work.layers, FORWARD / (FORWARD + BACKWARD)
        softmax = share * work.softmax_seconds
        ahead, back = ((1 - share) * seconds for seconds in whole[:2])
        return ahead + forward * softmax, back + (1 - forward) * softmax, whole[2]
    if work.window is None:
        return whole
    windowed, share = _attention(plan.windowed(work.window), of, cluster, tp), work.windowed_layers / work.layers
    forward, backward = (share * a + (1 - share) * b for a, b in zip(windowed[:2], whole[:2], strict=True))
    return forward, backward, whole[2] if share < 1 else windowed[2]


@lru_cache(maxsize=4096)
def _attention(plan: Plan, of: Sizes, cluster: Cluster, tp: int) -> tuple[float, float, Links]:
    """Return seconds forward and backward, and bytes; the same for all pipelines and recompute policies."""
    cost = AttentionCost(plan, of, cluster, tp)
    return cost.forward(), cost.backward(), cost.links()


def _tensor(work: Workload, plan: Plan, tp: int, cluster: Cluster) -> float:
    """Time a layer's 4 all-gathers and reduce-scatters forward, and as many backward (sequence parallelism)."""
    count = work.micro_batch * plan.local_len * work.hidden * work.element_size * (tp - 1) / tp
    return 8 * _ring_seconds(count, tp, 1, cluster) if tp > 1 else 0.0


def _pipeline(work: Workload, plan: Plan, arranged: Arrangement, cluster: Cluster) -> float:
    """Time a micro-batch's activations to the next stage, and their gradients back."""
    if arranged.pp == 1:
        return 0.0
    count = work.micro_batch * plan.local_len * work.hidden * work.element_size / arranged.tp
    inside = arranged.pp * arranged.dp * plan.size * arranged.tp <= cluster.gpus_per_node
    rate = cluster.inside_gb_per_s if inside else cluster.node_gb_per_s / cluster.gpus_per_node
    latency = cluster.inside_latency_us if inside else cluster.between_latency_us
    return 2 * (count / (rate * GB) + latency * MICRO)


def _data(work: Workload, plan: Plan, arranged: Arrangement, cluster: Cluster) -> float:
    """Time a step's weight gathers and gradient sums over dp x cp."""
    ranks = arranged.dp * plan.size
    if ranks == 1:
        return 0.0
    share = work.parameters / (arranged.tp * arranged.pp) * (ranks - 1) / ranks
    weights = _ring_seconds(share * work.element_size, ranks, arranged.tp, cluster)
    gradients = _ring_seconds(share * 4 * work.trained_share, ranks, arranged.tp, cluster)
    if arranged.strategy in ("ddp", "legacy_ddp"):
        return 2 * gradients
    gathers = 2 * work.micro_batches if arranged.strategy == "zero3" else 1
    sums = 1 if arranged.strategy == "zero1" else work.micro_batches
    return gathers * weights + sums * gradients


def _ring_seconds(count: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Time ``count`` bytes around a ring of every ``stride``-th rank; parallel groups share the links."""
    if ranks * stride <= cluster.gpus_per_node:
        return count / (cluster.inside_gb_per_s * GB) + (ranks - 1) * cluster.inside_latency_us * MICRO
    rate = min(cluster.inside_gb_per_s, cluster.node_gb_per_s / min(stride, cluster.gpus_per_node))
    return count / (rate * GB) + (ranks - 1) * cluster.between_latency_us * MICRO


def _ffn_share(work: Workload) -> float:
    """Return the share of a layer's matrix products that is inside its feed-forward."""
    inside = (3 if work.gated else 2) * work.hidden * work.ffn
    return inside * work.layers / (work.matrix_weights - work.vocab * work.hidden)


def moments(work: Workload, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes of a rank's moments of Adam in host memory."""
    own = work.trained_share * work.parameters / (arranged.tp * arranged.pp) / _shards(plan, arranged)
    return 8 * own if arranged.moments_on_host else 0.0


def _shards(plan: Plan, arranged: Arrangement) -> int:
    return 1 if arranged.strategy in ("ddp", "legacy_ddp") else arranged.dp * plan.size // arranged.copies


def offloaded(work: Workload, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes that a micro-batch keeps in host memory."""
    kept, _ = _layer_activations(work, arranged)
    return work.micro_batch * plan.local_len * kept * -(-work.layers // arranged.pp) if arranged.offload else 0.0


def pinned(work: Workload, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes of host memory that torch pins for both, but for what is left of the moments' last slab."""
    part = work.element_size / arranged.tp
    kept = [work.hidden * part] if arranged.offload else []
    if arranged.offload and arranged.recompute == "attention_boundary":
        kept += [work.heads * work.head_dim * part, 4 * work.heads / arranged.tp]
    tokens, layers = work.micro_batch * plan.local_len, -(-work.layers // arranged.pp)
    return in_slabs([round(tokens * count) for count in kept] * layers, SEVERAL) + moments(work, plan, arranged)


def _fetched_ahead(work: Workload, plan: Plan, arranged: Arrangement) -> bool:
    kept, _ = _layer_activations(work, arranged)
    return work.micro_batch * plan.local_len * kept <= FETCH_AHEAD


def _own_sizes(work: Workload, plan: Plan, tp: int) -> Sizes:
    heads, kv_heads = work.heads // tp, max(1, work.kv_heads // tp)
    return sizes(plan.geometry, work.micro_batch, heads, kv_heads, work.head_dim, work.element_size)


def memory_of(work: Workload, plan: Plan, arranged: Arrangement) -> dict[str, float]:
    """Return the bytes of the busiest rank, one of the first stage, at the peak of a step, by cause."""
    of = _own_sizes(work, plan, arranged.tp)
    own = work.parameters / (arranged.tp * arranged.pp)
    trained = own * work.trained_share
    layers = -(-work.layers // arranged.pp)
    shards = _shards(plan, arranged)
    whole = 2 * own / layers if arranged.strategy == "zero3" else own
    if shards == 1 and work.element_size == 4:  # nothing is gathered, and nothing cast
        whole = 0.0
    copies = whole * work.element_size + (4 * trained if arranged.strategy == "zero1" and shards > 1 else 0.0)
    tokens = work.micro_batch * plan.local_len
    kept, inside = _layer_activations(work, arranged)
    again = arranged.recompute in ("full", "attention_boundary")
    flying = min(arranged.pp, work.micro_batches)  # micro-batches waiting for their backward, in 1F1B
    held = layers * flying
    if arranged.offload:  # what is on its way; the layer that runs is counted with its inside
        held = int(layers > 1 and _fetched_ahead(work, plan, arranged))
    scores = min(tokens, arranged.loss_chunk) if arranged.loss_chunk else tokens
    logits = scores * work.vocab * (work.element_size + 4) / arranged.tp
    layer = (tokens * inside if again else 0.0) + _attention_buffers(plan, of, plan.backward_moves(of))
    return {
        "weights, gradients, optimizer": (
            (16 - 8 * arranged.moments_on_host + work.averages) * trained + work.element_size * (own - trained)
        )
        / shards
        + copies,
        "activations": tokens * (kept * held + 3 * work.hidden * work.element_size / arranged.tp),
        "a layer's backward, or the logits": max(layer, logits),
    }


def _attention_buffers(plan: Plan, of: Sizes, moves: Moves) -> int:
    """Count a backward's buffers: circulating tensors (twice: held and in transit) and a team's gathered ones.

    In stages of heads they are a stage's, with what it exchanges again: q, dout, out and lse, k and v.
    """
    if of.stages > 1:
        stage = of.stage
        return _attention_buffers(plan, stage, moves) + stage.payload("queries") + stage.payload("kv")
    stays: Moves = "queries" if moves == "kv" else "kv"
    if plan.geometry.method.capabilities().needed_only:  # all rows are received at once
        rows = most_rows_held(plan, moves)
        return rows * (of.gradient(moves) + of.payload(moves)) // of.tokens + of.gradient(stays)
    held, team = len(plan.geometry.holders(0)), len(plan.geometry.teammates(0))
    if len(plan.geometry.steps(0)) > 1:
        held = 2 * len(plan.geometry.steps(0)[-1].holds) // plan.geometry.ulysses_degree
    buffers = held * of.gradient(moves) + team * of.gradient(stays)
    return buffers + (held * of.payload(moves) if held > 1 else 0) + (team * of.payload(stays) if team > 1 else 0)


def _layer_activations(work: Workload, arranged: Arrangement) -> tuple[float, float]:
    """Return bytes per token that a layer keeps for its backward, and that it holds while recomputed.

    Counted module by module: residuals, inputs of norms and projections; queries, keys (before and after rotary) and
    values, the output; gate, up, activation and product of a gated feed-forward, input and activation of another.
    """
    queries, keys = work.heads * work.head_dim, work.kv_heads * work.head_dim
    ffn = 0 if arranged.ffn_chunk else (4 if work.gated else 2) * work.ffn
    per_channel = work.element_size / arranged.tp
    everything = ((6 + work.modulated) * work.hidden + 2 * queries + 2 * keys + ffn) * per_channel
    if arranged.recompute == "full":
        return work.hidden * per_channel, everything
    if arranged.recompute == "attention_boundary":
        return (work.hidden + queries) * per_channel + 4 * work.heads / arranged.tp, everything
    return everything, 0.0
