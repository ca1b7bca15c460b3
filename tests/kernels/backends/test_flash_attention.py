"""Versions of FlashAttention in torch's own registry, on a CPU, and what a run says of its kernel.

Packages are stand-ins on the path, that torch's registry imports by itself; a version of
FlashAttention that computes is one behind the same operators.
"""

import importlib
import sys

import pytest
import torch
from torch.nn import attention as registry
from torch.nn.attention import _registry

import train.context_attention
from kernels import attention, gpu, reference
from kernels.attention import block_backward, block_forward, select_backend
from kernels.backends import cudnn, flash_attention
from kernels.backends.advice import describe_kernel
from kernels.backends.flash_attention import ABSENT, FlashAttention, put
from kernels.blocks import ANTI, CAUSAL, FULL, Keys, Rows
from kernels.cuda import Lengths
from kernels.gpu import Gpu
from parallel.context.config import ContextConfig
from parallel.mesh import MeshConfig
from runtime.errors import UserError
from tests.kernels import test_cuda, test_tiles
from tests.kernels.gpus import A100, H100, SHADOWED
from tests.kernels.test_tiles import attention_by_tiles, error, inputs, tiles_of, truth
from train.config.entries import Config, TrainConfig
from train.context_attention import kernel_lines

THIRD = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""
FOURTH = {"flash_attn/cute/interface.py": "def _flash_attn_fwd(): ...\ndef _flash_attn_bwd(): ..."}
UNDEFINED = 'raise ImportError("flash_attn_3.so: undefined symbol:\\n _ZN3c105ErrorC2E")'
CUDA = ("cuda", torch.bfloat16)


@pytest.fixture
def set_gpu(monkeypatch):
    """Set the GPU of the test."""

    def set_to(device_gpu):
        for module in (gpu, attention, cudnn, flash_attention, train.context_attention):
            monkeypatch.setattr(module, "gpu", lambda: device_gpu)
        forget()

    yield set_to
    monkeypatch.undo()
    forget()


def forget():
    if library := getattr(sys.modules.get("flash_attn_interface"), "library", None):
        library._destroy()  # a namespace of operators is defined once
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")
    ]:
        del sys.modules[name]
    importlib.invalidate_caches()
    put(None)
    FlashAttention.problem.cache_clear()
    select_backend.cache_clear()
    registry._fa4._fa4_import_module.cache_clear()


def configured(**of_context):
    return Config(
        mesh=MeshConfig(device="cuda"),
        train=TrainConfig(bf16=True),
        context=ContextConfig(**of_context),
    )


def test_a_run_says_its_kernel_and_its_cudnn(set_gpu, monkeypatch):
    set_gpu(H100)
    assert kernel_lines(configured()) == ["attention kernel: cudnn, cuDNN 9.20.0 loaded"]
    assert kernel_lines(configured(context_parallel_method="none")) == kernel_lines(configured())
    set_gpu(SHADOWED)
    line, warned = kernel_lines(configured())
    assert line == (
        "attention kernel: aten (FlashAttention 2), cuDNN 9.10.2 loaded instead of torch's own "
        "9.20.0"
    )
    assert warned.startswith("WARNING: attention uses FlashAttention 2")
    assert kernel_lines(configured(context_parallel_method="none"))[0] == line
    set_gpu(A100)
    assert kernel_lines(configured()) == [
        "attention kernel: aten (FlashAttention 2), cuDNN 9.20.0 loaded"
    ]
    assert describe_kernel("triton", Gpu()) == "triton, no cuDNN loaded"
    on_cpu = Config(mesh=MeshConfig(device="cpu"))
    assert kernel_lines(on_cpu) == ["attention kernel: aten"]


CUTE = "flash_attn/cute/interface.py"
BROKEN = {
    "that registers nothing": (
        "flash_attn_3",
        {"flash_attn_interface.py": ""},
        "does not expose FA3 ",
    ),
    "for another torch": (
        "flash_attn_3",
        {"flash_attn_interface.py": UNDEFINED},
        r"import fails \(ImportError.*undefined",
    ),
    "absent": ("flash_attn_3", {}, ABSENT),
    "2 in the place of 4": ("flash_attn_4", {"flash_attn/__init__.py": ""}, ABSENT),
    "4 of another version": ("flash_attn_4", {CUTE: ""}, "does not expose FA4 kernels"),
    "4 without its compiler": ("flash_attn_4", {CUTE: "import cutlass_"}, "No module named 'cutl"),
}


def install(place, monkeypatch, files):
    monkeypatch.syspath_prepend(place)
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    forget()


@pytest.mark.parametrize("name", BROKEN)
def test_a_version_that_cannot_run_is_refused_with_the_reason(name, set_gpu, tmp_path, monkeypatch):
    version, files, reason = BROKEN[name]
    set_gpu(H100)
    install(tmp_path, monkeypatch, files)
    with pytest.raises(
        UserError,
        match=rf"^attention_backend is {version}, but .*{reason}.*; install .*, or use auto$",
    ) as no:
        select_backend(version, *CUDA)
    assert "\n" not in str(no.value)
    assert select_backend("auto", *CUDA, is_packed=True).name == "aten"


