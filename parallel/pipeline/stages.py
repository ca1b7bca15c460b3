"""Divide the layers into pipeline stages, and check what each schedule supports."""

from dataclasses import dataclass, fields
from itertools import count, pairwise
from typing import Literal

from parallel.data import Strategy
from runtime.errors import UserError, at_least

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]
SINGLE: tuple[Schedule, ...] = ("1F1B", "GPipe")
"""Schedules of one stage per rank."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Layers of each pipeline-parallel process, and the order of micro-batches through them."""

    pipeline_schedule: Schedule = "1F1B"
    """Order of forwards and backwards: 1F1B keeps activations of as many micro-batches as there are
    stages, GPipe of all; Interleaved1F1B has several stages per process and shorter bubbles;
    InterleavedZeroBubble computes the gradients of weights apart from those of activations, and
    fills bubbles with them."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Stages of each pipeline-parallel process; more than 1 with the interleaved schedules alone.
    """
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each stage, such as 7 8 8 7; by default equal, the first and the last stages the
    fewer.
    """

    def __post_init__(self) -> None:
        at_least(self, 1, "num_virtual_stages_per_pipeline_rank")
        virtual, schedule = self.num_virtual_stages_per_pipeline_rank, self.pipeline_schedule
        if self.single and virtual > 1:
            raise UserError(
                f"num_virtual_stages_per_pipeline_rank is {virtual} with pipeline_schedule {schedule}, which has one "
                "stage per process; use Interleaved1F1B, or 1 virtual stage"
            )
        if min(self.pipeline_layers, default=1) < 1:
            raise UserError(f"pipeline_layers is {self.pipeline_layers}; each stage needs a layer")

    @property
    def single(self) -> bool:
        """Return whether each rank has one stage, not several that it interleaves."""
        return self.pipeline_schedule in SINGLE

    @property
    def splits_backward(self) -> bool:
        """Return whether a backward to weights comes later than that to activations."""
        return self.pipeline_schedule == "InterleavedZeroBubble"

    def check(
        self,
        layers: int,
        ranks: int,
        micro_batches: int,
        strategy: Strategy,
        *,
        batch: int = 1,
        tp: int = 1,
        recompute: bool = False,
    ) -> None:
        """Refuse what cannot run or would silently compute something else; name the nearest
        settings that work.

        Args:
            batch: sequences of one micro-batch over all data-parallel ranks.

        Raises:
            UserError: more stages than layers, fewer micro-batches than ranks, or a schedule that
                does not support the data-parallel strategy, tensor parallelism or recomputation.
        """
        schedule, stages = self.pipeline_schedule, self.stages(ranks)
        if ranks == 1 and self != PipelineConfig():
            default = PipelineConfig()
            names = [
                f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
            ]
            named = [f"{name} is {getattr(self, name)}" for name in names]
            raise UserError(
                f"{', '.join(named)}, and there is no pipeline; give --pipeline-model-parallel-size 2 or more, or "
                "leave it out"
            )
        if stages > layers:
            virtual = layers // ranks
            other = (
                f"num_virtual_stages_per_pipeline_rank {virtual}"
                if virtual
                else f"at most {layers} processes"
            )
            raise UserError(
                f"num_layers is {layers} and there are {stages} pipeline stages, each of which needs a layer; nearest "
                f"that work: {other}, or num_layers {stages}"
            )
        stage_layers(self, layers, ranks)
        if not self._rounds(micro_batches, ranks):
            below = [n for n in range(ranks, micro_batches) if self._rounds(n, ranks)][-1:]
            above = next(n for n in count(max(micro_batches, ranks)) if self._rounds(n, ranks))
            nearest = " or ".join(str(n * batch) for n in (*below, above))
            rounds = " in equal rounds of about as many" if not self.single else ""
            raise UserError(
                f"{schedule} takes at least {ranks} micro-batches (pipeline_model_parallel_size) per data-parallel rank"
                f"{rounds}, and global_batch_size {micro_batches * batch} gives {micro_batches}; nearest that work: "
                f"global_batch_size {nearest}, or another micro_batch_size"
            )
        if not self.splits_backward:
            return
        if strategy in ("zero2", "zero3"):
            raise UserError(
                f"pipeline_schedule {schedule} keeps weights and gradients whole until its last micro-batch, and "
                f"data_parallel_sharding_strategy {strategy} divides them; nearest that work: zero1, or Interleaved1F1B"
            )
        if tp > 1:
            raise UserError(
                f"pipeline_schedule {schedule} takes each backward in two parts, and torch cannot part that of a layer "
                f"split by tensor_model_parallel_size {tp}; nearest that work: size 1, or Interleaved1F1B"
            )
        if recompute:
            raise UserError(
                f"pipeline_schedule {schedule} takes each backward in two parts, and those of "
                "recompute_granularity, loss_chunk_size and ffn_chunk_size have one; leave them out, or use "
                "Interleaved1F1B"
            )

    def _rounds(self, micro_batches: int, ranks: int) -> bool:
        """Return whether every process has work and an interleaved schedule's rounds are equal."""
        equal = self.single or not micro_batches % max(1, micro_batches // ranks)
        return micro_batches >= ranks and equal

    def stages(self, ranks: int) -> int:
        """Return the number of stages on that many ranks."""
        return ranks * self.num_virtual_stages_per_pipeline_rank

    def in_flight(self, rank: int, ranks: int, micro_batches: int) -> float:
        """Return of how many micro-batches a rank holds activations of all its layers at once: its
        warm-up, and one.

        With several stages a rank they are parts of its layers (Narayanan et al. 2021, section
        2.2).
        """
        if ranks == 1:
            return 1
        if self.pipeline_schedule == "GPipe":
            return micro_batches
        virtual, ahead = self.num_virtual_stages_per_pipeline_rank, ranks - rank
        return min(
            ahead if virtual == 1 else (2 * ahead - 1 + (virtual - 1) * ranks) / virtual,
            micro_batches,
        )

    def own(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return a rank's stages, ascending: every ``ranks``-th one."""
        return tuple(range(rank, self.stages(ranks), ranks))


def stage_layers(config: PipelineConfig, layers: int, ranks: int) -> list[range]:
    """Return the layers of each stage.

    The remainder goes to the middle stages, since the first has the embedding and the last the
    logits.

    Raises:
        UserError: ``pipeline_layers`` does not match the stages and layers.
    """
    stages = config.stages(ranks)
    equal = [layers // stages] * stages
    from_the_middle = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
    for stage in from_the_middle[: layers % stages]:
        equal[stage] += 1
    counts = list(config.pipeline_layers) or equal
    if len(counts) != stages or sum(counts) != layers:
        raise UserError(
            f"pipeline_layers is {counts}, {sum(counts)} layers for {len(counts)} stages, and there are {layers} "
            f"layers and {stages} stages; left out, it is {' '.join(map(str, equal))}"
        )
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
