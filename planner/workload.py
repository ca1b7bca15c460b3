"""The work of a configuration's step in numbers, for the cost model: language models, hybrids and diffusion.

Of a hybrid also what the layouts of its softmax attention layers cost.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from kernels.delta.scan import CPU_CHUNKS
from kernels.loss import LOSS_CHUNK
from model.config import ModelConfig
from model.dit import multiply_adds, num_dit_parameters
from model.dit_config import DiTConfig
from model.registry import flops_per_token, num_parameters, num_trained, softmax_layers, state_elements
from model.traits import TRAITS
from parallel.context.config import HybridLayout
from parallel.context.linear.relayout import moved_tokens
from parallel.context.mask import Window
from parallel.context.plan import make_plan
from parallel.context.traffic import sizes
from planner.attention_cost import GB, AttentionCost
from planner.cluster import Cluster
from planner.delta_cost import DeltaShape
from planner.step_memory import StepShape
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig

GATED = tuple(kind for kind, traits in TRAITS.items() if traits.feed_forward != "gelu")
FUSED_RESIDUAL = {"llama": 4.0, "gpt": 4.0, "transnormer": 9.0, "linear_transformer": 10.0}
FUSED_RESIDUAL |= {"gemma3": 13.0, "olmo3": 5.0, "qwen3_5": 6.0, "olmo_hybrid": 4.0}
"""``StepShape.residual`` by model where norms are kernels: inputs and outputs of both, and of linear attention's; in a
gemma3 inputs of four in float32, in an olmo3 of those of queries and keys too; in a qwen3_5 of two in float32."""
WORKSPACES = 2 * (32 << 20)
"""Bytes that torch gives cuBLAS and cuBLASLt to work in, on Hopper; on older GPUs fewer."""
LRPE = 10.0
"""``StepShape.first_layer`` of a transnormer, whose positions double the width of queries and keys."""


def workload_of(config: CommonConfig, dp: int, device: str) -> StepShape:
    """Return the work of a step. The vocabulary of a language model must be known."""
    model, fields = config.model, _diffusion(config) if isinstance(config, DiTRunConfig) else _language(config)
    if device == "cpu":
        fields["wide_logits"] = LOSS_CHUNK["cpu"]
        fields["residual"] = 10.0 if config.train.bf16 else StepShape.residual  # norms keep copies in float32
        if delta := fields.get("delta"):
            fields |= {"delta": delta._replace(slab=CPU_CHUNKS), "normed": 3.0 if config.train.bf16 else 1.0}
    else:
        kind = getattr(config.model, "model_type", "dit")
        fields |= {"residual": FUSED_RESIDUAL.get(kind, StepShape.residual), "workspaces": WORKSPACES}
        fields["first_layer"] = LRPE if kind == "transnormer" else 0.0
    return StepShape(
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


def with_softmax_layers(work: StepShape, config: CommonConfig, cluster: Cluster) -> StepShape:
    """Return the work with the seconds of a hybrid's layers of softmax attention, in the faster of its layouts."""
    if not isinstance(config, Config) or not config.model.own_softmax_layout:
        return work
    seconds = min(layout_seconds(config, cluster).values())
    return replace(work, softmax_layers=len(softmax_layers(config.model)), softmax_seconds=seconds)


def _language(config: CommonConfig) -> dict[str, Any]:
    model = config.model
    windows = _windows(model)
    parameters, trained, products = _weights(model)
    return {
        "gated": model.model_type in GATED,
        "vocab": model.vocabulary,
        "parameters": parameters,
        "outside": (model.vocabulary * (1 + model.untie_embeddings_and_output_weights) + (model.position_table or 0))
        * model.hidden_size,
        "trained": trained,
        "matrix_weights": products,
        "window": windows[0] if windows else None,
        "windowed_layers": len(windows),
    } | _delta(model)


def _delta(model: ModelConfig) -> dict[str, Any]:
    """Return what differs in a model with layers of a gated delta rule: their heads, and the softmax ones' gate."""
    traits = model.traits
    if not traits.delta:
        return {}
    heads = DeltaShape(
        *(model.key_heads, model.value_heads, model.key_dim, model.value_dim, model.linear_conv_kernel_dim),
        per_channel=model.linear_gate == "per_channel",
    )
    norms = (1 + model.query_groups / model.num_attention_heads) * (2 if traits.norm == "zero_centred" else 1)
    gate = 2 * traits.output_gate + norms
    return {"delta": heads, "softmax_layers": len(softmax_layers(model)), "gate": gate}


@lru_cache
def _windows(model: ModelConfig) -> list[Window]:
    """Return the window of each layer that has one."""
    return [window for window in map(model.window, range(model.num_layers)) if window]


@lru_cache
def _weights(model: ModelConfig) -> tuple[int, int, int]:
    """Count all parameters, the trained ones, and the weights of all matrix products, on the meta device."""
    with _Undrawn():
        delta = 3 * state_elements(model) if model.traits.delta else 0  # counted apart, in chunks
        products = int(flops_per_token(model.merged(), 0) / 6) - delta  # at length 0 there is no softmax attention
        return num_parameters(model), num_trained(model), products


class _Undrawn(TorchFunctionMode):
    """Leaves weights as they are: torch draws those of the meta device by operators that take a second to import."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **kwargs)


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
        "outside": 2 * config.model.out_width * config.model.hidden_size,
        "matrix_weights": products,
        "modulated": 6 if config.packed else 0,
        "replicated": 6 * config.model.num_layers * config.model.hidden_size**2,  # which make shifts, scales and gates
        "averages": averages,
    }


def layout_seconds(config: Config, cluster: Cluster) -> dict[HybridLayout, float]:
    """Return the seconds of a softmax layer, forward and backward, in each layout that a hybrid may have.

    An exchange moves q, k and v inward and the output outward, and their gradients in the backward: 2 x (2 heads +
    2 kv_heads) x head_dim elements of each token that changes its rank. It is not overlapped.
    """
    model, size, tp = config.model, config.mesh.context_parallel_size, config.mesh.tensor_model_parallel_size
    seq_len, batch = config.joined_length, 1 if config.packed else config.train.micro_batch_size
    heads, kv_heads = model.num_attention_heads // tp, max(1, model.query_groups // tp)
    element_size = 2 if config.train.bf16 else 4
    link = cluster.inside_gb_per_s if size * tp <= cluster.gpus_per_node else cluster.between_gb_per_s

    found = {}
    linear = config.context.context_parallel_layout
    for layout in config.hybrid.layouts(linear):
        method = config.hybrid.context(layout).context_parallel_method
        plan = make_plan(method, seq_len=seq_len, size=size, multiple=tp, layout=layout)
        lies = "zigzag" if linear == "zigzag" else "auto"
        outside = make_plan("lasp", seq_len=seq_len, size=size, multiple=plan.local_len, layout=lies)
        moved = moved_tokens(outside.geometry, plan.geometry)
        exchanged = 2 * (2 * heads + 2 * kv_heads) * model.head_dim * element_size * batch * moved
        of = sizes(plan.geometry, batch, heads, kv_heads, model.head_dim, element_size)
        cost = AttentionCost(plan, of, cluster, tp)
        found[layout] = cost.forward() + cost.backward() + exchanged / (link * GB)
    return found