def test_torchs_registry_puts_an_installed_version_in_place(set_gpu, tmp_path, monkeypatch):
    set_gpu(H100)
    install(tmp_path, monkeypatch, {"flash_attn_interface.py": THIRD} | FOURTH)
    assert select_backend("auto", *CUDA).name == "cudnn"
    assert (
        select_backend("auto", *CUDA, is_packed=True).name
        == select_backend("flash_attn_3", *CUDA).name
    )
    assert select_backend("flash_attn_4", *CUDA).name == "flash_attn_4"
    assert registry.current_flash_attention_impl() is None, "the trial leaves torch's own"
    for impl in ("FA3", "FA4", None):
        put(impl)
        assert registry.current_flash_attention_impl() == impl


def test_what_the_gpu_or_torch_lacks_is_said_first(set_gpu, monkeypatch):
    set_gpu(A100)
    with pytest.raises(UserError, match=r"compute capability 9\.x, but this one has 8\.0"):
        select_backend("flash_attn_3", *CUDA)
    set_gpu(H100)
    monkeypatch.delattr(registry, "activate_flash_attention_impl")
    with pytest.raises(UserError, match=r"cannot activate it, but 2\.11 and newer can"):
        select_backend("flash_attn_3", *CUDA)


class Computing:
    """A version of FlashAttention behind aten's operators on the CPU, by the naive form.

    It counts its calls.
    """

    def __init__(self):
        self.calls, self.library = 0, torch.library.Library("aten", "IMPL")
        for name in ("_scaled_dot_product_flash_attention", "_flash_attention"):
            forward = name if name.startswith("_scaled") else f"{name}_forward"
            for operator in (forward, f"{name}_backward"):
                self.library.impl(operator, getattr(self, operator), "CPU")

    def remove(self):
        self.library._destroy()

    def _scaled_dot_product_flash_attention(
        self, q, k, v, dropout=0.0, causal=False, mask=False, *, scale
    ):
        self.calls += 1
        out, lse = reference.block_forward(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return self._found(
            q, out.transpose(1, 2), lse.transpose(1, 2).contiguous(), (q[:0], q[:0], 0, 0)
        )

    def _scaled_dot_product_flash_attention_backward(self, dout, q, k, v, out, lse, *rest, scale):
        assert lse.is_contiguous()
        turned = [x.transpose(1, 2) for x in (q, dout, out, lse, k, v)]
        gradients = reference.block_backward(Rows(*turned[:4]), Keys(*turned[4:]), rest[5], scale)
        return tuple(x.transpose(1, 2) for x in gradients)

    def _flash_attention_forward(self, q, k, v, *rest, scale, **_):
        self.calls += 1
        out, lse = test_cuda.forward(q, k, v, Lengths(*rest[:4]), rest[5], scale)
        return self._found(q, out, lse.transpose(0, 1).contiguous(), ())

    def _flash_attention_backward(self, dout, q, k, v, out, lse, *rest, scale, **_):
        rows = Rows(q, dout, out, lse.transpose(0, 1))
        return test_cuda.backward(rows, Keys(k, v), Lengths(*rest[:4]), rest[5], scale)

    def _found(self, q, out, lse, between):
        seed = torch.zeros(2, dtype=torch.uint64)
        return out.to(q.dtype), lse, *between, seed, seed[:0], q[:0]


@pytest.fixture
def versions(set_gpu, monkeypatch):
    """Have versions 3 and 4 of stand-ins that compute; return those put in place so far."""
    registered = []
    for impl in ("FA3", "FA4"):

        def register(impl=impl):
            registered.append((impl, Computing()))
            return registered[-1][1]

        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, impl, register)
    set_gpu(H100)
    return registered


@pytest.mark.parametrize("kind", [FULL, CAUSAL, ANTI])
def test_blocks_go_through_the_version_that_is_named(kind, versions):
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, 12, heads, 12) for heads in (4, 2, 2, 4)
    )  # widths are padded to 16
    want, actual = [], []
    third, fourth = (select_backend(name, *CUDA) for name in ("flash_attn_3", "flash_attn_4"))
    for into, backend in ((want, select_backend("reference", "cpu", q.dtype)), (actual, third)):
        out, lse = block_forward(q, k, v, kind, 0.3, backend)
        into += [out, lse, *block_backward(Rows(q, dout, out, lse), Keys(k, v), kind, 0.3, backend)]
    for a, b in zip(actual, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for backend, impl in ((fourth, "FA4"), (third, "FA3"), (fourth, "FA4")):
        block_forward(q, k, v, kind, 0.3, backend)
        assert (versions[-1][0], versions[-1][1].calls) == (impl, 1), (
            "each call sees to its version"
        )
    with pytest.raises(NotImplementedError):  # torch's own has no kernel on a CPU
        block_forward(q, k, v, kind, 0.3, select_backend("aten", *CUDA))
    assert registry.current_flash_attention_impl() is None
    with pytest.raises(
        UserError,
        match="flash_attn_4 takes heads of up to 128 channels, but got 136 channels",
    ):
        block_forward(*(torch.ones(1, 2, 1, 136) for _ in range(3)), kind, 0.3, fourth)


@pytest.mark.parametrize("mask", ["documents", "window and documents"])
def test_cuda_tiles_go_through_the_version_of_the_gpu(mask, versions, monkeypatch):
    backend = select_backend("auto", *CUDA, is_packed=True)
    assert backend.name == "flash_attn_3"
    monkeypatch.setattr(test_tiles, "select_backend", lambda *_: backend)
    test_cuda.CALLS.clear()
    tensors = inputs(torch.float32)
    assert error(attention_by_tiles("", tensors, tiles_of(mask)), truth(tensors, mask)) < 1e-5
    assert max(tiles for tiles, _ in test_cuda.CALLS) > 2, "packed tiles share a launch"
    assert versions[-1][1].calls > 0
