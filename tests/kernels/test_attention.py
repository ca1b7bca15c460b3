"""Block kernels against the naive twin, forward and every gradient, given global out and lse."""

import pytest
import torch

from kernels import attention, reference
from kernels.attention import ANTI, CAUSAL, FULL, select_backend
from kernels.backends import cudnn, flash_attention
from kernels.blocks import Keys, Rows, merge_
from kernels.cuda import pad_heads
from kernels.gpu import Gpu
from runtime.errors import UserError
from tests.kernels.blocks import block_backward, block_forward

SCALE = 0.2


def tensors(queries, keys, heads, kv_heads, dtype, width=16, device="cpu"):
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    drawn = (
        torch.randn(2, *shape, width, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return tuple(x.to(device, dtype) for x in drawn)


def beside_the_naive_form(name, kind, inputs):
    """lse, out, dq, dk and dv of a backend, each with the naive form's.

    The latter are by autograd in float64.
    """
    q, k, v, dout = inputs
    backend = select_backend(name, q.device.type, q.dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    window, scale = (0, None) if kind == ANTI else (None, None), 0.8 * q.shape[-1] ** -0.5
    want_out, want_lse = reference.attention(
        *leaves, causal=kind == CAUSAL, scale=scale, window=window
    )
    want = torch.autograd.grad(want_out, leaves, dout.double())
    out, lse = block_forward(q, k, v, kind, scale, backend)
    got = block_backward(Rows(q, dout, out, lse), Keys(k, v), kind, scale, backend)
    return [(lse, want_lse), (out, want_out), *zip(got, want, strict=True)]


BLOCKS = [
    (1, 1, CAUSAL, 4, 4), (1, 7, FULL, 8, 2), (33, 33, CAUSAL, 4, 4), (65, 17, FULL, 8, 2),
    (600, 600, CAUSAL, 4, 2), (1, 1, ANTI, 8, 2), (67, 67, ANTI, 4, 4), (67, 67, ANTI, 8, 2),
]  # fmt: skip


@pytest.mark.parametrize("name", ["aten", "reference"])
@pytest.mark.parametrize(("queries", "keys", "kind", "heads", "kv_heads"), BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
def test_forward_and_gradients_equal_autograd_of_the_naive_form(
    name, queries, keys, kind, heads, kv_heads, dtype, bound
):
    pairs = beside_the_naive_form(name, kind, tensors(queries, keys, heads, kv_heads, dtype))
    # dq and dk of a single key are zero: the score does not matter then, so the bound is absolute
    # below one
    assert (
        max((a.double() - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)
        < bound
    )


@pytest.mark.parametrize("width", [16, 13, 4])
def test_heads_of_any_width_are_padded_to_what_a_gpus_kernel_takes(width):
    plain, widths = select_backend("reference", "cpu", torch.float64), list[int]()

    def ahead(q, k, v, *rest):
        widths.extend(x.shape[-1] for x in (q, k, v))
        return plain.forward(q, k, v, *rest)

    def back(rows, keys, *rest):
        widths.extend(x.shape[-1] for x in (*rows[:3], *keys))
        return plain.backward(rows, keys, *rest)

    q, k, v, dout = (x[..., :width] for x in tensors(33, 33, 8, 2, torch.float64))
    forward, backward = pad_heads(ahead, back)
    out, lse = forward(q, k, v, True, SCALE)
    actual = out, lse, *backward(Rows(q, dout, out, lse), Keys(k, v), True, SCALE)
    assert {size % 8 for size in widths} == {0}
    want = plain.forward(q, k, v, True, SCALE)
    for got, right in zip(
        actual, (*want, *plain.backward(Rows(q, dout, *want), Keys(k, v), True, SCALE)), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-13)


def test_merge_does_not_overflow_where_a_bare_exponential_would():
    out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), float("-inf"))
    for value, block_lse in ((1.0, -2000.0), (2.0, 2000.0), (3.0, -2000.0)):
        merge_(out, lse, torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1), block_lse))
    assert out.item() == 2.0
    assert lse.item() == 2000.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", range(4))
def test_a_head_that_lies_in_pieces_is_put_together(odd, dtype):
    q, k, v, dout = tensors(32, 32, 4, 4, dtype)
    want_out, lse = block_forward(q, k, v, CAUSAL, SCALE)
    want = block_backward(Rows(q, dout, want_out, lse), Keys(k, v), CAUSAL, SCALE)
    inputs = [q, k, v, dout]
    inputs[odd] = inputs[odd].transpose(2, 3).contiguous().transpose(2, 3)  # last stride 4
    out, lse = block_forward(*inputs[:3], CAUSAL, SCALE)
    got = block_backward(Rows(inputs[0], inputs[3], out, lse), Keys(*inputs[1:3]), CAUSAL, SCALE)
    assert all(torch.equal(a, b) for a, b in zip((out, *got), (want_out, *want), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fastest", "cpu", torch.float32), "'fastest'.*does not exist"),
        (("triton", "cpu", torch.float32), "needs a cuda device"),
        (("flash_attn_4", "cpu", torch.float32), "needs a cuda device"),
        (("flash_attn_3", "cpu", torch.float32), "needs a cuda device"),
        (("auto", "cuda", torch.float32), "use --bf16"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_backend(*arguments)


@pytest.mark.parametrize(
    ("device_gpu", "widest"),
    [(Gpu((9, 0), 92000), 256), (Gpu((9, 0), 90800), 128), (Gpu((10, 0), 92000), 128)],
)
def test_cudnn_gets_the_heads_and_keys_that_it_takes(device_gpu, widest, monkeypatch):
    for module in (attention, cudnn, flash_attention):
        monkeypatch.setattr(module, "gpu", lambda: device_gpu)
    monkeypatch.setattr(cudnn, "cudnn_forward", lambda *_: ("cudnn",) * 2)
    monkeypatch.setattr(cudnn, "cudnn_backward", lambda *_: ("cudnn",) * 3)
    monkeypatch.setattr(flash_attention, "flash_forward", lambda *_: ("other",) * 2)
    monkeypatch.setattr(flash_attention, "flash_backward", lambda *_: ("other",) * 3)
    named, auto = (
        select_backend.__wrapped__(name, "cuda", torch.bfloat16) for name in ("cudnn", "auto")
    )
    assert auto.name == ("cudnn" if device_gpu.cudnn > 91500 else "aten")
    for width, keys in ((64, 8), (widest, 8), (widest + 8, 8), (64, 1)):
        q, k = torch.empty(1, 8, 2, width), torch.empty(1, keys, 2, width)
        is_cudnn = width <= widest and keys > 1
        want = auto.name if is_cudnn else "other"
        if auto.name == "cudnn":
            assert (auto.forward(q, k, k)[0], auto.backward(Rows(q, q, q, q), Keys(k, k))[0]) == (
                want,
                want,
            )
        if is_cudnn:
            assert named.forward(q, k, k)[0] == "cudnn"
            continue
        with pytest.raises(UserError, match=f"cudnn takes heads of up to {widest} channels"):
            named.forward(q, k, k)


@pytest.mark.parametrize("kind", [CAUSAL, ANTI])
def test_a_square_kind_refuses_a_rectangle(kind):
    q, k, v, _ = tensors(4, 6, 4, 4, torch.float32)
    with pytest.raises(ValueError, match=f"{kind} must be square, but this one has 4 queries"):
        block_forward(q, k, v, kind, SCALE)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize("name", ["aten", "cudnn", "triton", "auto"])
@pytest.mark.parametrize(
    ("queries", "keys", "kind"),
    [(128, 128, CAUSAL), (256, 64, FULL), (1000, 1000, CAUSAL), (1000, 1000, ANTI)],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_cuda_blocks_equal_the_naive_form(name, queries, keys, kind, heads, kv_heads):
    inputs = tensors(queries, keys, heads, kv_heads, torch.bfloat16, 64, "cuda")
    (lse, want_lse), *others = beside_the_naive_form(name, kind, inputs)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-3)
    for a, b in others:
        assert ((a.double() - b).norm() / b.norm()).item() < 1e-2
