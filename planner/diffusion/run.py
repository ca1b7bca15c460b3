"""A step's division over ranks, and the recorded parts of a model for a rank's tokens."""

from dataclasses import dataclass, field
from functools import lru_cache

from parallel.context import Plan, make_plan
from parallel.context.config import FullContextConfig
from parallel.data import Strategy
from planner.cluster import Cluster
from planner.diffusion.backward import Trace, trace
from planner.diffusion.clip import Clip
from planner.diffusion.parts import Forward, Tokens
from planner.diffusion.symbols import Training
from planner.diffusion.tape import ATTENTION
from planner.diffusion.transformer import Transformer
from planner.layers.memory import num_outputs

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Linear modules that diffusers' training scripts give adapters: those of the attention."""


@dataclass(frozen=True, kw_only=True)
class ClipRun:
    """Division of a step over ranks, and what is trained."""

    gpus: int
    context: int = 1
    """Number of ranks that share a clip."""
    method: FullContextConfig = field(default_factory=FullContextConfig)
    batch: int = 1
    """Number of clips per step, over all ranks."""
    samples: int = 1
    """Number of clips per micro-batch."""
    strategy: Strategy = "zero3"
    recomputed: int = 0
    """Number of blocks recomputed in the backward pass; diffusers' checkpointing takes all."""
    element_size: int = 2
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = LORA_TARGETS
    tp: int = 1
    """Number of ranks that split each matrix, in other programs; ``parallel.diffusers`` has 1."""

    @property
    def groups(self) -> int:
        """Return the number of data-parallel groups; each trains on its own clips."""
        return self.gpus // (self.context * self.tp)

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a group per step."""
        return self.batch // (self.groups * self.samples)

    def training(self, plan: Plan | None = None, buffers: int = 0) -> Training:
        """Return the settings with which the forward pass is recorded.

        Args:
            plan: plan of the joint attention; by default, that of one rank.
            buffers: bytes that the joint attention's backward pass needs.
        """
        return Training(
            self.element_size,
            self.lora_rank,
            self.lora_targets,
            attention_buffers=buffers,
            attention_outputs=1 if plan is None else num_outputs(plan),
        )


@dataclass(frozen=True)
class Traces:
    """Recorded parts of a model for a rank's tokens."""

    embed: Trace
    """Embeddings, and all else before the blocks."""
    finish: Trace
    """The last norm and the output projection."""
    blocks: tuple[Trace, ...]
    """The blocks, in order."""

    @property
    def outside(self) -> tuple[Trace, Trace]:
        """Return the parts outside the blocks."""
        return self.embed, self.finish

    @property
    def all_parts(self) -> tuple[Trace, ...]:
        """Return all parts of the model."""
        return (*self.outside, *self.blocks)

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters, including adapters."""
        return sum(part.parameters for part in self.all_parts)

    @property
    def trained(self) -> int:
        """Return the number of trained parameters."""
        return sum(part.trained for part in self.all_parts)


@lru_cache(maxsize=256)
def traces_of(model: Transformer, training: Training, tokens: Tokens) -> Traces:
    """Record a model for a rank's tokens."""

    def record(forward: Forward) -> Trace:
        return trace(training, tokens.samples, lambda tape: forward(tape, tokens))

    blocks: list[Trace] = []
    for kind in model.blocks:
        blocks += [record(kind.forward)] * kind.count
    return Traces(record(model.embed), record(model.finish), tuple(blocks))


def whole_traces(model: Transformer, clip: Clip, training: Training) -> Traces:
    """Record a model for one clip on one rank."""
    return traces_of(model, training, clip.local_tokens(model, clip.attended_tokens(model)))


def clip_flops(model: Transformer, clip: Clip, training: Training) -> tuple[int, int]:
    """Return the FLOPs of a forward pass for one clip, and those of a backward pass."""
    traces = whole_traces(model, clip, training)
    pairs = clip.attended_tokens(model) ** 2
    joint = ATTENTION * pairs * model.hidden * len(traces.blocks)
    forward = joint
    backward = 2 * joint
    for part in traces.all_parts:
        forward += part.products + part.attention
        backward += part.backward_products + 2 * part.attention
    return forward, backward


def plan_of(model: Transformer, clip: Clip, run: ClipRun, cluster: Cluster) -> Plan:
    """Return the attention's plan. Raises ContextError if ranks or heads do not suit the method."""
    per_node = max(1, cluster.gpus_per_node // run.tp)
    plan = make_plan(
        run.method.context_parallel_method,
        seq_len=clip.attended_tokens(model),
        size=run.context,
        multiple=run.tp,
        causal=False,
        **run.method.plan_arguments(per_node),
    )
    heads = model.heads // run.tp
    plan.geometry.check_heads(heads, heads)
    return plan
