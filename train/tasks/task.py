"""Interface of a task: the model, objective and data of a configuration on a mesh."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import Samples
from model.registry import initial_weight
from parallel.apply import parallelize
from parallel.context import ContextParallel
from parallel.data import Runner
from parallel.mesh import Mesh
from runtime.progress import counted
from runtime.tensors import Part
from runtime.together import is_first
from train.callbacks.ruler import Curve
from train.config.common import CommonConfig
from train.objectives import Objective

C = TypeVar("C", bound=CommonConfig)


@dataclass(frozen=True)
class Data:
    """The datasets of a run, and figures about them."""

    train: Samples
    valid: Samples | None
    """Validation samples; None if the run makes no validations."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Figures recorded with each validation loss, such as the corpus's unigram entropy."""
    curve: Curve | None = None
    """A RULER curve to measure during training, for language models."""


class Task(ABC, Generic[C]):
    """The model, the objective and the data of a run.

    The trainer, the planner's rehearsals and the parity tool all build from it. The constructor
    creates process groups, but no weights: `build_parts` allocates these.
    """

    entry: ClassVar[str]
    """The program that trains the model."""
    data_writer: ClassVar[str]
    """The program that writes the training data."""
    data_flags: ClassVar[tuple[str, ...]]
    """The flags that name the training data, with placeholders."""

    cp: ContextParallel
    objective: Objective

    def __init__(self, config: C, mesh: Mesh) -> None:
        """Set up the task on a mesh from a valid configuration without unset fields; collective."""
        self.config = config
        self.mesh = mesh
        self.set_up()
        self.batch_samples = config.train.batch_size(mesh.dp.size())
        """Number of sequences (or samples) per iteration."""
        self.batch_tokens = self.batch_samples * config.sequence_length
        """Number of tokens (or patches) per iteration."""

    @abstractmethod
    def set_up(self) -> None:
        """Set ``cp``, which shards sequences over ranks, and ``objective``; collective."""

    @staticmethod
    @abstractmethod
    def parse_args(arguments: Sequence[str]) -> Any:
        """Parse a command line, as ``flags.parse`` does."""

    @staticmethod
    @abstractmethod
    def validate(config: Any, world_size: int) -> None:
        """Check a configuration's sections against each other.

        Raises UserError for the first contradiction.
        """

    @staticmethod
    def load_tokenizer(config: Any) -> Any:
        """Load the tokenizer of the data; None if the data are not text."""
        return None

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the whole model on torch's default device."""

    def initial_weight(self, name: str, shape: Sequence[int], part: Part) -> Tensor:
        """Return a shard of a parameter's initial value."""
        return initial_weight(self.config.model, name, shape, self.config.train.seed, part)

    @abstractmethod
    def load_data(self, tokenizer: Any) -> Data:
        """Open the data; collective. Raises UserError if they are missing or do not fit the run."""

    @abstractmethod
    def flops_per_token(self, length: int) -> float:
        """Return the training FLOPs per token of a document of this length."""

    @abstractmethod
    def description(self, data: Data) -> str:
        """Describe the run in one line: the model, the mesh and the data."""

    def after_validation(self, parts: Sequence[Any]) -> Callable[[int], None] | None:
        """Return a function, called with the iteration on all ranks after a validation, or None."""
        return None

    def build_parts(self, *, initialize: bool = True) -> list[Any]:
        """Build this rank's parts of the model, one for each of its pipeline stages; collective.

        Without ``initialize`` the weights are uninitialised memory, to be loaded.
        """
        weight_of = self.initial_weight if initialize else None
        return parallelize(self.build_model, self.mesh, self.config, weight_of)

    def build_runner(self, parts: Sequence[Any], micro_batches: int | None = None) -> Runner:
        """Build the runner that takes a step's micro-batches through ``parts``; collective.

        ``micro_batches`` is the number of micro-batches per step on this rank, by default the
        configuration's.
        """
        mesh = self.mesh
        objective = self.objective
        pipeline = self.config.pipeline
        train = self.config.train
        strategy = self.config.data_parallel.strategy
        pp_size = mesh.pp.size()
        if pp_size == 1:
            return Runner(parts, objective.loss_sum, strategy)

        schedule = pipeline.pipeline_schedule
        virtual_stages = pipeline.num_virtual_stages_per_pipeline_rank
        if is_first() and schedule == "Interleaved1F1B" and virtual_stages == 1:
            print(
                f"note: pipeline_schedule {schedule} with 1 virtual stage per process is the same "
                "as 1F1B, because there is nothing to interleave; "
                "--num-virtual-stages-per-pipeline-rank 2 shortens the pipeline bubbles",
                flush=True,
            )
        # Imported here, because the import takes a second, due to torch.compile.
        from parallel.pipeline.schedule import PipelineRunner

        return PipelineRunner(
            parts,
            objective.loss_sum,
            strategy,
            config=pipeline,
            mesh=mesh.pp,
            device=mesh.device,
            micro_batches=micro_batches or train.micro_batches(mesh.dp.size()),
            first_input=objective.first_input(train.micro_batch_size),
            hidden=self.hidden_states,
            tied=objective.tied(parts[0], pipeline.stages(pp_size)),
        )

    @property
    def validation_samples(self) -> int:
        """Number of samples in a validation, if the data have that many."""
        return self.config.train.eval_iters * self.batch_samples

    @property
    def hidden_states(self) -> Tensor:
        """A meta tensor like the hidden states that pipeline stages exchange, [B, T, C]."""
        train = self.config.train
        sequences, tokens = self.objective.first_input(train.micro_batch_size)[1].shape[:2]
        shape = (sequences, tokens // self.mesh.tp.size(), self.config.model.hidden_size)
        return torch.empty(shape, dtype=train.dtype, device="meta")

    def _summary(self, model: str, method: str, samples: str) -> str:
        """Describe in one line the model, the mesh and the data."""
        mesh = self.mesh
        world_size = dist.get_world_size()
        layers = counted(self.config.model.num_layers, "layer")
        processes = "process" if world_size == 1 else "processes"
        pipeline = f"pipeline parallel {mesh.pp.size()} x " if mesh.pp.size() > 1 else ""
        tensor = f" x tensor parallel {mesh.tp.size()}" if mesh.tp.size() > 1 else ""
        return (
            f"{model} ({layers} of {self.config.model.hidden_size}) "
            f"on {world_size} {mesh.device.type} {processes}: "
            f"{pipeline}data parallel {mesh.dp.size()} x "
            f"context parallel {mesh.cp.size()} ({method}){tensor}, {samples}"
        )
