"""Divide a predicted step into the passes of its micro-batches, and each pass into its causes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from planner.cluster import Cluster
from planner.host_memory import offloaded
from planner.layers.attention_cost import AttentionCost
from planner.layers.memory import rank_sizes
from planner.search import MemoryEstimate
from planner.step_cost import LayerSeconds, head_seconds, layer_seconds, offload_seconds
from planner.workload import with_softmax_layers

Kind = Literal["compute", "send", "copy", "wait"]
Direction = Literal["forward", "backward", ""]

UNLIMITED = 1e15
"""Rate that makes a part of the work take no time, to see the seconds of the rest."""
ROUNDING = 1e-9
"""Smaller parts of a pass, and smaller waits, as a share of a step, are rounding errors."""

SLOWER = "wait for slower ranks"
SENDS = "attention's sends"
EXCHANGE = "data parallel"


class Part(NamedTuple):
    """A part of a pass: its kind, cause and seconds."""

    kind: Kind
    cause: str
    seconds: float


@dataclass(frozen=True)
class Passes:
    """Parts of a micro-batch's two passes on a rank, and the sends and copies that they hide."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    hidden: dict[Direction, tuple[Part, ...]]

    def parts(self, direction: Direction) -> tuple[Part, ...]:
        return self.forward if direction == "forward" else self.backward

    def seconds(self, direction: Direction) -> float:
        return sum(part.seconds for part in self.parts(direction))


