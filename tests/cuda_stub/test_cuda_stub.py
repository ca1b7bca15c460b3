"""Stubbed GPUs refuse other machines, and their library works by itself; no CUDA build of torch is needed."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cuda_stub import __main__ as stub

MIB = 1 << 20
REFUSED = {
    "on aarch64; the stub is made for Linux on x86_64 alone": lambda patch: patch.setattr(
        platform, "machine", lambda: "aarch64"
    ),
    "this machine has a GPU (/dev/null is there), which the stub would hide": lambda patch: patch.setattr(
        stub, "GPU", Path("/dev/null")
    ),
    "has no CUDA, and the stub needs CUDA 13": lambda patch: patch.setattr(torch.version, "cuda", None),
    "has CUDA 12.8, and the stub needs CUDA 13": lambda patch: patch.setattr(torch.version, "cuda", "12.8"),
    "gcc is not installed": lambda patch: patch.setattr(shutil, "which", lambda name: None),
}


@pytest.fixture(autouse=True)
def suitable(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(stub, "GPU", Path("/dev/none"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.parametrize("message", REFUSED)
def test_where_it_cannot_work_it_says_so_in_a_line(message, monkeypatch, capsys):
    stub.check_machine()
    REFUSED[message](monkeypatch)
    assert stub.main(["--", "true"]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_command_is_needed(capsys):
    assert stub.main(["--gpus", "2", "--"]) == 1
    assert capsys.readouterr().err.startswith("error: no command is given")


def test_calls_are_added_but_for_those_of_torch_and_of_versions(monkeypatch):
    lists = {
        "undefined": {"cudaOne", "cublasLtMatmul", "ncclAllReduce", "ncclGetVersion", "cudaOfTorch", "cudnnSetStream"},
        "defined": {"cudaOfTorch"},
    }
    monkeypatch.setattr(stub, "symbols", lists.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = [line.split(" ", 2)[2] for line in stub.others().splitlines()[1:]]
    counted, plain = "(void) { return stub_launch(); }", "(void) { return 0; }"
    assert found == [
        *(f"cublasLtMatmul{counted}", f"cudaOne{plain}", f"cudnnSetStream{plain}", f"ncclAllReduce{counted}"),
    ]


@pytest.mark.needs("gcc", "as", "ld")
def test_the_library_allocates_copies_and_counts(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_STUB_GPUS", "3")
    path = tmp_path / "stub.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, stub.SOURCE, "-ldl", "-lpthread"], check=True)
    cuda = ctypes.CDLL(str(path))
    pointer, free, total, number = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
    cuda.cudaGetDeviceCount(ctypes.byref(number))
    assert number.value == 3
    assert cuda.cudaSetDevice(3) == 101
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(64 * MIB)) == 0
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert (total.value - free.value, total.value) == (64 * MIB, 139 << 30)
    kinds = (ctypes.c_int * 22)()
    cuda.cudaPointerGetAttributes(kinds, ctypes.c_void_p(pointer.value + 5))
    assert kinds[0] == 2
    there = ctypes.create_string_buffer(3)
    cuda.cudaMemcpyAsync(pointer, b"abc", ctypes.c_size_t(3), 1, None)
    cuda.cudaMemcpyAsync(there, pointer, ctypes.c_size_t(3), 2, None)
    assert there.raw == b"abc"
    cuda.cudaStreamSynchronize(None)
    counts = (ctypes.c_long * 3)()
    cuda.stub_counts(counts)
    assert list(counts) == [0, 1, 1]
    assert cuda.cudaFree(pointer) == 0
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert free.value == total.value
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(140 << 30)) == 2
