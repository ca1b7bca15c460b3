"""The fused kernel.

Numbers through Triton's interpreter on the CPU, and what its compiler makes of it for a GPU.
"""

import math

import pytest
import torch

from tests.kernels.linear_cases import (
    BOUND,
    CASES,
    CUT,
    CUT_FAR,
    FAR,
    INTERPRETED,
    NAMES,
    Case,
    errors,
    within_bounds,
)

triton = pytest.importorskip(
    "triton", reason="torch's builds for the CPU bring no Triton; the extra dev has it"
)

from tests.kernels.triton.harness import (  # noqa: E402
    SHARED,
    Launched,
    compiled,
    interpret,
    meta,
    on_a_gpu,
)

BOUNDS = 7
"""Place of the kernel's argument ``bounds``."""


@pytest.fixture(scope="module")
def interpreted(interpreted):
    """The errors of all cases."""
    return interpreted["linear"]


@pytest.mark.parametrize("index", range(len(INTERPRETED)))
def test_kernel_equals_the_reference(index, interpreted):
    errors_by_name = interpreted["errors"][index]
    assert within_bounds(INTERPRETED[index], errors_by_name), (INTERPRETED[index], errors_by_name)


@pytest.mark.slow
def test_kernel_equals_the_reference_far_away():
    for case, errors_by_name in zip(
        FAR + CUT_FAR, interpret("far", timeout=1200)["far"]["errors"], strict=True
    ):
        assert within_bounds(case, errors_by_name), (case, errors_by_name)


@pytest.mark.parametrize("fault", ["decay", "carried", "documents"])
def test_the_bound_sees_a_fault(fault, interpreted):
    errors_by_name = interpreted["faults"][fault]
    assert all(errors_by_name[name] > 10 * BOUND for name in NAMES), errors_by_name


def test_a_wide_output_is_not_rounded(interpreted):
    widths = interpreted["widths"]
    assert widths["torch.float32"] < 0.9 * widths["torch.bfloat16"]


def test_a_state_without_outputs_is_the_same(interpreted):
    assert interpreted["alone"] == [True, True]


def forward(width, value_width, cu_seqlens=None, *, size=(2, 1000, 8)):
    from kernels.triton.linear_attention import scan

    q, v = meta(*size, width), meta(*size, value_width)
    scan(q, q, v, [-0.1] * size[-1], cu_seqlens=cu_seqlens)


def steps(width, value_width, heads, cu_seqlens):
    """Forward and backward, of one process and of one of several: 14 scans.

    One of several takes and passes on a state.
    """
    from kernels.linear_attention import backward
    from kernels.triton.linear_attention import scan

    decays, state = [-0.1] * heads, meta(2, heads, width, value_width, dtype=torch.float32)
    q, v = meta(2, 1000, heads, width), meta(2, 1000, heads, value_width)
    for entering in (None, state):
        scan(q, q, v, decays, entering, cu_seqlens)
        backward(scan, v, entering, q, q, v, decays, entering, cu_seqlens)
    scan(q, q, v, decays, None, cu_seqlens, accum_out=True)  # as StateExecutor
    scan(None, q, v, decays, None, cu_seqlens)
    scan(None, q, v, decays, None, cu_seqlens, reverse=True)
    scan(v, v, q, decays, state.transpose(-1, -2), cu_seqlens)
    for args in ((v, v, q), (q, q, v)):
        scan(*args, decays, None, cu_seqlens, reverse=True, accum_out=True)