class Step:
    """A step's seconds, divided over its passes."""

    def __init__(self, estimate: MemoryEstimate, cluster: Cluster) -> None:
        config = estimate.config
        self.cluster = cluster.running(config.context.attention_backend, config.packed)
        self.estimate = estimate
        self.prediction = estimate.predicted(cluster)
        self.work, self.plan, self.arrangement = estimate.inputs
        self.layers = self.arrangement.stage_layers(self.work)
        self.turns = self.work.micro_batches + self.arrangement.pp - 1

    def turn_seconds(self, cause: str) -> float:
        """Return a cause's seconds in the two passes of a micro-batch."""
        return self.prediction.seconds.get(cause, 0.0) / self.turns

    def layer(self, cluster: Cluster) -> LayerSeconds:
        """Return a layer's seconds on a cluster."""
        work = with_softmax_layers(self.work, self.estimate.config, cluster)
        return layer_seconds(work, self.plan, self.arrangement, cluster)[0]

    @cached_property
    def real_layer(self) -> LayerSeconds:
        return self.layer(self.cluster)

    @cached_property
    def computing_layer(self) -> LayerSeconds:
        """A layer's seconds if all links between ranks took no time."""
        free_links = replace(
            self.cluster,
            inside_gb_per_s=UNLIMITED,
            between_gb_per_s=UNLIMITED,
            inside_latency_us=0,
            between_latency_us=0,
        )
        return self.layer(free_links)

    @cached_property
    def sending_layer(self) -> LayerSeconds:
        """A layer's seconds if computing took no time."""
        free_computing = replace(self.cluster, peak_tflops=UNLIMITED, launch_us=0)
        if self.cluster.memory_gb_per_s:
            free_computing = replace(free_computing, memory_gb_per_s=UNLIMITED)
        return self.layer(free_computing)

    def computing_of_places(self) -> list[tuple[float, float]]:
        """Return the seconds that each place computes a layer's attention, forward and backward.

        The cost model knows differences between ranks only for softmax attention.
        """
        work = self.work
        layer = self.computing_layer
        size = self.plan.geometry.shape.size
        if self.plan.geometry.method.states or work.delta or work.softmax_layers:
            return [(layer.attention, layer.attention_backward)] * size

        tp = self.arrangement.tp
        sizes = rank_sizes(work, self.plan, tp)
        forward, backward = AttentionCost(self.plan, sizes, self.cluster, tp).computing()
        if work.window is not None:
            share = work.windowed_layers / work.layers
            windowed_plan = self.plan.windowed(work.window)
            windowed = AttentionCost(windowed_plan, sizes, self.cluster, tp).computing()
            forward = (1 - share) * forward + share * windowed[0]
            backward = (1 - share) * backward + share * windowed[1]
        return list(zip(forward.tolist(), backward.tolist(), strict=True))

    def passes(self, computing: tuple[float, float]) -> Passes:
        """Return the passes of a rank that computes a layer's attention in these seconds."""
        real = self.real_layer
        layers = self.layers
        tokens = self.work.tokens(self.plan)
        head = head_seconds(self.work, tokens, self.arrangement.tp, self.cluster)
        linear = layers * (real.products + real.pointwise) + head
        tensor = self.turn_seconds("tensor parallel") / 2
        pipeline = self.turn_seconds("pipeline") / 2
        to_host, from_host = self.exposed_copies()
        shared = [
            Part("send", "tensor parallel", tensor),
            Part("send", "pipeline", pipeline),
        ]
        forward = [
            Part("compute", "linear", linear),
            *self._attention("forward", computing[0]),
            *shared,
            Part("copy", "offload", to_host),
        ]
        backward = [
            Part("copy", "offload", from_host),
            Part("compute", "recompute", self.turn_seconds("recompute")),
            Part("compute", "linear", self.turn_seconds("linear") - linear),
            # Some of it is of the forward pass; most, sums and keys made again, is of this one.
            Part("compute", "slices", self.turn_seconds("slices")),
            *self._attention("backward", computing[1]),
            *shared,
        ]
        hidden: dict[Direction, tuple[Part, ...]] = {
            "forward": self._hidden("forward"),
            "backward": self._hidden("backward"),
        }
        return Passes(_non_empty(forward), _non_empty(backward), hidden)

    def _attention(self, direction: Direction, computing: float) -> list[Part]:
        """Return the parts of a pass's attention: computing, waits for slower ranks, and sends."""
        total, lockstep, _ = self._attention_seconds(direction)
        if total - lockstep < ROUNDING * total:
            lockstep = total
        if abs(lockstep - computing) < ROUNDING * total:
            computing = lockstep
        return [
            Part("compute", "attention", self.layers * computing),
            Part("wait", SLOWER, self.layers * (lockstep - computing)),
            Part("send", SENDS, self.layers * (total - lockstep)),
        ]

    def _attention_seconds(self, direction: Direction) -> tuple[float, float, float]:
        """Return a layer's seconds of attention: in all, of only computing, of only sending."""
        every = (self.real_layer, self.computing_layer, self.sending_layer)
        if direction == "forward":
            real, computing, sending = [layer.attention for layer in every]
        else:
            real, computing, sending = [layer.attention_backward for layer in every]
        return float(real), float(computing), float(sending)

    def _hidden(self, direction: Direction) -> tuple[Part, ...]:
        """Return the sends and copies that a pass's computing hides."""
        total, lockstep, sending = self._attention_seconds(direction)
        sends = self.layers * max(0.0, sending - max(0.0, total - lockstep))
        if sends < ROUNDING * self.layers * total:
            sends = 0.0
        copies = self.copy_seconds()
        if direction == "forward":
            copies -= self._copies_of_pass()[0]
        else:
            copies -= self._copies_of_pass()[1]
        parts = [Part("send", SENDS, sends), Part("copy", "offload", max(0.0, copies))]
        return _non_empty(parts)

    def copy_seconds(self) -> float:
        """Return the seconds to copy a micro-batch's activations in one direction."""
        if not self.prediction.seconds.get("offload") and not self.arrangement.offload:
            return 0.0
        if not self.cluster.host_gb_per_s:
            return 0.0
        return offloaded(*self.estimate.inputs) / self.cluster.host_bytes_per_s

    def _copies_of_pass(self) -> tuple[float, float]:
        """Return the exposed seconds of a micro-batch's copies, forward and backward."""
        if not self.copy_seconds():
            return 0.0, 0.0
        recompute = self.turn_seconds("recompute")
        return offload_seconds(*self.estimate.inputs, self.cluster, self.real_layer, recompute)

    def exposed_copies(self) -> tuple[float, float]:
        """Return the exposed seconds of copies that belong into a micro-batch's passes.

        The model adds them once per micro-batch and lets no other stage wait for them. So in a
        pipeline they come at the end, all together.
        """
        if self.arrangement.pp > 1:
            return 0.0, 0.0
        return self._copies_of_pass()

    def last_parts(self) -> tuple[Part, ...]:
        """Return the parts at the end of a step, after all passes."""
        seconds = self.prediction.seconds
        copies = seconds.get("offload", 0.0) if self.arrangement.pp > 1 else 0.0
        parts = [
            Part("copy", "offload", copies),
            Part("send", EXCHANGE, seconds.get("data parallel", 0.0)),
            Part("compute", "optimizer", seconds.get("optimizer", 0.0)),
            Part("copy", "optimizer offload", seconds.get("optimizer offload", 0.0)),
        ]
        return _non_empty(parts)


def _non_empty(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.seconds > 0)
