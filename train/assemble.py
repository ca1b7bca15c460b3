"""Build the model parts and the runner of a configuration, for every entry."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data import WeightOf, init_parameters, shard_model, sharding_mesh
from parallel.mesh import Mesh
from parallel.pipeline.runner import Runner
from parallel.pipeline.stages import stage_layers
from parallel.recompute import recompute_layers
from runtime.together import is_first
from train.config.common import CommonConfig
from train.objectives.base import Objective

M = TypeVar("M", bound=nn.Module)


def build_parts(
    config: CommonConfig,
    mesh: Mesh,
    build: Callable[[], M],
    split: Callable[[M], None],
    weight_of: WeightOf,
) -> list[M]:
    """Build this rank's part of the model, with weights, for each of its pipeline stages.

    Args:
        build: builds the whole model on torch's default device; it has ``layers`` and ``keep``.
        split: applies tensor parallelism to a part.
        weight_of: gives any part of a parameter's initial value.
    """
    strategy = config.data_parallel.strategy
    sharding = sharding_mesh(mesh.dp_cp, config.data_parallel)
    layers = stage_layers(config.pipeline, config.shape.num_layers, mesh.pp.size())
    parts = []
    for stage in config.pipeline.own(mesh.pp.get_local_rank(), mesh.pp.size()):
        with torch.device("meta"):
            part = build()
        model: Any = part
        # The order matters: each step works on what the previous one left.
        model.keep(layers[stage])
        split(part)
        config.float8.convert(model.layers)
        if config.train.compile:
            _compile_layers(model.layers)
        recompute_layers(model.layers, config.recompute)
        prefetch = mesh.device.type == "cuda"
        shard_model(part, model.layers, sharding, bf16=config.train.bf16, strategy=strategy, prefetch=prefetch)
        init_parameters(part, mesh.device, weight_of)
        parts.append(part)
    return parts


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


def build_runner(config: CommonConfig, mesh: Mesh, parts: Sequence[nn.Module], objective: Objective) -> Runner:
    """Build the runner that takes a step's micro-batches through this rank's parts of the model."""
    strategy, train, ranks = config.data_parallel.strategy, config.train, mesh.pp.size()
    if ranks == 1:
        return Runner(parts, objective.loss_sum, strategy)
    schedule = config.pipeline.pipeline_schedule
    if is_first() and schedule == "Interleaved1F1B" and config.pipeline.num_virtual_stages_per_pipeline_rank == 1:
        print(
            f"note: pipeline_schedule {schedule} with 1 virtual stage per process interleaves nothing: it is 1F1B; "
            "--num-virtual-stages-per-pipeline-rank 2 shortens the bubbles",
            flush=True,
        )
    from parallel.pipeline.schedule import PipelineRunner  # takes a second, for torch.compile

    return PipelineRunner(
        parts,
        objective.loss_sum,
        strategy,
        config=config.pipeline,
        mesh=mesh.pp,
        device=mesh.device,
        micro_batches=train.micro_batches(mesh.dp.size()),
        first_input=objective.first_input(train.micro_batch_size),
        hidden=hidden_states(config, mesh, objective),
        tied=objective.tied(parts[0], config.pipeline.stages(ranks)),
    )


def hidden_states(config: CommonConfig, mesh: Mesh, objective: Objective) -> Tensor:
    """Return a meta tensor like what a micro-batch's pipeline stages send each other, [B, T, C]."""
    sequences, tokens = objective.first_input(config.train.micro_batch_size)[1].shape[:2]
    shape = (sequences, tokens // mesh.tp.size(), config.shape.hidden_size)
    return torch.empty(shape, dtype=torch.bfloat16 if config.train.bf16 else torch.float32, device="meta")


def summary(config: CommonConfig, mesh: Mesh, model: str, method: str, samples: str) -> str:
    """Describe in one line the model, the mesh and the data of a run."""
    shape = config.shape
    pipeline = f"pipeline parallel {mesh.pp.size()} x " if mesh.pp.size() > 1 else ""
    tensor = f" x tensor parallel {mesh.tp.size()}" if mesh.tp.size() > 1 else ""
    layers = f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)} of {shape.hidden_size}"
    processes = f"{mesh.device.type} process{'es' * (dist.get_world_size() > 1)}"
    return (
        f"{model} ({layers}) on {dist.get_world_size()} {processes}: {pipeline}data parallel {mesh.dp.size()} x "
        f"context parallel {mesh.cp.size()} ({method}){tensor}, {samples}"
    )
