import pytest
import torch

from model.attention import Attention, sdpa
from model.layers import Rotary


def naive(q, k, v, causal=True):
    """Attention a head at a time, in float64, by its definition."""
    out = torch.empty(q.shape, dtype=torch.float64)
    heads_per_group = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        qh, kh, vh = q[:, :, head].double(), *(x[:, :, head // heads_per_group].double() for x in (k, v))
        scores = qh @ kh.transpose(1, 2) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        out[:, :, head] = scores.softmax(-1) @ vh
    return out


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_sdpa_and_its_gradients(groups):
    torch.manual_seed(0)
    q = torch.randn(2, 9, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 9, groups, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out, expected = sdpa(q, k, v), naive(q, k, v)
    upstream = torch.randn_like(expected)
    assert out.shape == q.shape
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    assert (out - naive(q, k, v, causal=False)).abs().max() > 0.1  # the bound sees a missing mask
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_attend_is_injected_and_sees_rotated_heads():
    torch.manual_seed(0)
    seen = {}

    def attend(q, k, v):
        seen.update(q=q, k=k, v=v)
        return sdpa(q, k, v)

    attention = Attention(16, num_heads=4, num_query_groups=2, head_dim=6, attend=attend)
    x = torch.randn(2, 5, 16)
    rotary = Rotary(torch.arange(5) + 3, 6, 1e4, x.dtype)
    out = attention(x, rotary)
    assert out.shape == (2, 5, 16)
    assert torch.equal(seen["q"], rotary.rotate(attention.wq(x).view(2, 5, 4, 6)))
    assert torch.equal(seen["k"], rotary.rotate(attention.wk(x).view(2, 5, 2, 6)))
    assert torch.equal(seen["v"], attention.wv(x).view(2, 5, 2, 6))
    assert torch.equal(out, attention.wo(sdpa(**seen).reshape(2, 5, 24)))
