"""Configurations derived from a run's: for another mesh, and as its weights were trained."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from parallel.context.config import ContextConfig
from parallel.data import DataParallelConfig
from parallel.pipeline.stages import PipelineConfig
from train.config.entries import Config
from train.config.flags import config_fields
from train.config.sizes import validate_mesh, validate_method
from train.float8 import Float8Config

IMPORTED = "imported_from"
"""Of a checkpoint's ``extra``: the model came from Hugging Face, and no run has trained it."""


def fitted(
    config: Config,
    processes: int,
    method: str | None,
    length: int | None = None,
    *,
    context_parallel_size: int,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
) -> Config:
    """Return a run's configuration without training, on another mesh of ``processes``.

    A step has one sequence, by default as long as the run's, for each data-parallel rank and pipeline stage.

    Args:
        method: of context parallelism, which may be auto; by default the run's own on as many ranks, else striped, or
            lasp of a model with linear attention.

    Raises:
        UserError: sizes that do not fit the processes or the model.
    """
    cp, tp, pp = context_parallel_size, tensor_model_parallel_size, pipeline_model_parallel_size
    mesh = replace(
        config.mesh,
        context_parallel_size=cp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        balance_over="cp",
        device=config.mesh.device if torch.cuda.is_available() else "auto",
    )
    context, own = config.context, config.context.context_parallel_method
    if cp == 1 and method in (None, "auto"):
        context = ContextConfig(context_parallel_method="none")
    elif method == "auto":
        context = ContextConfig(context_parallel_method="auto", cluster=context.cluster)
    elif cp != config.mesh.context_parallel_size or own == "auto" or method not in (None, own):
        method = method or ("lasp" if config.model.linear_attention else "striped")
        named = config_fields(Config)["context_parallel_method"].convert(method)
        context = ContextConfig(context_parallel_method=named)
    found = replace(
        config,
        mesh=mesh,
        context=context,
        pipeline=PipelineConfig(),
        data_parallel=DataParallelConfig(),
        recompute=replace(config.recompute, recompute_granularity="none", recompute_offload=False),
        data=replace(config.data, reset_attention_mask=False),
        float8=Float8Config(),
        train=replace(
            config.train,
            seq_length=length or config.train.seq_length,
            micro_batch_size=1,
            global_batch_size=pp * max(1, processes // (cp * tp * pp)),
        ),
    )
    validate_method(found)
    validate_mesh(found, processes)
    return found


def with_rope_length(config: Config) -> Config:
    """Return the configuration with a length for dynamic scaling of rope, the run's by default: no rank sees all."""
    model = config.model
    if model.rope_scaling_type != "dynamic" or model.rope_scaling_seq_length is not None:
        return config
    return replace(config, model=replace(model, rope_scaling_seq_length=config.train.seq_length))


def config_as_trained(config: Config, extra: Mapping[str, Any]) -> Config:
    """Return a run's configuration with the length of rope that its checkpoint, with this ``extra``, was trained at.

    A model that no run has trained computes in bfloat16 on cuda, since flash kernels take nothing wider.
    """
    if IMPORTED not in extra:
        return with_rope_length(config)
    return replace(config, train=replace(config.train, bf16=config.train.bf16 or config.mesh.device_type == "cuda"))
