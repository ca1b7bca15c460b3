import dataclasses

import pytest
from torch.utils.flop_counter import FlopCounterMode

from model.families import FAMILIES
from model.parts.attention import HybridAttention
from model.registry import attention_title, build_model, flops_per_token, num_parameters
from tests.model.models import LLAMA, as_family, built, model_config, tied, tokens

TIED = tied(LLAMA)
ODD = dataclasses.replace(LLAMA, kv_channels=10, ffn_hidden_size=50)
GPTS = [as_family(config, "gpt", max_position_embeddings=16) for config in (LLAMA, TIED, ODD)]
LINEAR = [
    as_family(config, kind, num_query_groups=None)
    for kind in ("transnormer", "linear_transformer")
    for config in (LLAMA, TIED, ODD)
]
HYBRIDS = [
    dataclasses.replace(LINEAR[index], num_layers=3, softmax_every=every)
    for index in (0, 1, 2)
    for every in (2, 3)
]
KINDS = [LLAMA, TIED, ODD, *GPTS, *LINEAR, *HYBRIDS]


def test_every_family_has_a_tiny_model_and_settings_of_its_own_name():
    for name, family in FAMILIES.items():
        assert family.config(**family.tiny).model_type == name


@pytest.mark.parametrize("config", KINDS)
def test_number_of_parameters(config):
    assert num_parameters(config) == sum(p.numel() for p in build_model(config).parameters())


def test_known_sizes():
    """LLaMA-2-7B, LLaMA-3-8B and GPT-2 have these counts on Hugging Face.

    They are 6,738,415,616, 8,030,261,248 and 124,439,808.
    """
    llama2 = model_config(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        vocab_size=32000,
    )
    assert num_parameters(llama2) == 6_738_415_616
    llama3 = dataclasses.replace(
        llama2, ffn_hidden_size=14336, num_query_groups=8, vocab_size=128256
    )
    assert num_parameters(llama3) == 8_030_261_248
    gpt2 = model_config(
        model_type="gpt", num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257,
        max_position_embeddings=1024, untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    assert num_parameters(gpt2) == 124_439_808


@pytest.mark.parametrize("config", KINDS)
def test_flops_match_those_torch_counts(config):
    """Attention written as matrix products.

    torch so counts the full square, forward and backward.

    The recurrence, too: each token writes into the state, and reads from it. Each layer of a hybrid
    counts as its kind.
    """
    sizes, softmax = [], []

    def recurrence(q, k, v, log_decay):
        written = k[..., None] @ v[..., None, :]  # [B, T, H, D, E]
        sizes.append(written[0, 0].numel())
        return (q[..., None, :] @ written)[..., 0, :]

    def scores(q, k, v):
        softmax.append(q.shape)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2)

    both = HybridAttention(recurrence, scores)
    attend = both if config.softmax_period else recurrence if config.linear_attention else scores
    model = built(config, attend=attend)
    with FlopCounterMode(display=False) as counter:
        model(tokens()).sum().backward()
    width = config.num_attention_heads * config.head_dim
    full_mask = flops_per_token(config, 12) + 12 * len(softmax) * width * 12 / 2
    assert counter.get_total_flops() == 2 * 12 * full_mask
    assert len(softmax) == (3 // config.softmax_period if config.softmax_period else len(softmax))
    if config.linear_attention:
        assert sum(sizes) == config.state_elements
    if not softmax:
        assert flops_per_token(config, 12) == flops_per_token(config, 1 << 20)


@pytest.mark.parametrize(("left", "length"), [(3, 12), (11, 12), (40, 12), (100, 1000)])
def test_flops_of_windows_count_the_keys_that_are_seen(left, length):
    """Keys on the diagonal count as halves, as without a window."""
    config = dataclasses.replace(LLAMA, window_size=f"{left},0", window_attn_skip_freq="2")
    pairs = sum(min(i, left) + 1 for i in range(length)) - min(left + 1, length) / 2
    matrices = flops_per_token(config, 0)
    per_pair = 12 * config.num_attention_heads * config.head_dim
    windowed, full = (config.num_layers + 1) // 2, config.num_layers // 2
    want = matrices + per_pair * (windowed * pairs / length + full * length / 2)
    assert flops_per_token(config, length) == pytest.approx(want, rel=1e-12)


def test_sinks_are_counted_and_described():
    config = dataclasses.replace(
        LLAMA, window_size="1023,0", window_attn_skip_freq="2", softmax_type="learnable"
    )
    heads = config.num_layers * config.num_attention_heads
    assert num_parameters(config) == num_parameters(LLAMA) + heads
    assert attention_title(config) == "1 of 2 layers see 1,023 tokens back, learnable softmax"
    assert attention_title(LLAMA) is None
