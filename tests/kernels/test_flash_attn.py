"""Which flash-attn is used: packages as their versions lay them out, with the arguments that these take, on a path.

The stand-in for version 3 computes, so that what goes through its operators is compared, dense and packed.
"""

import importlib
import re
import sys

import pytest
import torch

from kernels import cudnn, flash_attn
from kernels.attention import block_backward, block_forward, select_backend, why_flash_attn_is_unused
from kernels.blocks import ANTI, CAUSAL, FULL, Keys, Rows
from parallel.context.config import ContextConfig
from parallel.mesh import MeshConfig
from tests.kernels import test_packed, test_tiles
from tests.kernels.test_tiles import attention_by_tiles, error, inputs, tiles_of, truth
from train.attention import softmax_context
from train.config.entries import Config, TrainConfig

FUNCTIONS = """
from tests.kernels.cuda_calls import flash_attn_backward as _flash_attn_backward
from tests.kernels.cuda_calls import flash_attn_forward as _flash_attn_forward
"""
OLD = """
def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax): ...
_flash_attn_backward = _flash_attn_forward
"""
OPERATORS = """
import torch
from torch import Tensor

@torch.library.custom_op("longmesh_stub::_flash_attn_forward", mutates_args=(), device_types="cuda")
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise AssertionError

@torch.library.custom_op("longmesh_stub::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types="cuda")
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None
) -> Tensor:
    raise AssertionError
"""
# The schemas of hopper/flash_api.cpp at 0251105a of Dao-AILab/flash-attention, as they are registered there.
FLASH_3 = """
import torch
from kernels import reference
from kernels.blocks import Keys, Rows
from kernels.packed import Lengths
from tests.kernels import test_packed

LIBRARY = torch.library.Library("flash_attn_3", "DEF")
LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None,"
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,"
    "Tensor? cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,"
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None,"
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None,"
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,"
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False,"
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0)"
    " -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None,"
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,"
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,"
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1,"
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def settings(operator, given):
    # What is given by name comes by position, up to the last that is not the default.
    named = dict(zip((argument.name for argument in operator.default._schema.arguments), given))
    packed = [named.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    return named["softmax_scale"], named.get("is_causal", False), None if packed[0] is None else Lengths(*packed)


@torch.library.impl(LIBRARY, "fwd", "CPU")
def fwd(q, k, v, *rest):
    scale, causal, lengths = settings(torch.ops.flash_attn_3.fwd, (q, k, v, *rest))
    if lengths is None:
        out, lse = reference.block_forward(q, k, v, causal, scale)
    else:
        out, lse = test_packed.forward(q, k, v, lengths, causal, scale)
    return out.to(q.dtype), lse.transpose(-1, -2).contiguous(), q.new_empty(0), q.new_empty(0)


@torch.library.impl(LIBRARY, "bwd", "CPU")
def bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, *rest):
    assert softmax_lse.is_contiguous()
    given = dout, q, k, v, out, softmax_lse, dq, dk, dv, *rest
    scale, causal, lengths = settings(torch.ops.flash_attn_3.bwd, given)
    blocks = Rows(q, dout, out, softmax_lse.transpose(-1, -2)), Keys(k, v)
    if lengths is None:
        found = reference.block_backward(*blocks, causal, scale)
    else:
        found = test_packed.backward(*blocks, lengths, causal, scale)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)
    return tuple(q.new_empty(0) for _ in range(5))
"""
UNDEFINED = 'raise ImportError("flash_attn_2_cuda.so: undefined symbol:\\n _ZN3c105ErrorC2E")'
USABLE = {
    "2.8 without torch's operators": {
        "flash_attn/__init__.py": "__version__ = '2.8.3'",
        "flash_attn/flash_attn_interface.py": FUNCTIONS,
    },
    "2.8": {"flash_attn/__init__.py": "__version__ = '2.8.3'", "flash_attn/flash_attn_interface.py": OPERATORS},
}
UNUSABLE = {
    "2.5": (
        {"flash_attn/__init__.py": "__version__ = '2.5.8'", "flash_attn/flash_attn_interface.py": OLD},
        r"which is 2\.5\.8, whose functions take other arguments",
    ),
    "4, a namespace": ({"flash_attn/cute/__init__.py": ""}, "No module named 'flash_attn.flash_attn_interface'"),
    "for another torch": ({"flash_attn/__init__.py": UNDEFINED}, "ImportError: flash_attn_2_cuda.*undefined symbol"),
    "a library that is not there": (
        {"flash_attn/__init__.py": "raise OSError('libcudart.so.11.0: cannot open')"}, "OSError: libcudart",
    ),
    "raising anything": ({"flash_attn/__init__.py": "1 / 0"}, "ZeroDivisionError"),
    "without its functions": (
        {"flash_attn/__init__.py": "", "flash_attn/flash_attn_interface.py": ""}, "cannot import name",
    ),
}  # fmt: skip
UNUSABLE_3 = {
    "that registers nothing": ("def flash_attn_func(): pass", "AttributeError.*flash_attn_3.*fwd"),
    "with other arguments": (FLASH_3.replace("max_seqlen_k", "most_k"), r"flash_attn_3\.fwd.* takes no max_seqlen_k"),
    "for another torch": (UNDEFINED, "undefined symbol"),
}
CUDA = ("cuda", torch.bfloat16)


