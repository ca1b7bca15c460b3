"""The fused kernel: numbers through Triton's interpreter on the CPU, and what its compiler makes of it for a GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.linear_cases import CASES, FAR, NAMES, Case, errors, naive_errors
from tests.starts import PATIENCE

triton = pytest.importorskip("triton", reason="torch's builds for the CPU bring no Triton; requirements-dev.txt has it")

ROOT = Path(__file__).parents[3]
BOUND = 1e-5
POINTERS = {"q": 0, "k": 0, "v": 0, "out": 0, "state": 1, "final": 1, "rates": 1, "bounds": 2}


def interpret(*arguments: str, timeout: float = PATIENCE) -> dict[str, Any]:
    """What the cases print in a process whose Triton interprets."""
    if triton.__version__ < "3.7":
        pytest.skip("the interpreter of Triton before 3.7 cannot loop as often as a tensor says under NumPy 2.4")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.linear_cases", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """The errors of all cases."""
    return interpret()


def within_bounds(case: Case, found: dict[str, float]) -> bool:
    if case.dtype == "float32":
        return max(found.values()) <= BOUND
    naive = naive_errors(case)
    return all(found[name] <= 2 * naive[name] for name in NAMES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{case.length}-{case.dtype}" for case in CASES])
def test_kernel_equals_the_reference(index: int, interpreted: dict[str, Any]) -> None:
    found = interpreted["errors"][index]
    assert within_bounds(CASES[index], found), found


@pytest.mark.slow
def test_kernel_equals_the_reference_far_away() -> None:
    for case, found in zip(FAR, interpret("far", timeout=900)["errors"], strict=True):
        assert within_bounds(case, found), (case, found)


def test_the_bound_sees_a_wrong_decay(interpreted: dict[str, Any]) -> None:
    assert all(interpreted["fault"][name] > 10 * BOUND for name in NAMES), interpreted["fault"]


def test_a_wide_output_is_not_rounded(interpreted: dict[str, Any]) -> None:
    widths = interpreted["widths"]
    assert widths["torch.float32"] < 0.9 * widths["torch.bfloat16"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test compiles stays in the home folder, or comes from there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(capability: int, width: int, value_width: int, dtype: torch.dtype, **flags: bool) -> Any:
    """The kernel as a GPU of that capability would get it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.triton.linear_attention import blocking_of, scan_kernel

    tile = blocking_of(width, value_width, dtype)
    constants = {
        "C": tile.C,
        "BLOCK_D": tile.BLOCK_D,
        "BLOCK_E": tile.BLOCK_E,
        "REVERSE": False,
        "HAS_STATE": True,
        "OUTPUT": True,
        "WIDEN": False,
        "PRECISION": "ieee",
        **flags,
    }
    kinds = ["*bf16" if dtype == torch.bfloat16 else "*fp32", "*fp32", "*i32"]
    signature, aligned = {}, {}
    for place, name in enumerate(scan_kernel.arg_names):
        signature[name] = "constexpr" if name in constants else kinds[POINTERS[name]] if name in POINTERS else "i32"
        if signature[name] != "constexpr" and name not in ("documents", "state_row", "state_column"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(scan_kernel, signature, constants, aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(("capability", "shared"), [(80, 163 << 10), (90, 227 << 10)])
@pytest.mark.parametrize(("width", "value_width"), [(128, 128), (256, 128)])
def test_compiles_within_the_shared_memory_of_a_gpu(capability: int, shared: int, width: int, value_width: int) -> None:
    """Width 256 is that of the first TransNormer layer, whose LRPE doubles its queries and keys."""
    kernel = compiled(capability, width, value_width, torch.bfloat16, REVERSE=width == 256)
    assert kernel.metadata.shared <= shared
    assert ("wgmma" if capability == 90 and width == 128 else "mma") in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_keeps_the_state_in_registers(capability: int, width: int, tmp_path: Path) -> None:
    """What ptxas reports: bytes that do not fit the registers, per thread."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for flags in ({}, {"REVERSE": True}, {"OUTPUT": False}):
        ptx = compiled(capability, width, min(width, 128), torch.bfloat16, **flags).asm["ptx"]
        target = f"sm_{capability}{'a' if capability == 90 else ''}"
        command = [str(ptxas), "-v", f"-arch={target}", "-o", str(tmp_path / "out"), "/dev/stdin"]
        report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
        spilled = int(report.split(" bytes spill stores")[0].rsplit(" ", 1)[1])
        assert spilled <= 32, report


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it")
@pytest.mark.parametrize("case", [*CASES, Case(4097, "bfloat16"), Case(4097, "bfloat16", (0, 1000, 4097))])
def test_kernel_equals_the_reference_on_a_gpu(case: Case) -> None:

    found = errors(case, "triton", "cuda")
    naive = dict.fromkeys(NAMES, BOUND) if case.dtype == "float32" else naive_errors(case)
    assert all(found[name] <= 2 * naive[name] for name in NAMES), (found, naive)


def test_without_an_interpreter_the_cpu_is_refused() -> None:
    from kernels.linear_attention import linear_attention

    x = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ValueError, match="attention_backend triton needs a cuda device and this one is cpu"):
        linear_attention(x, x, x, [math.log(0.5)], backend="triton")
