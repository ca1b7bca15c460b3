"""Build this rank's stages of a model and apply every parallelism of the mesh to them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from parallel.data import DataParallelConfig, WeightOf, init_parameters, shard_model, sharding_mesh
from parallel.mesh import Mesh
from parallel.pipeline.stages import PipelineConfig, stage_layers
from parallel.recompute import RecomputeConfig, recompute_layers


class ParallelSections(Protocol):
    """The sections of a run's configuration that `parallelize` reads."""

    @property
    def model(self) -> Any:
        """Configuration of the model; only its ``num_layers`` is read here."""

    @property
    def pipeline(self) -> PipelineConfig: ...

    @property
    def data_parallel(self) -> DataParallelConfig: ...

    @property
    def recompute(self) -> RecomputeConfig: ...

    @property
    def float8(self) -> Any:
        """Configuration of float8; its ``convert(layers)`` replaces the layers' matmuls."""

    @property
    def slice_len(self) -> int:
        """Number of a rank's tokens of each sequence that go through a layer at once; 0 for all."""

    @property
    def train(self) -> Any:
        """Configuration of training; only its ``bf16`` and ``compile`` are read here."""


def parallelize(
    build: Callable[[], nn.Module],
    mesh: Mesh,
    config: ParallelSections,
    weight_of: WeightOf | None,
) -> list[Any]:
    """Return this rank's modules, one per pipeline stage, sharded and initialized; collective.

    The order of the steps is fixed, since each step wraps the layers' forwards as the steps before
    it left them: FSDP's hooks run outside the recomputation, the recomputation runs outside the
    compiled graph, and the graph contains the tensor-parallel communication.

    Args:
        build: function that builds the whole model, with ``layers`` and ``keep``, on torch's
            default device.
        weight_of: function that returns any slice of a parameter's initial value; if None, the
            weights stay uninitialized.
    """
    # Imported here, since it loads DTensor, and a command line that is refused should not wait.
    from parallel.tensor.split import split_model

    data_mesh = sharding_mesh(mesh.dp_cp, config.data_parallel)
    layer_ranges = stage_layers(config.pipeline, config.model.num_layers, mesh.pp.size())
    modules = []
    for stage in config.pipeline.stages_of(mesh.pp.get_local_rank(), mesh.pp.size()):
        # On the meta device a model of any size can be built whole, without memory.
        with torch.device("meta"):
            module: Any = build()

        # Drop the other stages' layers first: the steps below take time for each layer.
        module.keep(layer_ranges[stage])

        # Comes before everything that replaces a forward: tensor parallelism hooks the plain
        # modules, and the steps below see a layer's inputs and outputs as they are on this rank.
        split_model(module, mesh.tp)

        # Comes before compilation, so that the compiled graphs contain the float8 matmuls.
        config.float8.convert(module.layers)

        # Comes before recomputation, which then runs the whole compiled layer again.
        if config.train.compile:
            compile_layers(module.layers)

        # Comes before FSDP, so that FSDP's hooks gather a layer's weights before the backward pass
        # recomputes the layer.
        recompute_layers(module.layers, config.recompute, config.slice_len)

        # FSDP comes last, so gathering the weights is neither compiled nor recomputed.
        shard_model(
            module,
            module.layers,
            data_mesh,
            bf16=config.train.bf16,
            strategy=config.data_parallel.strategy,
            prefetch=mesh.device.type == "cuda",
        )

        # Only now is memory allocated, and only for this rank's shards.
        init_parameters(module, mesh.device, weight_of)
        modules.append(module)
    return modules


def compile_layers(layers: Sequence[Any]) -> None:
    """Compile each layer's forward, with the attention as one operator inside the graph."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # Do not cache graphs: one that another rank compiled refers to that rank's process groups.
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False

    # All layers share one limit, since they run the same code. But they differ in constants, such
    # as decays, so each may need its own graphs, with and without gradients.
    torch._dynamo.config.recompile_limit = 8 + 4 * len(layers)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
