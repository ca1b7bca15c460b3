"""Build this rank's parts of a model, one for each pipeline stage, and arrange them on the mesh."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from parallel.data import DataParallelConfig, WeightOf, init_parameters, shard_model, sharding_mesh
from parallel.mesh import Mesh
from parallel.pipeline.stages import PipelineConfig, stage_layers
from parallel.recompute import RecomputeConfig, recompute_layers


class Arranged(Protocol):
    """The sections of a configuration that say how its model is arranged."""

    @property
    def model(self) -> Any:
        """Has ``num_layers``."""

    @property
    def pipeline(self) -> PipelineConfig: ...

    @property
    def data_parallel(self) -> DataParallelConfig: ...

    @property
    def recompute(self) -> RecomputeConfig: ...

    @property
    def float8(self) -> Any:
        """Converts layers by ``convert(layers)``."""

    @property
    def train(self) -> Any:
        """Has ``bf16`` and ``compile``."""


def parallelize(
    build: Callable[[], nn.Module], mesh: Mesh, config: Arranged, weight_of: WeightOf | None
) -> list[Any]:
    """Build and arrange this rank's part of the model for each of its pipeline stages; collective.

    Args:
        build: builds the whole model, which has ``layers`` and ``keep``, on torch's default device.
        weight_of: gives any part of a parameter's initial value; with None weights are what the
            memory holds.
    """
    # Imports DTensor, which a refused command line need not wait for.
    from parallel.tensor.split import split_model

    sharding = sharding_mesh(mesh.dp_cp, config.data_parallel)
    layers_of = stage_layers(config.pipeline, config.model.num_layers, mesh.pp.size())
    parts = []
    for stage in config.pipeline.own(mesh.pp.get_local_rank(), mesh.pp.size()):
        # Whole and without memory: no process holds more than its part, whatever the model's size.
        with torch.device("meta"):
            part: Any = build()

        # Fewer layers first: the steps below cost time for each of them.
        part.keep(layers_of[stage])

        # Before everything that replaces a forward: tensor parallelism hooks the plain modules, and
        # the steps below see a layer's inputs and outputs as they are on this rank.
        split_model(part, mesh.tp)

        # Before compilation, which is to see the rounded products.
        config.float8.convert(part.layers)

        # Inside recomputation, which then runs a compiled layer again as a whole.
        if config.train.compile:
            compile_layers(part.layers)

        # Inside FSDP, whose hooks gather a layer's weights before its backward recomputes it.
        recompute_layers(part.layers, config.recompute)

        # FSDP last: it takes the layers as they are, and what gathers the weights is neither
        # compiled nor recomputed.
        shard_model(
            part,
            part.layers,
            sharding,
            bf16=config.train.bf16,
            strategy=config.data_parallel.strategy,
            prefetch=mesh.device.type == "cuda",
        )

        # Only now is memory taken, and for this rank's shards alone.
        init_parameters(part, mesh.device, weight_of)
        parts.append(part)
    return parts


def compile_layers(layers: Sequence[Any]) -> None:
    """Compile each layer's forward, in which the attention stays an operator."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # A graph that another rank has compiled and cached has that rank's process groups.
    torch._functorch.config.enable_autograd_cache = torch._inductor.config.fx_graph_cache = False
    # Layers differ in constants, such as decays: each may need graphs of its own, with and without
    # gradients.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 8 + 4 * len(layers), True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
