import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.parts.attention import sdpa
from model.parts.rope import RopeConfig
from model.parts.rotary import Rotary
from tests.model.models import model_config


def leaves(length, groups=2, heads=4):
    """q, k, v and sinks, float64; some lengths of the tests below fill blocks of queries."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, heads, 8), (2, length, groups, 8), (2, length, groups, 8), (heads,)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def gpt_oss(q, k, v, sinks, left=None):
    """As transformers computes it: [B, T, H, D] each, a window as gpt-oss makes its mask."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(
        num_key_value_groups=q.shape[2] // k.shape[2], sinks=sinks, training=False
    )
    place = torch.arange(q.shape[1])
    behind = place[:, None] - place
    hidden = (behind < 0) | (behind > (q.shape[1] if left is None else left))
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return eager_attention_forward(module, *heads_first, mask, scaling=q.shape[-1] ** -0.5)[0]


def difference(tensor, other, inputs):
    """Largest difference of outputs and of every gradient."""
    upstream = torch.randn(
        tensor.shape, generator=torch.Generator().manual_seed(1), dtype=tensor.dtype
    )
    pairs = zip(
        *(torch.autograd.grad(out, inputs, upstream, retain_graph=True) for out in (tensor, other)),
        strict=True,
    )
    return max((a - b).abs().max().item() for a, b in [(tensor, other), *pairs])


@pytest.mark.parametrize("left", [None, 1, 5, 300])
@pytest.mark.parametrize("length", [7, 256, 600])
def test_windows_and_sinks_equal_those_of_gpt_oss(length, left):
    *qkv, sinks = inputs = leaves(length)
    window = None if left is None else (left, 0)
    want = gpt_oss(*inputs, left)
    assert difference(sdpa(*qkv, window=window, sinks=sinks), want, inputs) < 1e-12
    no_sinks = torch.full_like(sinks, float("-inf"))
    assert difference(sdpa(*qkv, window=window), gpt_oss(*qkv, no_sinks, left), qkv) < 1e-12
    # Negative controls: the sinks of other heads, and a window one off.
    assert difference(sdpa(*qkv, window=window, sinks=sinks.roll(1)), want, inputs) > 1e-3
    if left is not None and left < length:
        assert difference(sdpa(*qkv, window=(left + 1, 0), sinks=sinks), want, inputs) > 1e-3


def our_name(theirs):
    """q_proj.weight is wq.weight, and so on; sinks are sinks."""
    return re.sub(r"^(.)_proj", r"w\1", theirs)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_is_that_of_gpt_oss_and_so_is_every_gradient(layer):
    """A window in one layer and none in the other.

    Theirs counts a token's own key, Megatron's and ours does not.
    """
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    kinds = ["sliding_attention", "full_attention"]
    theirs_config = GptOssConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        sliding_window=6,
        layer_types=kinds,
        attn_implementation="eager",
    )
    theirs = GptOssAttention(theirs_config, layer).double()
    config = model_config(
        model_type="gpt",
        position_embedding_type="rope",
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        num_layers=2,
        vocab_size=9,
        window_size="5,0",
        window_attn_skip_freq="2",
        softmax_type="learnable",
    )
    ours = config.attention(layer, sdpa, bias=True).double()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter)
        ours.get_parameter(our_name(name)).data.copy_(parameter)
    x, place = torch.randn(2, 20, 24, dtype=torch.float64), torch.arange(20)
    rotary = Rotary(place, 8, RopeConfig(), x.dtype)
    cos, sin = (angles.squeeze(-2)[None] for angles in (rotary.cos, rotary.sin))
    hidden = place[:, None] < place
    if kinds[layer] == "sliding_attention":
        hidden |= place[:, None] - place >= theirs_config.sliding_window
    mask = torch.zeros(20, 20, dtype=x.dtype).masked_fill(hidden, float("-inf"))
    want, got = theirs(x, (cos, sin), mask)[0], ours(x, rotary)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    upstream = torch.randn_like(want)
    (want * upstream).sum().backward()
    (got * upstream).sum().backward()
    assert ours.sinks.grad.abs().min() > 1e-3
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            ours.get_parameter(our_name(name)).grad, parameter.grad, rtol=0, atol=1e-11
        )


def test_a_window_that_is_unlimited_is_none():
    *qkv, _ = leaves(20)
    assert difference(sdpa(*qkv, window=(-1, 0)), sdpa(*qkv), qkv) < 1e-14


@pytest.mark.parametrize(
    "settings", [{"window": (5, 0)}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
def test_windows_and_sinks_in_bfloat16(settings):
    """Sinks are added in float32."""
    q, k, v = (x.detach() for x in leaves(300)[:3])
    got = sdpa(*(x.bfloat16() for x in (q, k, v)), **settings)
    assert got.dtype == torch.bfloat16
    assert (got - sdpa(q, k, v, **settings)).norm() < 0.01 * got.norm()
