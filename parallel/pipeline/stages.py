"""Divide the layers into pipeline stages, and check the settings of each schedule."""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, NoReturn

from parallel.data import Strategy
from runtime.errors import UserError, at_least

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]
SINGLE: tuple[Schedule, ...] = ("1F1B", "GPipe")
"""Schedules with one stage per rank."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Layers of each pipeline-parallel process, and the order of micro-batches through them."""

    pipeline_schedule: Schedule = "1F1B"
    """Order of forward and backward passes. 1F1B holds the activations of as many micro-batches as
    there are stages, GPipe those of all micro-batches. Interleaved1F1B has several stages per
    process, and therefore shorter bubbles (idle times). InterleavedZeroBubble also delays the
    gradients of weights, to compute them in the bubbles."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Number of stages of each pipeline-parallel process; more than 1 only with the interleaved
    schedules."""
    pipeline_layers: tuple[int, ...] = ()
    """Number of layers of each stage, such as 7 8 8 7; by default equal, or fewer in the outer
    stages."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_virtual_stages_per_pipeline_rank")
        virtual_stages = self.num_virtual_stages_per_pipeline_rank
        if self.single and virtual_stages > 1:
            raise UserError(
                f"num_virtual_stages_per_pipeline_rank is {virtual_stages}, but pipeline_schedule "
                f"{self.pipeline_schedule} has one stage per process; set pipeline_schedule to "
                "Interleaved1F1B, or num_virtual_stages_per_pipeline_rank to 1"
            )
        if min(self.pipeline_layers, default=1) < 1:
            raise UserError(
                f"pipeline_layers is {self.pipeline_layers}, but each stage needs a layer; give "
                "only numbers of 1 or more"
            )

    @property
    def single(self) -> bool:
        """True if each rank has one stage, False if it interleaves several."""
        return self.pipeline_schedule in SINGLE

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of weights are computed later than those of activations."""
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
        """Refuse settings that cannot run or would change the result; name the nearest that work.

        Args:
            batch: number of sequences in a micro-batch, summed over all data-parallel ranks.

        Raises:
            UserError: more stages than layers, fewer micro-batches than ranks, or a schedule that
                does not support the data-parallel strategy, tensor parallelism or recomputation.
        """
        if ranks == 1:
            self._check_unused()
        self._check_layers(layers, ranks)
        if not self._rounds_fit(micro_batches, ranks):
            self._refuse_micro_batches(micro_batches, ranks, batch)
        if self.splits_backward:
            self._check_split_backward(strategy, tp, recompute)

    def _check_unused(self) -> None:
        """Raise UserError if a setting differs from its default, since there is no pipeline."""
        default = PipelineConfig()
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        if names:
            settings = ", ".join(f"{name} is {getattr(self, name)}" for name in names)
            raise UserError(
                f"{settings}, but there is no pipeline; give --pipeline-model-parallel-size 2 or "
                "more, or leave out all other pipeline settings"
            )

    def _check_layers(self, layers: int, ranks: int) -> None:
        """Raise UserError if there are more stages than layers, or the listed layers do not fit."""
        stages = self.stages(ranks)
        if stages > layers:
            remedy = f"at most {layers} processes"
            if layers // ranks:
                remedy = f"num_virtual_stages_per_pipeline_rank {layers // ranks}"
            raise UserError(
                f"num_layers is {layers}, but there are {stages} pipeline stages, and each needs a "
                f"layer; nearest settings that work: {remedy}, or num_layers {stages}"
            )
        stage_layers(self, layers, ranks)

    def _refuse_micro_batches(self, micro_batches: int, ranks: int, batch: int) -> NoReturn:
        """Raise UserError with the nearest global batch sizes that the schedule supports."""
        fitting = [n for n in range(ranks, micro_batches) if self._rounds_fit(n, ranks)][-1:]
        larger = max(micro_batches, ranks)
        while not self._rounds_fit(larger, ranks):
            larger += 1
        fitting.append(larger)
        nearest = " or ".join(str(n * batch) for n in fitting)
        rounds = "" if self.single else ", in equal rounds of about that number"
        raise UserError(
            f"pipeline_schedule {self.pipeline_schedule} needs at least {ranks} micro-batches "
            f"(pipeline_model_parallel_size) per data-parallel rank{rounds}, but "
            f"global_batch_size {micro_batches * batch} gives {micro_batches}; nearest settings "
            f"that work: global_batch_size {nearest}, or another micro_batch_size"
        )

    def _check_split_backward(self, strategy: Strategy, tp: int, recompute: bool) -> None:
        """Raise UserError for settings that do not allow a backward pass in two parts."""
        schedule = self.pipeline_schedule
        if strategy in ("zero2", "zero3"):
            raise UserError(
                f"pipeline_schedule {schedule} keeps weights and gradients whole until its last "
                f"micro-batch, but data_parallel_sharding_strategy {strategy} does not; set "
                "data_parallel_sharding_strategy to zero1, or pipeline_schedule to Interleaved1F1B"
            )
        if tp > 1:
            raise UserError(
                f"pipeline_schedule {schedule} runs each backward pass in two parts, but torch "
                "cannot divide the backward pass of a layer that tensor_model_parallel_size "
                f"{tp} splits; set tensor_model_parallel_size to 1, or pipeline_schedule to "
                "Interleaved1F1B"
            )
        if recompute:
            raise UserError(
                f"pipeline_schedule {schedule} runs each backward pass in two parts, but "
                "recompute_granularity, loss_chunk_size, ffn_chunk_size and layer_chunk_size need "
                "an undivided pass; leave those out, or set pipeline_schedule to Interleaved1F1B"
            )

    def _rounds_fit(self, micro_batches: int, ranks: int) -> bool:
        """Return True if every rank has work and an interleaved schedule's rounds are equal."""
        equal = self.single or not micro_batches % max(1, micro_batches // ranks)
        return micro_batches >= ranks and equal

    def stages(self, ranks: int) -> int:
        """Return the total number of stages on ``ranks`` ranks."""
        return ranks * self.num_virtual_stages_per_pipeline_rank

    def in_flight(self, rank: int, ranks: int, micro_batches: int) -> float:
        """Return the number of micro-batches whose activations a rank holds at once.

        They are the micro-batches of the rank's warm-up, plus one. With several stages per rank,
        one stage's activations count as a fraction of a micro-batch (Narayanan et al. 2021, section
        2.2).
        """
        if ranks == 1:
            return 1
        if self.pipeline_schedule == "GPipe":
            return micro_batches
        virtual_stages = self.num_virtual_stages_per_pipeline_rank
        later_ranks = ranks - rank  # this rank is counted too
        in_flight: float = later_ranks
        if virtual_stages > 1:
            in_flight = (2 * later_ranks - 1 + (virtual_stages - 1) * ranks) / virtual_stages
        return min(in_flight, micro_batches)

    def stages_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending: every ``ranks``-th stage."""
        return tuple(range(rank, self.stages(ranks), ranks))


def stage_layers(config: PipelineConfig, layers: int, ranks: int) -> list[range]:
    """Return the layers of each stage.

    By default the layers are divided equally; the remainder goes to the middle stages, since the
    first has the embedding and the last the logits.

    Raises:
        UserError: ``pipeline_layers`` does not match the stages and layers.
    """
    stages = config.stages(ranks)
    default = [layers // stages] * stages
    from_the_middle = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
    for stage in from_the_middle[: layers % stages]:
        default[stage] += 1

    counts = list(config.pipeline_layers) or default
    if len(counts) != stages or sum(counts) != layers:
        raise UserError(
            f"pipeline_layers is {counts}, {sum(counts)} layers for {len(counts)} stages, but "
            f"there are {layers} layers and {stages} stages; leave out pipeline_layers to use "
            f"{' '.join(map(str, default))}"
        )
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
