"""Triton without a GPU.

Numbers by its interpreter, in a process of its own, and what its compiler makes for a GPU.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from kernels.triton import flash_attention
from tests.starts import PATIENCE, ROOT, ended

SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory of a block, and of a thread its registers and STACK.

STACK is in bytes; a thread spills to it.
"""
on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def interpret(*reports, timeout=PATIENCE):
    """Reports of ``interpreted.py`` in a process whose Triton interprets, by name."""
    if triton.__version__ < "3.7":
        pytest.skip(
            "the interpreter of Triton before 3.7 cannot loop as often as a tensor says under "
            "NumPy 2.4"
        )
    command = [sys.executable, "-m", "tests.kernels.triton.interpreted", *reports]
    done = ended(command, timeout=timeout, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


class Launched(NamedTuple):
    """A launch: its arguments, and the kernel that a GPU would get for it."""

    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    blocking: dict[str, Any]
    kernel: Any

    def used(self, folder):
        """Bytes of shared memory of a block, and of a thread its registers and STACK.

        To the latter's bytes it spills.
        """
        dump = self._said(folder, "--dump-resource-usage")
        usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
        return {"shared": self.kernel.metadata.shared, **usage}

    def check(self, capability, folder, spilled=0):
        """Assert that it keeps to a GPU's registers and shared memory.

        It spills at most so many bytes; None stands for any.
        """
        used = self.used(folder)
        assert used["shared"] <= SHARED[capability], self.blocking
        assert used["REG"] <= 255
        assert spilled is None or used["STACK"] + used["LOCAL"] <= spilled, (
            self.name,
            used,
            self.blocking,
        )

    def spilled(self, folder):
        """Instructions that load from the stack and store there.

        They are counted in each innermost loop with matrix products.
        """
        instructions = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", self._said(folder, "-sass"))
        lines = [(int(place, 16), line) for place, line in instructions]
        jumps = [
            (int(to[1], 16), place)
            for place, line in lines
            if (to := re.search(r"BRA.* 0x([0-9a-f]+)", line))
        ]
        loops = [jump for jump in jumps if jump[0] < jump[1]]
        inner = [
            a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)
        ]
        bodies = [
            " ".join(line for place, line in lines if first <= place <= last)
            for first, last in inner
        ]
        return [(body.count("LDL"), body.count("STL")) for body in bodies if "MMA" in body]

    def _said(self, folder, option):
        (cubin := folder / "cubin").write_bytes(self.kernel.asm["cubin"])
        command = [str(PROGRAMS / "cuobjdump"), option, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled(capability, code):
    """Run code on tensors without memory.

    Each launch is compiled for a capability, with its own arguments.
    """
    launches = list[Launched]()
    stub = SimpleNamespace(
        get_current_device=lambda: capability,  # Triton keeps a target for each
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )

    def compiling(kernel, grid):
        return lambda *args, **named: launches.append(
            Launched(kernel.__name__, grid, args, named, kernel.warmup(*args, grid=grid, **named))
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", stub)
        patch.setattr(JITFunction, "__getitem__", compiling)
        patch.setattr(flash_attention, "capability", lambda device: capability)
        code()
    return launches
