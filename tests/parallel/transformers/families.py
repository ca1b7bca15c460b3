"""Tiny random models of transformers, one of each family.

The same are run in one process with each document alone.
"""

from contextlib import nullcontext
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel.comparison import Float64Mode

transformers = pytest.importorskip("transformers")
VOCABULARY, LAYERS = 40, 3
LENGTH, PACKED = 45, (7, 1, 19, 4, 14)
"""Tokens of a packed sequence, and its documents."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATE = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {**ALTERNATE, "use_sliding_window": True},
    "Qwen3": {},
    "Gemma3": {**ALTERNATE, "query_pre_attn_scalar": 20},
    "Olmo3": ALTERNATE,
    "GptOss": {**ALTERNATE, **EXPERTS, "experts_implementation": "eager"},
    "Qwen3_5": LINEAR,
    "Phi3": {"sliding_window": 6},
}
"""Names of classes, and what of their configurations is not in SIZES."""
MIXED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",
}
OTHERS = {
    "Qwen3Next": {**LINEAR, **MIXED, "shared_expert_intermediate_size": 16},
    "OlmoHybrid": LINEAR,
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Qwen3Moe": MIXED,
}
"""Families that are tried on two ranks alone."""


def config_of(family, heads, **others):
    """A configuration with ``heads`` key heads, two query heads for each."""
    name = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}.get(
        family, f"{family}Config"
    )
    values = {
        **SIZES,
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads,
        **(FAMILIES | OTHERS).get(family, {}),
    }
    return getattr(transformers, name)(**{**values, **others})


def model_of(family, heads, dtype=torch.float64, **others):
    """A model with random weights from one seed, in training.

    Its sinks, gates and norms are random too.
    """
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, heads, **others))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).train()


def tokens(length, seed=3):
    """Random input_ids [1, T], and labels of which a fifth is left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    left_out = torch.rand(ids.shape, generator=generator) < 0.2
    return ids, ids.masked_fill(left_out, -100)


def one_process(family, heads, ids, labels, documents, dtype=torch.float64, **others):
    """Loss and gradients with each document alone, and transformers' own attention."""
    with Float64Mode() if dtype == torch.float64 else nullcontext():
        return each_alone(model_of(family, heads, dtype, **others), ids, labels, documents)


def each_alone(model, ids, labels, documents):
    """Loss and gradients of each document by itself, without position_ids."""
    total, count = 0.0, 0
    for a, b in pairwise(accumulate(documents, initial=0)):
        logits = model(input_ids=ids[:, a:b], use_cache=False).logits[0, :-1]
        after = labels[0, a + 1 : b]
        total = total + F.cross_entropy(logits, after, ignore_index=-100, reduction="sum")
        count += int((after != -100).sum())
    loss = total / count
    return [loss.detach(), *gradients(loss, model)]


def gradients(loss, model):
    tensor_gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(model.parameters(), tensor_gradients, strict=True)
    ]


def averaged(loss, model):
    """The loss, and the ranks' mean gradients as DDP has them."""
    loss_gradients = gradients(loss, model)
    for x in loss_gradients:
        dist.all_reduce(x)
    return [loss.detach(), *(x / dist.get_world_size() for x in loss_gradients)]


def errors(mine, truth):
    """The error of each tensor in the 2-norm.

    It is relative to its own or to 1e-3 of all gradients' together.
    """
    min_norm = 1e-3 * torch.stack([b.norm() for b in truth[1:]]).norm()
    return [
        float((a.double() - b).norm() / b.norm().clamp(min=min_norm))
        for a, b in zip(mine, truth, strict=True)
    ]


def difference(mine, truth):
    """The largest error of a tensor."""
    return max(errors(mine, truth))


def data_parallel(model, cp, batch):
    """The loss and gradients of a model in DDP."""
    wrapper = DistributedDataParallel(model)  # which averages as long as it exists
    loss = cp.loss(wrapper(**batch.inputs), batch)
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters())]


def fully_sharded(model, cp, batch):
    """The loss and gradients of a model whose layers FSDP2 shards."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    loss = cp.loss(model(**batch.inputs), batch)
    loss.backward()
    return [loss.detach(), *(x.grad.full_tensor() for x in model.parameters())]