def forget():
    if library := getattr(sys.modules.get("flash_attn_interface"), "LIBRARY", None):
        library._destroy()  # a namespace of operators is defined once
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    flash_attn.problem.cache_clear()
    select_backend.cache_clear()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder before all others on the path, in which nothing has been imported before or is afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cudnn, "capability", lambda: cudnn.HOPPER)


def install(place, files):
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    forget()


@pytest.mark.parametrize("name", USABLE)
def test_a_known_version_is_used(name, place):
    install(place, USABLE[name])
    for asked in ("auto", "flash_attn"):
        assert select_backend(asked, *CUDA).name == "flash_attn"
        assert why_flash_attn_is_unused(asked, *CUDA) is None


def test_what_it_returns_is_laid_out_as_everywhere(place):
    install(place, USABLE["2.8 without torch's operators"])
    q = torch.randn(1, 3, 2, 8).bfloat16()
    out, lse = select_backend("auto", *CUDA).forward(q, q, q, True, 1.0)
    assert (out.shape, lse.shape) == (q.shape, (1, 3, 2))


@pytest.mark.parametrize("name", UNUSABLE)
def test_another_one_is_passed_over_with_its_reason(name, place):
    files, reason = UNUSABLE[name]
    install(place, files)
    assert select_backend("auto", *CUDA).name == "aten"
    note = why_flash_attn_is_unused("auto", *CUDA)
    assert "\n" not in note
    with pytest.raises(
        ValueError, match=f"attention_backend is flash_attn, .*{reason}.* install flash-attn 2.7 or 2.8"
    ):
        select_backend("flash_attn", *CUDA)
    assert why_flash_attn_is_unused("auto", "cpu", torch.bfloat16) is None, "which has no use for it"


@pytest.mark.parametrize("name", UNUSABLE_3)
def test_an_unusable_3_is_passed_over_where_it_would_be_taken(name, place, hopper):
    text, reason = UNUSABLE_3[name]
    install(place, {"flash_attn_interface.py": text} | USABLE["2.8"])
    assert select_backend("auto", *CUDA, documents=True).name == "flash_attn"
    assert re.search(
        f"takes flash_attn, not the flash-attn 3 .*{reason}", why_flash_attn_is_unused("auto", *CUDA, True) or ""
    )
    assert why_flash_attn_is_unused("auto", *CUDA) is None, "cuDNN takes whole sequences"
    with pytest.raises(ValueError, match=f"attention_backend is flash_attn_3, .*{reason}.* install flash-attn 3"):
        select_backend("flash_attn_3", *CUDA)


def test_3_takes_packed_documents_on_hopper(place, monkeypatch):
    install(place, {"flash_attn_interface.py": FLASH_3} | USABLE["2.8"])
    for capability, whole, packed in (((8, 0), "flash_attn", "flash_attn"), ((9, 0), "cudnn", "flash_attn_3")):
        monkeypatch.setattr(cudnn, "capability", lambda at=capability: at)
        select_backend.cache_clear()
        assert select_backend("auto", *CUDA).name == whole
        assert select_backend("auto", *CUDA, documents=True).name == packed
        assert why_flash_attn_is_unused("auto", *CUDA, True) is None
        assert select_backend("flash_attn_3", *CUDA).name == "flash_attn_3"


@pytest.fixture
def third(place):
    install(place, {"flash_attn_interface.py": FLASH_3})
    return select_backend("flash_attn_3", *CUDA)


@pytest.mark.parametrize("kind", [FULL, CAUSAL, ANTI])
def test_blocks_go_through_3s_operators(kind, third):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 12, heads, 12) for heads in (4, 2, 2, 4))  # widths are padded to 16
    want, found = [], []
    for into, backend in ((want, select_backend("reference", "cpu", q.dtype)), (found, third)):
        out, lse = block_forward(q, k, v, kind, 0.3, backend)
        into += [out, lse, *block_backward(Rows(q, dout, out, lse), Keys(k, v), kind, 0.3, backend)]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["documents", "window and documents"])
def test_packed_tiles_go_through_3s_operators(mask, third, monkeypatch):
    monkeypatch.setattr(test_tiles, "select_backend", lambda *_: third)
    test_packed.CALLS.clear()
    given = inputs(torch.float32)
    assert error(attention_by_tiles("", given, tiles_of(mask)), truth(given, mask)) < 1e-5
    assert max(tiles for tiles, _ in test_packed.CALLS) > 2, "packed tiles share a launch"


def test_none_is_no_matter(place):
    assert not any(map(flash_attn.is_installed, flash_attn.PACKAGES)), "these tests expect an environment without one"
    assert select_backend("auto", *CUDA).name == "aten"
    assert why_flash_attn_is_unused("auto", *CUDA) is None
    with pytest.raises(ValueError, match=r"which is not installed; install flash-attn 2\.7"):
        select_backend("flash_attn", *CUDA)


def test_a_run_notes_it_once(place, capsys):
    install(place, UNUSABLE["for another torch"][0])
    config = Config(mesh=MeshConfig(device="cuda"), train=TrainConfig(bf16=True), context=ContextConfig())
    softmax_context(config, None, lambda *_: None)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "note: attention_backend auto takes aten, not the flash-attn that is installed, whose import"
    )
