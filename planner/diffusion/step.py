"""Time and memory of a training step of a diffusion transformer on clips that ranks share.

Attention and communication are counted from the plan that ``parallel.diffusers`` executes, and
their times are summed as for language models (planner/step_cost.py, step_memory.py). All else is
counted from the recorded forward pass of the model's class: matmuls, the bytes that operators
between them read and write, cross-attention to keys that every rank has, and the memory of a
block's backward pass. Every rank computes the parts before the blocks for all tokens, and the
prediction is gathered after the blocks.

Not counted are the encoders of text and pictures, whose outputs are cached, and the time of the
optimizer's step.
"""

from dataclasses import dataclass

from parallel.context.traffic import sizes
from planner.cluster import Cluster
from planner.diffusion.clip import Clip
from planner.diffusion.memory import step_memory
from planner.diffusion.run import ClipRun, clip_flops, plan_of, traces_of
from planner.diffusion.transformer import Transformer
from planner.layers.attention_cost import BACKWARD, FORWARD, Links
from planner.layers.buffers import backward_buffers
from planner.step_cost import LayerSeconds, attention_seconds, ring_seconds, seconds_of_layers
from planner.step_shape import Arrangement, StepShape
from planner.workload import WORKSPACES


@dataclass(frozen=True)
class ClipPrediction:
    """Seconds of a step and bytes of the busiest rank, each keyed by cause."""

    seconds: dict[str, float]
    memory: dict[str, float]
    forward: float
    """Seconds that the step's forward passes take."""
    pointwise: float
    """Seconds of the cause ``linear`` without matmuls: norms, gates, casts, rotations and sums."""
    flops: float
    """FLOPs of the step over all ranks, without recomputation."""
    links: Links
    """Bytes that a group sends in a block's attention."""

    @property
    def time(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        """Return the bytes of memory at the peak."""
        return sum(self.memory.values())

    def tflops(self, gpus: int) -> float:
        """Return the TFLOP/s per GPU."""
        return self.flops / self.time / gpus / 1e12


class ClipStep:
    """A step on clips, converted to the inputs of the cost model."""

    def __init__(self, model: Transformer, clip: Clip, run: ClipRun, cluster: Cluster) -> None:
        """Set up a step.

        Raises:
            ContextError: the method does not suit ranks or heads.
            ClipError: the clip does not suit the model.
        """
        self.run = run
        self.model = model
        self.clip = clip
        self.cluster = cluster.running(run.method.attention_backend)

        # The attention's plan, and the tokens that it gives to a rank.
        self.plan = plan_of(model, clip, run, cluster)
        self.tokens = clip.local_tokens(model, self.plan.local_len, run.samples)

        heads = model.heads // run.tp
        geometry = self.plan.geometry
        self.sizes = sizes(geometry, run.samples, heads, heads, model.head_dim, run.element_size)

        # The forward pass is recorded with the buffers that the plan's backward pass needs.
        moves = self.plan.backward_moves(self.sizes)
        buffers = backward_buffers(self.plan, self.sizes, moves) * run.tp
        self.traces = traces_of(model, run.training(self.plan, buffers), self.tokens)

        # The rest of the step, as for any model.
        self.arrangement = Arrangement(
            dp=run.groups,
            tp=run.tp,
            strategy=run.strategy,
            recompute="full" if run.recomputed else "none",
        )
        self.work = self._work()

    def _work(self) -> StepShape:
        """Return the model's sizes; ``matrix_weights`` is 0, since the traces count the matmuls."""
        model = self.model
        workspaces = WORKSPACES if self.cluster.device == "cuda" else 0
        return StepShape(
            layers=len(self.traces.blocks),
            hidden=model.hidden,
            ffn=model.inner,
            gated=False,
            heads=model.heads,
            kv_heads=model.heads,
            head_dim=model.head_dim,
            vocab=0,
            parameters=self.traces.parameters,
            outside=sum(part.parameters for part in self.traces.outside),
            matrix_weights=0,
            element_size=self.run.element_size,
            micro_batch=self.run.samples,
            micro_batches=self.run.micro_batches,
            trained=self.traces.trained,
            workspaces=workspaces,
        )

    def predict(self) -> ClipPrediction:
        """Predict time and memory."""
        training = self.run.training()
        return ClipPrediction(
            seconds=self.seconds(),
            memory=self.memory(),
            forward=self.forward_seconds(),
            pointwise=3
            * self.run.micro_batches
            * len(self.traces.blocks)
            * self._block().pointwise,
            flops=self.run.batch * sum(clip_flops(self.model, self.clip, training)),
            links=attention_seconds(self.plan, self.sizes, self.cluster, self.run.tp)[2],
        )

    def memory(self) -> dict[str, float]:
        """Predict the memory alone, which takes far less time."""
        return step_memory(
            self.run, self.model, self.tokens, self.traces, self.work, self.plan, self.arrangement
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step, keyed by cause."""
        seconds = seconds_of_layers(
            self._block(), self.work, self.plan, self.arrangement, self.cluster
        )
        seconds["recompute"] *= self.run.recomputed / len(self.traces.blocks)
        seconds["outside the blocks"] = sum(self._outside())
        seconds["gather"] = 2 * self._gather()  # forward and backward
        return {cause: float(time) for cause, time in seconds.items() if time}

    def forward_seconds(self) -> float:
        """Return the seconds that a step's forward passes take."""
        block = self._block()
        blocks = len(self.traces.blocks) * (block.products + block.pointwise + block.attention)
        outside, _ = self._outside()
        return float(self.run.micro_batches * blocks + outside + self._gather())

    def _block(self) -> LayerSeconds:
        """Return the seconds of a block on a rank, averaged over all blocks."""
        products = 0
        moved = 0
        local = 0
        for block in self.traces.blocks:
            products += block.products
            moved += block.moved
            local += block.attention

        # A tensor-parallel rank computes its share of the mean block.
        cluster = self.cluster
        share = 1 / (len(self.traces.blocks) * self.run.tp)
        local_seconds = share * local / cluster.attention_flops_per_s
        forward, backward, _ = attention_seconds(self.plan, self.sizes, cluster, self.run.tp)
        return LayerSeconds(
            products=share * products / cluster.products_flops_per_s,
            pointwise=share * self._moved(moved),
            attention=forward + local_seconds,
            attention_backward=backward + BACKWARD / FORWARD * local_seconds,
        )

    def _outside(self) -> tuple[float, float]:
        """Return the seconds outside the blocks, forward and backward."""
        forward = 0.0
        backward = 0.0
        for part in self.traces.outside:
            attention = part.attention / self.cluster.attention_flops_per_s
            moved = self._moved(part.moved)
            rate = self.cluster.products_flops_per_s
            forward += part.products / rate + moved + attention
            backward += part.backward_products / rate + 2 * moved
            backward += BACKWARD / FORWARD * attention
        micro_batches = self.run.micro_batches
        return micro_batches * forward, micro_batches * backward

    def _moved(self, num_bytes: float) -> float:
        """Return the seconds to read or write these bytes; 0 if the memory's rate is unknown."""
        rate = self.cluster.memory_bytes_per_s
        if not rate:
            return 0.0
        return num_bytes / rate

    def _gather(self) -> float:
        """Return the seconds of the all-reduces that gather all micro-batches' predictions."""
        ranks = self.run.context
        if ranks == 1:
            return 0.0
        elements = self.run.samples * self.tokens.whole_image * self.model.out_width
        sent = 2 * self.run.element_size * elements * (ranks - 1) / ranks
        return self.run.micro_batches * ring_seconds(sent, ranks, self.run.tp, self.cluster)


def predict_clip(model: Transformer, clip: Clip, run: ClipRun, cluster: Cluster) -> ClipPrediction:
    """Predict time and memory of a step. Raises the errors of ``ClipStep``."""
    return ClipStep(model, clip, run, cluster).predict()
