import dataclasses
from typing import get_type_hints

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.attention import HybridAttention
from model.config import ModelConfig
from model.registry import MODELS, TITLES, attention_title, build_model, flops_per_token, num_parameters, state_elements

LLAMA = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=40)
TIED = dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False)
ODD = dataclasses.replace(LLAMA, kv_channels=10, ffn_hidden_size=50)
GPTS = [dataclasses.replace(config, model_type="gpt", max_position_embeddings=16) for config in (LLAMA, TIED, ODD)]
SOFTMAX = [LLAMA, TIED, ODD, *GPTS]
LINEAR = [
    dataclasses.replace(config, model_type=kind, num_query_groups=None)
    for kind in ("transnormer", "linear_transformer")
    for config in (LLAMA, TIED, ODD)
]
HYBRIDS = [
    dataclasses.replace(LINEAR[index], num_layers=3, softmax_every=every) for index in (0, 1, 2) for every in (2, 3)
]
KINDS = [*SOFTMAX, *LINEAR, *HYBRIDS]


def test_every_model_type_has_its_module():
    assert MODELS.keys() == TITLES.keys() == set(get_type_hints(ModelConfig)["model_type"].__args__)


@pytest.mark.parametrize("config", KINDS)
def test_number_of_parameters(config):
    assert num_parameters(config) == sum(p.numel() for p in build_model(config).parameters())


def test_known_sizes():
    """LLaMA-2-7B, LLaMA-3-8B and GPT-2 have 6,738,415,616, 8,030,261,248 and 124,439,808 on Hugging Face."""
    llama2 = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000
    )
    assert num_parameters(llama2) == 6_738_415_616
    llama3 = dataclasses.replace(llama2, ffn_hidden_size=14336, num_query_groups=8, vocab_size=128256)
    assert num_parameters(llama3) == 8_030_261_248
    gpt2 = ModelConfig(
        model_type="gpt",
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        vocab_size=50257,
        max_position_embeddings=1024,
        untie_embeddings_and_output_weights=False,
    )
    assert num_parameters(gpt2) == 124_439_808


@pytest.mark.parametrize("config", SOFTMAX)
def test_flops_match_those_torch_counts(config):
    """Attention written as matrix products, so that torch counts the full square, forward and backward."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        return ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2)

    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(3))
    model = build_model(config, attend)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    width = config.num_attention_heads * config.head_dim
    full_mask = flops_per_token(config, 12) + 12 * 2 * width * 12 / 2
    assert counter.get_total_flops() == 2 * 12 * full_mask


@pytest.mark.parametrize(("left", "length"), [(3, 12), (11, 12), (40, 12), (100, 1000)])
def test_flops_of_windows_count_the_keys_that_are_seen(left, length):
    """Keys on the diagonal count as halves, as without a window."""
    config = dataclasses.replace(SOFTMAX[0], window_size=f"{left},0", window_attn_skip_freq="2")
    pairs = sum(min(i, left) + 1 for i in range(length)) - min(left + 1, length) / 2
    matrices = flops_per_token(config, 0)
    per_pair = 12 * config.num_attention_heads * config.head_dim
    windowed, full = (config.num_layers + 1) // 2, config.num_layers // 2
    want = matrices + per_pair * (windowed * pairs / length + full * length / 2)
    assert flops_per_token(config, length) == pytest.approx(want, rel=1e-12)


def test_sinks_are_counted_and_described():
    config = dataclasses.replace(SOFTMAX[0], window_size="1023,0", window_attn_skip_freq="2", softmax_type="learnable")
    heads = config.num_layers * config.num_attention_heads
    assert num_parameters(config) == num_parameters(SOFTMAX[0]) + heads
    assert attention_title(config) == "1 of 2 layers see 1,023 tokens back, learnable softmax"
    assert attention_title(SOFTMAX[0]) is None


@pytest.mark.parametrize("config", LINEAR)
def test_flops_of_linear_attention_match_those_torch_counts(config):
    """The recurrence written as matrix products: each token writes into the state, and reads from it."""
    sizes = []

    def attend(q, k, v, log_decay):
        written = k[..., None] @ v[..., None, :]  # [B, T, H, D, E]
        sizes.append(written[0, 0].numel())
        return (q[..., None, :] @ written)[..., 0, :]

    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(3))
    model = build_model(config, attend)
    model.init_weights(0)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == 2 * 12 * flops_per_token(config, 12)
    assert flops_per_token(config, 12) == flops_per_token(config, 1 << 20)
    assert sum(sizes) == state_elements(config)


@pytest.mark.parametrize("config", HYBRIDS)
def test_flops_of_a_hybrid_count_each_layer_as_its_kind(config):
    """Of 12 tokens and a full mask, as the two tests above do."""
    layers = []

    def recurrence(q, k, v, log_decay):
        layers.append("linear")
        return (q[..., None, :] @ (k[..., None] @ v[..., None, :]))[..., 0, :]

    def scores(q, k, v):
        layers.append("softmax")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2)

    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(3))
    model = build_model(config, HybridAttention(recurrence, scores))
    model.init_weights(0)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    softmax = layers.count("softmax")
    assert softmax == 3 // config.softmax_every
    width = config.num_attention_heads * config.head_dim
    full_mask = flops_per_token(config, 12) + 12 * softmax * width * 12 / 2
    assert counter.get_total_flops() == 2 * 12 * full_mask