@pytest.mark.parametrize(
    ("capability", "width"),
    [
        (90, 128),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((80, 128), (80, 256), (90, 256))),
    ],
)
def test_every_kernel_keeps_to_a_gpus_registers_and_shared_memory(capability, width, tmp_path):
    """A sequence of 131,072 tokens.

    Width 256 is the first TransNormer layer's, whose LRPE doubles queries and keys.
    """
    added, carried, launched = compiled(
        capability, lambda: forward(width, 128, size=(1, 131072, 16))
    )
    assert math.prod(added.grid) == math.prod(launched.grid) == 512, "for 132 multiprocessors"
    assert carried.arguments[0].shape == (1, 16, 8, width, 128), "states of segments"
    assert [launch.name for launch in (added, carried, launched)] == [
        "scan_kernel",
        "carry_kernel",
        "scan_kernel",
    ]
    for launch in (added, carried, launched):
        launch.check(capability, tmp_path, 0 if width <= 128 else 32)
    assert ("wgmma" if capability == 90 and width == 128 else "mma") in launched.kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("width", "value_width"), [(16, 16), (64, 64), (128, 64), (128, 128), (256, 128)]
)
def test_so_does_every_launch(capability, width, value_width, tmp_path, monkeypatch):
    from kernels.triton import linear_attention as fused

    launched = list[Launched]()
    for parts, heads, cu_seqlens in (
        (1, 8, None),
        (1, 16, (0, 100, 1000)),
        (4, 16, (0, 100, 1000)),
    ):
        monkeypatch.setattr(fused, "parts_of", lambda _, parts=parts: parts)
        launched += compiled(
            capability, lambda args=(heads, cu_seqlens): steps(width, value_width, *args)
        )
    kernels = {id(launch.kernel): launch for launch in launched}
    assert len(launched) == 2 * 14 + 12 * 3 + 2 * 2, (
        "in segments three for a scan, two without outputs"
    )
    assert len(kernels) > 20, "one a set of flags and of arguments that Triton tells apart"
    for launch in kernels.values():
        launch.check(capability, tmp_path, 0 if max(width, value_width) <= 128 else 32)


@pytest.mark.slow
def test_blocks_that_are_too_large_are_seen(tmp_path, monkeypatch):
    from kernels.triton import linear_attention as fused

    monkeypatch.setattr(fused, "parts_of", lambda _: 1)
    large = fused.ScanBlocking(64, 256, 128, num_warps=4, num_stages=2)
    monkeypatch.setattr(fused, "blocking_of", lambda *_: large)
    (launched,) = compiled(80, lambda: forward(256, 128))
    assert launched.used(tmp_path)["STACK"] > 1000
    monkeypatch.setattr(fused, "blocking_of", lambda *_: large._replace(C=128, num_stages=4))
    assert compiled(80, lambda: forward(256, 128))[-1].used(tmp_path)["shared"] > SHARED[80]


def test_documents_travel_to_the_device_once():
    """Not in every layer, whose host would wait for it."""
    for cu_seqlens in (None, (0, 100, 1000)):
        launched = compiled(
            90, lambda args=cu_seqlens: [forward(16, 16, cu_seqlens=args) for _ in range(2)]
        )
        first, *others = (
            launch.arguments[BOUNDS] for launch in launched if launch.name == "scan_kernel"
        )
        assert len(others) == 3
        assert all(other is first for other in others)


@pytest.mark.parametrize(
    ("programs", "parts"), [(1, 528), (64, 8), (105, 5), (106, 1), (132, 1), (133, 3), (600, 1)]
)
def test_what_fills_a_gpu_is_not_cut(programs, parts):
    from kernels.triton.linear_attention import parts_of

    assert parts_of(programs) == parts


def test_segments_are_whole_chunks_of_one_document():
    from kernels.triton.linear_attention import segments_of

    bounds, steps = segments_of((0, 1, 65, 1000, 1001), 5, 64, torch.device("cpu"))
    assert bounds.tolist() == [
        [0, 1, 65, 257, 449, 641, 833, 1000, 1001],
        [0, -1, 1, 2, 3, 4, 5, 6, -1],
    ]
    assert steps.tolist() == [[1, 192, 192, 192, 192, 167, 1, 0], [0, 1, 0, 0, 0, 0, 1, 0]]


LONG = [
    Case(4097, "bfloat16", cu_seqlens, programs=programs)
    for cu_seqlens in (None, (0, 1000, 4097))
    for programs in (1, 528)
]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("case", [*CASES, *CUT, *LONG])
def test_kernel_equals_the_reference_on_a_gpu(case):
    errors_by_name = errors(case, "triton", "cuda")
    if case.dtype == "float32":
        errors_by_name = {name: error / 2 for name, error in errors_by_name.items()}
    assert within_bounds(case, errors_by_name), errors_by_name


def test_without_an_interpreter_the_cpu_is_refused():
    from kernels.ops import linear_attention

    x = torch.zeros(1, 4, 1, 16)
    with pytest.raises(
        ValueError, match="attention_backend triton needs a cuda device, but this one is cpu"
    ):
        linear_attention(x, x, x, [math.log(0.5)], backend="triton")
