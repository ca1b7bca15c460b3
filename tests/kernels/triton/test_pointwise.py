"""The rotation and the gate in one launch.

Numbers by Triton's interpreter, and what its compiler makes for a GPU.
"""

import pytest
import torch

from tests.kernels.pointwise_cases import DTYPES, gate_errors, rotary_error

triton = pytest.importorskip(
    "triton", reason="torch's builds for the CPU bring no Triton; the extra dev has it"
)

from kernels.triton import pointwise  # noqa: E402
from tests.kernels.triton.harness import SHARED, compiled, meta, on_a_gpu  # noqa: E402

ROUNDED = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}
"""Relative to the largest value; 16 bits are rounded once."""


@pytest.fixture(scope="module")
def interpreted(interpreted):
    return interpreted["pointwise"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rotary", "gate", "gelu"])
def test_in_one_launch_as_in_float64(name, dtype, interpreted):
    cut_off = 2 if dtype == "bfloat16" else 1  # the interpreter does not round to it
    assert interpreted[f"{name} {dtype}"] < cut_off * ROUNDED[dtype]


def test_gate_and_up_in_each_others_place_are_seen(interpreted):
    assert interpreted["faulty"] > 0.1


@pytest.mark.parametrize("capability", SHARED)
def test_a_rotation_compiles_for_a_gpu(capability, tmp_path):
    x, angles = (
        meta(1, 1000, 16, 100).transpose(1, 2).transpose(1, 2),
        meta(1000, 1, 50, dtype=torch.float32),
    )
    for launch in compiled(
        capability, lambda: [pointwise.rotate(x, angles, angles, back) for back in (False, True)]
    ):
        used = launch.used(tmp_path)
        assert used["STACK"] == 0
        assert used["REG"] <= 64, "fewer blocks than keep memory busy"
        assert launch.grid == (1000,)


@pytest.mark.parametrize("capability", SHARED)
def test_a_gate_moves_16_bytes_at_once_on_a_gpu(capability):
    gate = meta(2, 1000, 96)
    forward, backward = compiled(
        capability,
        lambda: [pointwise.gated(gate, gate), pointwise.gated_backward(gate, gate, gate)],
    )
    for launch, loads, stores in ((forward, 2, 1), (backward, 3, 2)):
        assert launch.grid == (188,)
        code = launch.kernel.asm["ptx"]
        assert (code.count("ld.global.v4.b32"), code.count("st.global.v4.b32")) == (loads, stores)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 64, 128, 256])
def test_a_rotation_is_right_on_a_gpu(width, dtype):
    assert rotary_error(DTYPES[dtype], "cuda", width) < ROUNDED[dtype]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_so_is_a_gate(activation, dtype):
    assert max(gate_errors(DTYPES[dtype], "cuda", activation=activation)) < ROUNDED[dtype]
