"""Stubbed GPUs refuse other machines, their library works by itself, and verdicts on runs are told.

The runs (`make cuda-stub`) need a CUDA build of torch, which CI has not, and are no test. What
`make test` has instead are fake tensors: a step of each kind of configuration
(tests/planner/test_dry_run.py), and of every method and model (tests/planner/test_waits.py).
"""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bench.memory import command, lines_of
from tests.cuda_stub import __main__ as stub
from tests.cuda_stub import check
from tests.cuda_stub.check import CASES, MODELS, line, main, verdict
from tools.fit import parsed

MIB = 1 << 20
REFUSED = [
    (
        platform,
        "machine",
        lambda: "aarch64",
        "on aarch64; the stub is made for Linux on x86_64 alone",
    ),
    (
        stub,
        "GPU",
        Path("/dev/null"),
        "this machine has a GPU (/dev/null is there), which the stub would hide",
    ),
    (torch.version, "cuda", None, "has no CUDA, and the stub needs CUDA 13"),
    (torch.version, "cuda", "12.8", "has CUDA 12.8, and the stub needs CUDA 13"),
    (shutil, "which", lambda name: None, "gcc is not installed"),
]


@pytest.fixture(autouse=True)
def suitable(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(stub, "GPU", Path("/dev/none"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.parametrize(("module", "name", "value", "message"), REFUSED)
def test_where_it_cannot_work_it_says_so_in_a_line(
    module, name, value, message, monkeypatch, capsys
):
    stub.check_machine()
    monkeypatch.setattr(module, name, value)
    assert stub.main(["--", "true"]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert stub.main(["--gpus", "2", "--"]) == 1
    assert capsys.readouterr().err.startswith("error: no command is given")


def test_calls_are_added_but_for_those_of_torch_and_of_versions(monkeypatch):
    lists = {
        "undefined": {
            "cudaOne",
            "cublasLtMatmul",
            "ncclAllReduce",
            "ncclGetVersion",
            "cudaOfTorch",
            "cudnnSetStream",
        },
        "defined": {"cudaOfTorch"},
    }
    monkeypatch.setattr(stub, "symbols", lists.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    calls = [line.split(" ", 2)[2] for line in stub.others().splitlines()[1:]]
    counted, plain = "(void) { return stub_launch(); }", "(void) { return 0; }"
    assert calls == [
        *(
            f"cublasLtMatmul{counted}",
            f"cudaOne{plain}",
            f"cudnnSetStream{plain}",
            f"ncclAllReduce{counted}",
        ),
    ]


@pytest.mark.needs("gcc", "as", "ld")
def test_the_library_allocates_copies_and_counts(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_STUB_GPUS", "3")
    path = tmp_path / "stub.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", path, stub.SOURCE, "-ldl", "-lpthread"], check=True
    )
    cuda = ctypes.CDLL(str(path))
    pointer, free, total, number = (
        ctypes.c_void_p(),
        ctypes.c_size_t(),
        ctypes.c_size_t(),
        ctypes.c_int(),
    )
    cuda.cudaGetDeviceCount(ctypes.byref(number))
    assert number.value == 3
    assert cuda.cudaSetDevice(3) == 101
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(64 * MIB)) == 0
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert (total.value - free.value, total.value) == (64 * MIB, 139 << 30)
    kinds = (ctypes.c_int * 22)()
    cuda.cudaPointerGetAttributes(kinds, ctypes.c_void_p(pointer.value + 5))
    assert kinds[0] == 2
    buffer = ctypes.create_string_buffer(3)
    cuda.cudaMemcpyAsync(pointer, b"abc", ctypes.c_size_t(3), 1, None)
    cuda.cudaMemcpyAsync(buffer, pointer, ctypes.c_size_t(3), 2, None)
    assert buffer.raw == b"abc"
    cuda.cudaStreamSynchronize(None)
    counts = (ctypes.c_long * 3)()
    cuda.stub_counts(counts)
    assert list(counts) == [0, 1, 1]
    assert cuda.cudaFree(pointer) == 0
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert free.value == total.value
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(140 << 30)) == 2


RIGHT = {
    "processes": 1,
    "bytes": 1000,
    "predicted_bytes": 1040,
    "launches": 7,
    "waits": 1,
    "copies": 2,
}


def test_an_error_and_a_wrong_prediction_are_told_and_are_the_exit_status(monkeypatch, capsys):
    assert verdict(RIGHT) == ""
    assert line("llama", RIGHT).endswith("launches 7, waits 1, copies 2")
    for predicted in (1060, 940):
        assert (
            verdict(RIGHT | {"predicted_bytes": predicted})
            == f"the prediction is {predicted / 10 - 100:+.1f}% off"
        )
    assert (
        line("llama", {"processes": 2, "failed": "RuntimeError: two"})
        == "llama: FAILED: RuntimeError: two"
    )
    monkeypatch.setattr(check, "check_machine", lambda: None)
    monkeypatch.setattr(check, "measure", lambda processes, flags: RIGHT)
    assert main(["--only", "llama full"]) == 0
    monkeypatch.setattr(check, "measure", lambda processes, flags: RIGHT | {"bytes": 2000})
    assert main(["--only", "llama --compile"]) == 1
    assert (
        "1 of 1 configurations are not as they must be: llama --compile" in capsys.readouterr().err
    )


def test_every_case_is_a_configuration():
    for name in lines_of(CASES):
        processes, flags = command(name, MODELS)
        assert processes in (1, 2, 4)
        parsed(flags.split())
