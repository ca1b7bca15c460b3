"""Which flash-attn is used: packages as their versions lay them out, with the arguments that these take, on a path."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import flash_attn
from kernels.attention import passed_over, select_backend
from parallel.context.config import ContextConfig
from parallel.mesh import MeshConfig
from train.attention import softmax_context
from train.config.language import Config, TrainConfig

WINDOW = {"2.5": "window_size", "2.8": "window_size_left, window_size_right, softcap"}
INTERFACE = """
def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, {window}, alibi_slopes, return_softmax):
    return "out", q[..., 0].transpose(1, 2), None, None

def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, {window},
                         alibi_slopes, deterministic, rng_state=None):
    raise AssertionError
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
UNDEFINED = 'raise ImportError("flash_attn_2_cuda.so: undefined symbol:\\n _ZN3c105ErrorC2E")'
USABLE = {
    "2.8 without torch's operators": {
        "flash_attn/__init__.py": "__version__ = '2.8.3'",
        "flash_attn/flash_attn_interface.py": INTERFACE.format(window=WINDOW["2.8"]),
    },
    "2.8": {"flash_attn/__init__.py": "__version__ = '2.8.3'", "flash_attn/flash_attn_interface.py": OPERATORS},
}
UNUSABLE: dict[str, tuple[dict[str, str], str]] = {
    "2.5": (
        {
            "flash_attn/__init__.py": "__version__ = '2.5.8'",
            "flash_attn/flash_attn_interface.py": INTERFACE.format(window=WINDOW["2.5"]),
        },
        r"which is 2\.5\.8, whose functions take other arguments",
    ),
    "3": ({"flash_attn_interface.py": "def flash_attn_func(): pass"}, "No module named 'flash_attn'"),
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
CUDA = ("cuda", torch.bfloat16)


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    flash_attn.problem.cache_clear()
    select_backend.cache_clear()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder before all others on the path, in which nothing has been imported before or is afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def install(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    forget()


@pytest.mark.parametrize("name", USABLE)
def test_a_known_version_is_used(name: str, place: Path) -> None:
    install(place, USABLE[name])
    for asked in ("auto", "flash_attn"):
        assert select_backend(asked, *CUDA).name == "flash_attn"
        assert passed_over(asked, *CUDA) is None


def test_what_it_returns_is_laid_out_as_everywhere(place: Path) -> None:
    install(place, USABLE["2.8 without torch's operators"])
    q = torch.randn(1, 3, 2, 8)
    out, lse = select_backend("auto", *CUDA).forward(q, q, q, True, 1.0)
    assert (out, lse.shape) == ("out", (1, 3, 2))


@pytest.mark.parametrize("name", UNUSABLE)
def test_another_one_is_passed_over_with_its_reason(name: str, place: Path) -> None:
    files, reason = UNUSABLE[name]
    install(place, files)
    assert select_backend("auto", *CUDA).name == "aten"
    note = passed_over("auto", *CUDA)
    assert note is not None
    assert "\n" not in note
    with pytest.raises(
        ValueError, match=f"attention_backend is flash_attn, .*{reason}.* install flash-attn 2.7 or 2.8"
    ):
        select_backend("flash_attn", *CUDA)
    assert passed_over("auto", "cpu", torch.bfloat16) is None, "which has no use for it"


def test_none_is_no_matter(place: Path) -> None:
    assert not flash_attn.is_installed(), "these tests expect an environment without one"
    assert select_backend("auto", *CUDA).name == "aten"
    assert passed_over("auto", *CUDA) is None
    with pytest.raises(ValueError, match=r"which is not installed; install flash-attn 2\.7"):
        select_backend("flash_attn", *CUDA)


def test_a_run_notes_it_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(place, UNUSABLE["for another torch"][0])
    config = Config(mesh=MeshConfig(device="cuda"), train=TrainConfig(bf16=True), context=ContextConfig())
    softmax_context(config, None, lambda *_: None)  # type: ignore[arg-type,return-value]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "note: attention_backend auto takes aten, not the flash-attn that is installed, whose import"
    )
