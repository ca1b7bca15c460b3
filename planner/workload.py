"""The work of a configuration's step in numbers, for the cost model: language models, hybrids and diffusion."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from model.config import ModelConfig
from model.dit import multiply_adds, num_dit_parameters
from model.dit_config import DiTConfig
from model.registry import flops_per_token, num_parameters, num_trained, softmax_layers
from planner.cluster import Cluster
from planner.hybrid import fastest, layout_costs
from planner.step_cost import Workload
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig

GATED = ("llama", "transnormer")


def workload_of(config: CommonConfig, dp: int) -> Workload:
    """Return the work of a step. The vocabulary of a language model must be known."""
    model, fields = config.shape, _diffusion(config) if isinstance(config, DiTRunConfig) else _language(config)
    return Workload(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        heads=model.num_attention_heads,
        kv_heads=model.query_groups,
        head_dim=model.head_dim,
        element_size=2 if config.train.bf16 else 4,
        micro_batch=1 if config.packed else config.train.micro_batch_size,
        micro_batches=config.train.micro_batches(dp),
        **fields,
    )


def with_softmax_layers(work: Workload, config: CommonConfig, cluster: Cluster) -> Workload:
    """Return the work with the seconds of a hybrid's layers of softmax attention, in the faster of its layouts."""
    if not isinstance(config, Config) or config.model.softmax_every is None:
        return work
    seconds = fastest(layout_costs(config, cluster)).seconds
    return replace(work, softmax_layers=len(softmax_layers(config.model)), softmax_seconds=seconds)


def _language(config: CommonConfig) -> dict[str, Any]:
    model = config.model
    windows = [window for window in map(model.window, range(model.num_layers)) if window]
    parameters, trained, products = _weights(model)
    return {
        "gated": model.model_type in GATED,
        "vocab": model.vocabulary,
        "parameters": parameters,
        "trained": trained,
        "matrix_weights": products,
        "window": windows[0] if windows else None,
        "windowed_layers": len(windows),
    }


@lru_cache
def _weights(model: ModelConfig) -> tuple[int, int, int]:
    """Count all parameters, the trained ones, and the weights of all matrix products, on the meta device."""
    products = int(flops_per_token(model.merged(), 0) / 6)  # at length 0 there is no attention
    return num_parameters(model), num_trained(model), products


@lru_cache
def _patches(model: DiTConfig) -> tuple[int, int]:
    """Count all parameters, and the multiply-adds of a patch in all matrix products."""
    attention = 2 * model.num_layers * model.num_patches * model.hidden_size
    return num_dit_parameters(model), multiply_adds(model) // model.num_patches - attention


def _diffusion(config: DiTRunConfig) -> dict[str, Any]:
    """Return what differs: a patch's prediction in the place of logits, and averages of the weights."""
    parameters, products = _patches(config.model)
    averages = 4 if config.ema.ema_decay else 0
    return {
        "gated": False,
        "vocab": config.model.out_width,
        "parameters": parameters,
        "matrix_weights": products,
        "modulated": 6 if config.packed else 0,
        "averages": averages,
    }
