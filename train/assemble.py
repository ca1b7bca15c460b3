"""The resolved things of a run, and the model parts and the runner that they make, for every entry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.context import ContextParallel
from parallel.data import Runner, WeightOf, init_parameters, shard_model, sharding_mesh
from parallel.mesh import Mesh
from parallel.pipeline.stages import stage_layers
from parallel.recompute import recompute_layers
from runtime.together import is_first
from train.config.common import CommonConfig
from train.ema import Ema
from train.objectives import Objective
from train.optimizers.config import build_optimizer

C_co = TypeVar("C_co", bound=CommonConfig, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Run(Generic[C_co]):
    """Everything that a run has resolved before it builds anything, made once."""

    config: C_co
    """Complete and valid: the one in use."""
    mesh: Mesh
    cp: ContextParallel
    objective: Objective
    build: Callable[[], nn.Module]
    """Builds the whole model on torch's default device; it has ``layers`` and ``keep``."""
    split: Callable[[Any], None]
    """Applies tensor parallelism to a part of it."""
    weight_of: WeightOf | None
    """Gives any part of a parameter's initial value; None: weights hold no numbers, as in a rehearsal."""
    ema_decay: float | None = None
    """The decay of averages of the weights; 0 or None keeps none."""

    @cached_property
    def parts(self) -> list[Any]:
        """This rank's part of the model, with weights, for each of its pipeline stages; built when first asked for."""
        config, mesh = self.config, self.mesh
        strategy = config.data_parallel.strategy
        sharding = sharding_mesh(mesh.dp_cp, config.data_parallel)
        layers = stage_layers(config.pipeline, config.model.num_layers, mesh.pp.size())
        parts = []
        for stage in config.pipeline.own(mesh.pp.get_local_rank(), mesh.pp.size()):
            with torch.device("meta"):
                part: Any = self.build()
            # The order matters: each step works on what the previous one left.
            part.keep(layers[stage])
            self.split(part)
            config.float8.convert(part.layers)
            if config.train.compile:
                _compile_layers(part.layers)
            recompute_layers(part.layers, config.recompute)
            prefetch = mesh.device.type == "cuda"
            shard_model(part, part.layers, sharding, bf16=config.train.bf16, strategy=strategy, prefetch=prefetch)
            init_parameters(part, mesh.device, self.weight_of)
            parts.append(part)
        return parts

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of ``parts``."""
        return build_optimizer(self.config.optimizer, *self.parts)

    @cached_property
    def ema(self) -> Ema | None:
        """Averages of the weights of ``parts``, for validation and samples."""
        return Ema(self.ema_decay, self.parts) if self.ema_decay else None

    @cached_property
    def batch_samples(self) -> int:
        """The sequences, or samples, per iteration."""
        return self.config.train.batch_size(self.mesh.dp.size())

    @cached_property
    def batch_tokens(self) -> int:
        """The tokens per iteration."""
        return self.batch_samples * self.config.sequence_length

    @property
    def validation_samples(self) -> int:
        """The samples of a validation, where there are as many."""
        return self.config.train.eval_iters * self.batch_samples

    @property
    def hidden_states(self) -> Tensor:
        """A meta tensor like what a micro-batch's pipeline stages send each other, [B, T, C]."""
        train = self.config.train
        sequences, tokens = self.objective.first_input(train.micro_batch_size)[1].shape[:2]
        shape = (sequences, tokens // self.mesh.tp.size(), self.config.model.hidden_size)
        return torch.empty(shape, dtype=train.dtype, device="meta")

    def summary(self, model: str, method: str, samples: str) -> str:
        """Describe in one line the model, the mesh and the data."""
        shape, mesh = self.config.model, self.mesh
        pipeline = f"pipeline parallel {mesh.pp.size()} x " if mesh.pp.size() > 1 else ""
        tensor = f" x tensor parallel {mesh.tp.size()}" if mesh.tp.size() > 1 else ""
        layers = f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)} of {shape.hidden_size}"
        processes = f"{mesh.device.type} process{'es' * (dist.get_world_size() > 1)}"
        return (
            f"{model} ({layers}) on {dist.get_world_size()} {processes}: {pipeline}data parallel {mesh.dp.size()} x "
            f"context parallel {mesh.cp.size()} ({method}){tensor}, {samples}"
        )


def _compile_layers(layers: Sequence[Any]) -> None:
    """Compile each layer's forward, in which the attention stays an operator; what gathers its weights is outside."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # A graph that another rank has compiled and cached has that rank's process groups.
    torch._functorch.config.enable_autograd_cache = torch._inductor.config.fx_graph_cache = False
    # Layers differ in constants, such as decays: each may need graphs of its own, with and without gradients.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 8 + 4 * len(layers), True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def build_runner(run: Run[CommonConfig], micro_batches: int | None = None) -> Runner:
    """Build the runner that takes a step's micro-batches through this rank's parts of the model.

    ``micro_batches`` is their number on this rank, by default the configuration's.
    """
    mesh, objective, pipeline, train = run.mesh, run.objective, run.config.pipeline, run.config.train
    strategy, ranks = run.config.data_parallel.strategy, mesh.pp.size()
    if ranks == 1:
        return Runner(run.parts, objective.loss_sum, strategy)
    schedule = pipeline.pipeline_schedule
    if is_first() and schedule == "Interleaved1F1B" and pipeline.num_virtual_stages_per_pipeline_rank == 1:
        print(
            f"note: pipeline_schedule {schedule} with 1 virtual stage per process interleaves nothing: it is 1F1B; "
            "--num-virtual-stages-per-pipeline-rank 2 shortens the bubbles",
            flush=True,
        )
    from parallel.pipeline.schedule import PipelineRunner  # takes a second, for torch.compile

    return PipelineRunner(
        run.parts,
        objective.loss_sum,
        strategy,
        config=pipeline,
        mesh=mesh.pp,
        device=mesh.device,
        micro_batches=micro_batches or train.micro_batches(mesh.dp.size()),
        first_input=objective.first_input(train.micro_batch_size),
        hidden=run.hidden_states,
        tied=objective.tied(run.parts[0], pipeline.stages(ranks)),
    )
