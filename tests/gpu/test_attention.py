"""Attention on a GPU.

Backends against float64, all ranks of a plan as threads, and no wait of the host for the device.

`make gpu-check` runs the cases marked gpu; on a CPU the same cases are small.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch

from kernels.attention import select_backend
from kernels.blocks import CAUSAL, FULL, Keys, Rows
from kernels.ops import linear_attention
from model.decoder import Decoder
from model.parts.attention import sdpa
from parallel.context import METHODS, make_plan
from parallel.context.executor import Executor
from parallel.context.transport import HeadExchange
from runtime.errors import UserError
from runtime.tensors import FORGET, cached_on_device
from tests import threads
from tests.gpu.rates import BACKENDS, relative_error
from tests.kernels.blocks import block_backward, block_forward
from tests.model.models import model_config
from tools.common.loopback import LoopbackTransport, step_of
from tools.common.shapes import DTYPES, AttentionShape

BOUNDS = {"cuda": 2e-2, "cpu": 1e-5}
"""Relative error against float64 in the 2-norm: inputs are bfloat16 on a GPU, float32 on a CPU."""
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
CU_SEQLENS = {"cuda": (0, 100, 1500, 1501, 2048), "cpu": (0, 7, 30, 31, 64)}
SHAPES = {
    "cuda": [
        (name, width, length)
        for name in BACKENDS["cuda"]
        for width in (64, 128, 256)
        for length in (1000, 8192)
    ],
    "cpu": [("aten", 16, 50)],
}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def on(device, *args):
    return pytest.param(device, *args, marks=gpu if device == "cuda" else ())


@pytest.mark.parametrize(
    ("device", "name", "width", "length"),
    [on(device, *shape) for device in SHAPES for shape in SHAPES[device]],
)
@pytest.mark.parametrize("kind", [FULL, CAUSAL])
def test_backends_equal_float64(device, name, width, length, kind):
    """Out, log-sum-exp, dq, dk, dv of slices of longer tensors; 4 query heads share 2 of keys."""
    try:
        error = error_of(name, device, width, length, kind)
    except (UserError, torch.OutOfMemoryError) as refusal:
        pytest.skip(f"not here: {refusal}")
    assert error <= BOUNDS[device]


def test_a_wrong_backend_is_seen(monkeypatch):
    plain = block_forward
    monkeypatch.setitem(globals(), "block_forward", lambda q, k, *rest: plain(q, k.flip(1), *rest))
    assert error_of("aten", "cpu", 16, 50, FULL) > BOUNDS["cpu"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_equal_one_attention(device, size, packed, method):
    """All ranks of a method are threads.

    out, dq, dk and dv are compared with torch's own in float64.
    """
    cu_seqlens = CU_SEQLENS[device] if packed else None
    length = CU_SEQLENS[device][-1]
    work = AttentionShape(seq_length=length, head_dim=64 if device == "cuda" else 16)
    inputs = [x.to(DTYPES[DTYPE[device]]) for x in work.tensors(device)]
    plan = make_plan(method, seq_len=work.seq_length, size=size, documents=cu_seqlens)
    *leaves, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    ranges = pairwise(cu_seqlens or (0, work.seq_length))
    out = torch.cat([sdpa(*(x[:, a:b] for x in leaves)) for a, b in ranges], 1)
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert relative_error(threads.attend(plan, inputs), want) <= BOUNDS[device]


STEPS = ["two layers", *(f"linear attention, {name}" for name in ("auto", "chunked")), *METHODS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_the_host_waits_for_nothing(device, packed, name):
    unwaited(step_named(name, device, CU_SEQLENS[device], packed), device)


def test_a_wait_for_new_documents_is_seen(monkeypatch):
    """A step that was warmed copies no indices, in which a wait would be."""
    mode = ["default"]

    @cached_on_device(4)
    def copied(device):
        if mode[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    with pytest.raises(RuntimeError, match="called a synchronizing"):
        unwaited(lambda: copied(torch.device("cpu")), "cuda")
    assert mode == ["default", "error", "default"]


def error_of(name, device, width, length, kind):
    """Return the largest relative error of a backend's out, log-sum-exp, dq, dk and dv."""
    work = AttentionShape(
        seq_length=length + 8, num_heads=4, kv_heads=2, head_dim=width, dtype=DTYPE[device]
    )
    q, k, v, dout = (
        x[:, 8:] for x in work.tensors(device)
    )  # a slice: strides of the longer tensor
    backend, scale = select_backend(name, device, q.dtype), width**-0.5
    out, lse = block_forward(q, k, v, kind, scale, backend)
    results = [out, lse, *block_backward(Rows(q, dout, out, lse), Keys(k, v), kind, scale, backend)]
    return relative_error(results, in_float64(q, k, v, dout, kind, scale))


