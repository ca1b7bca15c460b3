"""The delta rule's kernels.

Numbers through Triton's interpreter on the CPU, and what its compiler makes of them.
"""

import pytest
import torch

from tests.kernels.delta.cases import BOUND, TRITON, TRITON_ON_A_GPU, errors_of_triton

triton = pytest.importorskip(
    "triton", reason="torch's builds for the CPU bring no Triton; the extra dev has it"
)

from tests.kernels.triton.harness import SHARED, compiled, meta, on_a_gpu  # noqa: E402

BOUNDS = {"float32": BOUND, "bfloat16": 1e-2}
FORWARD = ["solve_kernel", "states_kernel", "output_kernel"]
BACKWARD = [
    *FORWARD[:2],
    "read_back_kernel",
    "states_back_kernel",
    "changes_back_kernel",
    "keys_back_kernel",
]


@pytest.fixture(scope="module")
def interpreted(interpreted):
    """Errors of all cases, of a wide scan, and with faults."""
    return interpreted["delta"]


@pytest.mark.parametrize("index", range(len(TRITON)))
def test_kernels_equal_the_recurrence(index, interpreted):
    errors_by_name = interpreted["errors"][index]
    assert max(errors_by_name.values()) <= BOUNDS[TRITON[index].dtype], (
        TRITON[index],
        errors_by_name,
    )


def test_slabs_and_the_map_of_any_state(interpreted):
    slabs, map_errors = interpreted["wide"]
    assert slabs == 4, "of one chunk each, and the state after the last"
    assert max(*map_errors, *interpreted["slabs"].values()) <= BOUND


def test_faults_show(interpreted):
    assert interpreted["faults"]["documents"] > 0.05
    assert interpreted["faults"]["differences"] > 10 * BOUND


def steps(width, values, dtype, columns=0):
    """Forward and backward of two value heads to a key head.

    With more columns, of a scan of any state alone.
    """
    from kernels.triton import delta, delta_backward

    q, v = meta(1, 1000, 2, width, dtype=dtype), meta(1, 1000, 4, values, dtype=dtype)
    g = meta(1, 1000, 4, dtype=torch.float32)
    inputs, state = (q, q, v, g, g), meta(1, 4, width, values + columns, dtype=torch.float32)
    delta.forward(
        inputs,
        state,
        meta(1, 1000, 4, values + columns, dtype=torch.float32),
        torch.empty_like(state),
    )
    if not columns:
        gradients = tuple(torch.empty_like(x, dtype=torch.float32) for x in inputs)
        delta_backward.backward(inputs, v, state, torch.empty_like(state), gradients)


def check(capability, launched, allowed, folder):
    """Assert that kernels keep to a GPU's shared memory and spill little.

    They multiply by its matrix units.
    """
    for launch in {id(launch.kernel): launch for launch in launched}.values():
        launch.check(capability, folder, allowed.get(launch.name, 64))
        assert "mma" in launch.kernel.asm["ptx"], launch.name


SPILLED = {80: {"solve_kernel": 288, "changes_back_kernel": 288}, 90: {}}
"""Bytes that a thread may spill in bfloat16 beyond 64.

The three products of TF32 in the inverse hold whole chunks.
"""


def test_a_scan_of_any_state_compiles_for_a_gpu(tmp_path):
    launched = compiled(90, lambda: steps(16, 16, torch.bfloat16, columns=16))
    assert [launch.name for launch in launched] == FORWARD
    check(90, launched, SPILLED[90], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_keeps_to_a_gpus_registers_and_shared_memory(capability, tmp_path):
    launched = compiled(capability, lambda: steps(128, 128, torch.bfloat16))
    assert [launch.name for launch in launched] == FORWARD + BACKWARD
    check(capability, launched, SPILLED[capability], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("width", "values"), [(16, 24), (64, 64), (96, 192), (128, 256), (256, 256)]
)
def test_so_do_other_widths_and_a_wide_scan(capability, width, values, tmp_path):
    launched = compiled(capability, lambda: steps(width, values, torch.bfloat16))
    launched += compiled(capability, lambda: steps(width, values, torch.bfloat16, columns=width))
    check(capability, launched, SPILLED[capability], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("width", "values"), [(128, 128), (96, 192), (256, 256)])
def test_float32_fits_shared_memory(capability, width, values, tmp_path):
    """It is for exact runs: each product is three, whose operands spill."""
    max_bytes = dict.fromkeys(FORWARD + BACKWARD, 1280)
    check(
        capability,
        compiled(capability, lambda: steps(width, values, torch.float32)),
        max_bytes,
        tmp_path,
    )


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("case", TRITON_ON_A_GPU)
def test_kernels_equal_the_recurrence_on_a_gpu(case):
    errors_by_name = errors_of_triton(case, "cuda")
    assert max(errors_by_name.values()) <= BOUNDS[case.dtype], errors_by_name
