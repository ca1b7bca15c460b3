"""Predict the time and memory of a layer that takes its sequence slice by slice.

With ``--layer-chunk-size`` a layer has inner activations of one slice at a time. Of all tokens it
has its input, the gradients of its output and input, its keys and values, and the sums of their
gradients (parallel/context/slices). A layer with a state hands it on from slice to slice instead.

Compared with ``full`` recomputation of the whole layer, keys and values are computed once more in
the backward pass; each slice launches the layer's kernels anew, and adds the gradients of all keys
that it sees to their sums in memory. Backward, the keys of each earlier slice are a tile.
"""

from dataclasses import dataclass

from parallel.context.plan import Plan
from parallel.context.traffic import Sizes
from planner.cluster import MICRO, Cluster
from planner.layers.delta_cost import DeltaShape

LAUNCHES = 110
"""Number of kernels that a slice launches in a layer: forward, keys again, forward again, backward.

docs/evidence/memory.md: a LLaMA launches 76 kernels a layer, forward and backward; a third of them
are the forward's, which runs again. Keys take a norm, two projections and rotations.
"""
EXCHANGES = 12
"""Number of exchanges of heads in which a slice's tensors travel: q, k, v and out; k and v again; q
and out again; and the gradients of all four.
"""
TEAM_EXCHANGES = 11
"""Number of collectives in which the queries of a slice travel: q, out and lse, twice; q, dout, out
and lse for the backward; and dq.
"""
PER_TILE = 4
"""Number of launches in a tile's ``launch_us``: the kernel, and the merge of its result."""


@dataclass(frozen=True)
class SliceCost:
    """Cost of a layer's slices on a rank, beside that of the same layer on all tokens at once."""

    plan: Plan
    sizes: Sizes
    """Sizes of the attention on this rank, after the exchange of heads."""
    chunk: int
    """Number of tokens of a rank's micro-batch in a slice; all sequences have equal slices."""

    @property
    def length(self) -> int:
        """Return the number of a rank's tokens of one sequence in a slice."""
        return min(self.plan.local_len, max(1, self.chunk // self.sizes.batch))

    @property
    def tokens(self) -> int:
        """Return the number of a rank's tokens in a slice, of all sequences."""
        return self.length * self.sizes.batch

    @property
    def team(self) -> int:
        """Return the number of ranks for whose queries a rank attends, itself included."""
        return len(self.plan.geometry.teammates(0))

    @property
    def count(self) -> int:
        """Return the number of slices of a sequence."""
        return -(-self.plan.local_len // self.length)

    def key_bytes(self) -> int:
        """Return the bytes of the keys and values of all tokens, and of the sums of gradients."""
        return self.sizes.payload("kv") + self.sizes.gradient("kv")

    def attention_bytes(self) -> float:
        """Return the bytes of a slice's attention backward, beside the keys and their sums.

        A kernel returns the gradients of a tile: of a slice's queries, and of as many keys. They
        are added to sums in float32, those of the queries too. A team's queries are gathered, each
        tensor once as received and once in order, beside this rank's. In the forward pass that runs
        again, their outputs in float32 exist as computed, in order, and as received; sequences of a
        micro-batch are joined for the exchange.
        """
        share = self.length / self.plan.local_len
        sums, tile = self._query_gradients
        computing = sums + tile + self.sizes.payload("kv") * share
        if self.team == 1:
            return computing
        queries = self.sizes.payload("queries") * share
        gathered = self.team * queries
        copies = 3 + (self.sizes.batch > 1)
        forward = tile + copies * sums
        return queries + max(2 * gathered, gathered + computing, forward)

    def state_bytes(self, delta: DeltaShape) -> float:
        """Return the bytes of states that slices of a layer leave for the backward pass.

        A slice takes the state of the delta rule in float32, and the inputs of the convolution's
        last tokens.
        """
        sizes = self.sizes
        inputs = (delta.taps - 1) * delta.channels * sizes.element_size
        return self.count * sizes.batch * (sizes.wide * delta.state + inputs)

    @property
    def _query_gradients(self) -> tuple[float, float]:
        """Bytes of the gradients of a team's queries, as sums and as a kernel returns them."""
        sizes = self.sizes
        sums = self.team * sizes.gradient("queries") * self.length / self.plan.local_len
        return sums, sums * sizes.element_size / sizes.wide

    def key_seconds(self, hidden: int, cluster: Cluster) -> float:
        """Return the seconds to compute the keys and values of all tokens once more."""
        sizes = self.sizes
        tokens = sizes.batch * self.plan.local_len
        width = 2 * sizes.kv_heads * sizes.tokens // self.plan.local_len * sizes.head_dim
        return 2 * tokens * hidden * width / cluster.products_flops_per_s

    def sum_seconds(self, cluster: Cluster) -> float:
        """Return the seconds to add the gradients of all tiles to their sums in memory.

        A kernel writes a gradient, and the sum is read and written: each of the two in its dtype.
        """
        if not cluster.memory_gb_per_s:
            return 0.0
        sizes = self.sizes
        keys = self.count * self._mean_reach * (sizes.payload("kv") + sizes.gradient("kv"))
        queries = self._backward_tiles * sum(self._query_gradients)
        return 2 * (keys + queries) / cluster.memory_bytes_per_s

    @property
    def _mean_reach(self) -> float:
        """Share of all keys that a slice sees, on average."""
        plan = self.plan
        pairs = plan.work().pairs.sum()  # each pair of a head once
        keys = pairs / plan.seq_len + plan.size * self.length / 2
        return min(1.0, float(keys) / plan.seq_len)

    @property
    def _backward_tiles(self) -> float:
        """Number of tiles of all slices' backward: each has as many keys as a slice.

        n slices of one document have n (n + 1) / 2.
        """
        return max(self.count, self.count * self._mean_reach * self.plan.local_len / self.length)

    def latency_seconds(self, cluster: Cluster, tp: int) -> float:
        """Return the seconds that the exchanges of all slices but the first take to begin."""
        degree = self.plan.geometry.ulysses_degree
        collectives = []  # their number, and the number of neighbours over which they reach
        if degree > 1:
            collectives.append((EXCHANGES, degree))
        if self.team > 1:
            collectives.append((TEAM_EXCHANGES, self.plan.size))

        seconds = 0.0
        for number, ranks in collectives:
            latency = cluster.between_latency_us
            if ranks * tp <= cluster.gpus_per_node:
                latency = cluster.inside_latency_us
            seconds += number * (self.count - 1) * latency * MICRO
        return seconds

    def launch_seconds(self, layer_seconds: float, cluster: Cluster) -> float:
        """Return the seconds that launches add to a layer's passes over one micro-batch.

        A GPU computes while the next kernels are launched, so launches count only if they take
        longer than computing; on a CPU they count in full. Those of tiles are not included.

        Args:
            layer_seconds: seconds of computing in all passes of the layer.
        """
        launches = LAUNCHES * self.count * cluster.launch_us * MICRO / PER_TILE
        if cluster.device == "cpu":
            return launches
        return max(0.0, launches - layer_seconds)

    def tile_seconds(self, cluster: Cluster) -> float:
        """Return the seconds that the tiles of all slices but the first take to begin.

        Forward, twice, such a slice has a tile of earlier keys and one of its own; backward, one
        for each slice of earlier keys.
        """
        tiles = 2 * 2 * (self.count - 1) + self._backward_tiles - 1
        return tiles * cluster.launch_us * MICRO