def in_float64(q, k, v, dout, kind, scale):
    """Return out, lse, dq, dk and dv, a head at a time.

    Scores of 8,192 tokens take half a gigabyte.
    """
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group, outs, sums = q.shape[2] // k.shape[2], [], []
    gradients = [torch.zeros_like(x) for x in leaves]
    for head in range(q.shape[2]):
        queries, key, value = (
            leaves[0][:, :, head],
            leaves[1][:, :, head // group],
            leaves[2][:, :, head // group],
        )
        scores = queries @ key.transpose(1, 2) * scale
        if kind == CAUSAL:
            scores = scores.masked_fill(
                torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf")
            )
        out = scores.softmax(-1) @ value
        for total, part in zip(
            gradients, torch.autograd.grad(out, leaves, dout[:, :, head].double()), strict=True
        ):
            total += part
        outs.append(out.detach())
        sums.append(scores.detach().logsumexp(-1))
    return [torch.stack(outs, 2), torch.stack(sums, 2), *gradients]


def unwaited(step, device):
    """Run a step twice on a GPU, the second time with torch raising where the host waits.

    A CPU is never waited for.
    """
    step()  # kernels are chosen and compiled once
    if device != "cuda":
        return
    torch.cuda.synchronize()
    for forget in FORGET:  # other documents come with every micro-batch
        forget()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_named(name, device, cu_seqlens, packed):
    """Return forward + backward of two layers, of the scan, or of a rank's part by a method.

    The rank has no peers, and receives what it would send.
    """
    length = cu_seqlens[-1]
    if not packed:
        cu_seqlens = None
    if name == "two layers":
        model = Decoder(
            model_config(num_layers=2, hidden_size=512, num_attention_heads=8, vocab_size=1024)
        ).to(device)
        return partial(layers, model, torch.zeros(1, 512, dtype=torch.long, device=device))
    work = AttentionShape(seq_length=length, num_heads=4, kv_heads=4, dtype="bfloat16")
    q, k, v, dout = work.tensors(device)
    if name in METHODS:
        plan = make_plan(name, seq_len=length, size=4, documents=cu_seqlens)
        alone = LoopbackTransport(plan.geometry, None, 1)
        rank = Executor(alone, "auto")
        return partial(attend, plan, rank, HeadExchange(alone), (q, k, v, dout))
    leaves, backend = [x.requires_grad_() for x in (q, k, v)], name.rpartition(" ")[2]

    def scan():
        out, _ = linear_attention(q, k, v, [-0.1] * 4, cu_seqlens=cu_seqlens, backend=backend)
        torch.autograd.grad(out, leaves, dout)

    return scan


def layers(model, tokens):
    with torch.autocast(tokens.device.type, torch.bfloat16):
        model(tokens).sum().backward()


@torch.no_grad()
def attend(plan, rank, heads, tensors):
    local = [heads.to_heads(x[:, : plan.local_len]) for x in tensors]
    step_of(plan, rank, *local)()
    heads.to_tokens(local[3], 4)
