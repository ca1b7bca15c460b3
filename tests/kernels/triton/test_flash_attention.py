"""Attention of lists of tiles.

Numbers by Triton's interpreter and on a GPU, and what its compiler makes for one.
"""

import pytest
import torch

from kernels.attention import select_backend
from kernels.blocks import ANTI, CAUSAL, FULL, Keys, Rows, as_numbers
from parallel.context import METHODS, make_plan
from tests.kernels import test_tiles
from tests.kernels.attention_cases import CASES, NAMES, block_error, errors, merge_error, tile
from tests.kernels.test_tiles import MASKS, attention_by_tiles, inputs, tiles_of, truth
from tests.parallel.context.communicators import softmax, timelines

triton = pytest.importorskip(
    "triton", reason="torch's builds for the CPU bring no Triton; the extra dev has it"
)

from tests.kernels.triton.harness import SHARED, JITFunction, compiled, meta, on_a_gpu  # noqa: E402

BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
"""Relative to the largest value: scores are rounded to the inputs' dtype before the second product.
"""
SPILLED = (24, 3)
"""Most instructions of a loop that read from the stack, and that store there.

What they read stays the same, mostly.
"""


@pytest.fixture(scope="module")
def interpreted(interpreted):
    return interpreted["attention"]


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_all_pairs_in_float64(name, interpreted):
    errors_by_name = interpreted["errors"][name]
    assert max(errors_by_name.values()) < BOUNDS[CASES[name].dtype], errors_by_name
    assert errors_by_name["lse"] < 1e-6  # never rounded


def test_so_do_a_block_alone_and_the_merge(interpreted):
    assert interpreted["block"] < BOUNDS["float32"]
    assert interpreted["merge"] < 1e-6


def test_a_mask_off_by_one_is_seen(interpreted):
    assert all(interpreted["fault"][name] > 0.1 for name in NAMES), interpreted["fault"]


def launches(width, dtype=torch.bfloat16, alone=True):
    """Each kernel continuing, and alone."""
    backend = select_backend("triton", "cuda", dtype)
    q, k, lse = (
        meta(2, 1000, 16, width, dtype=dtype),
        meta(2, 1000, 4, width, dtype=dtype),
        meta(2, 1000, 16).float(),
    )
    tiles = [tile(0, 1000, 0, 1000, CAUSAL)]
    dq, dk, dv = (meta(*x.shape, dtype=torch.float32) for x in (q, k, k))
    backend.tiled.attend_(dq, lse, q, Keys(k, k), tiles, 0.1)
    backend.tiled.add_gradients_((dq, dk, dv), Rows(q, q, q, lse), Keys(k, k), tiles, 0.1)
    if alone:
        backend.backward(Rows(q, q, *backend.forward(q, k, k, True, 0.1)), Keys(k, k), True, 0.1)


def check(capability, width, alone, folder):
    """Compile the launches.

    Assert that they keep to a GPU's registers and shared memory, and return their names.
    """
    all_launches = compiled(capability, lambda: launches(width, alone=alone))
    for launch in all_launches:
        launch.check(capability, folder, spilled=None)
        loops = launch.spilled(folder)
        assert len(loops) == 2, "one without a mask, and one with"
        assert all(
            a <= max_spilled for loop in loops for a, max_spilled in zip(loop, SPILLED, strict=True)
        ), (
            launch.name,
            loops,
        )
        assert ("wgmma" if capability == 90 else "mma") in launch.kernel.asm["ptx"]
    return [launch.name for launch in all_launches]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_every_kernel_keeps_to_a_gpus_registers_and_shared_memory(capability, tmp_path):
    """At the width that most models have."""
    assert check(capability, 128, False, tmp_path) == [
        "forward_kernel",
        "rows_kernel",
        "columns_kernel",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_so_does_every_launch_of_other_widths(capability, width, tmp_path):
    assert len(check(capability, width, True, tmp_path)) == 6


@pytest.mark.parametrize("capability", SHARED)
def test_so_does_the_merge(capability, tmp_path):
    from kernels.triton import pointwise

    out, lse = meta(2, 1000, 16, 128).float(), meta(2, 1000, 16).float()
    (launch,) = compiled(capability, lambda: pointwise.merge_(out, lse, out.bfloat16(), lse))
    launch.check(capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_float32_fits_too(capability):
    for launch in compiled(capability, lambda: launches(256, torch.float32)):
        assert launch.kernel.metadata.shared <= SHARED[capability]


@pytest.mark.slow
def test_blocks_that_are_too_large_are_seen(tmp_path, monkeypatch):
    from kernels.triton import flash_attention

    monkeypatch.setattr(
        flash_attention, "blocking_of", lambda *_: flash_attention.AttentionBlocking(128, 128, 8, 2)
    )
    loops = [
        loop for launch in compiled(90, lambda: launches(128)) for loop in launch.spilled(tmp_path)
    ]
    assert max(stored for _, stored in loops) > 10 * SPILLED[1], loops


def test_work_lists_travel_once_and_hold_every_pair():
    from kernels.triton.work import work_of

    for mask in ("window on both sides and documents", "documents, not causal"):
        tiles, cpu = tiles_of(mask), torch.device("cpu")
        assert work_of(as_numbers(tiles), 64, True, cpu) is work_of(
            as_numbers(tiles_of(mask)), 64, True, cpu
        )
        for by_rows in (True, False):
            blocks, entries = (x.tolist() for x in work_of(as_numbers(tiles), 64, by_rows, cpu))
            pairs = []
            for number, first, last, _ in (blocks[i : i + 4] for i in range(0, len(blocks), 4)):
                for a0, a1, b0, b1, low, high in (
                    entries[6 * i : 6 * i + 6] for i in range(first, last)
                ):
                    rows = range(max(a0, 64 * number), min(a1, 64 * number + 64))
                    pairs.append(
                        sum(max(0, min(b1, x + high + 1) - max(b0, x + low)) for x in rows)
                    )
                    assert pairs[-1], "an entry without a pair"
            assert sum(pairs) == sum(tile.pairs for tile in tiles)


def test_every_tensor_of_a_plan_is_taken(monkeypatch):
    """Tensors of all kinds of plans are contiguous where the kernels add to them.

    See ``_check_contiguous``.
    """
    launched = list[str]()
    monkeypatch.setattr(
        JITFunction,
        "__getitem__",
        lambda kernel, _: lambda *_, **__: launched.append(kernel.__name__),
    )
    for method in METHODS:
        for options in ({"window": (60, 0)}, {"causal": False, "documents": (0, 9, 100, 251)}):
            timelines(
                make_plan(method, seq_len=251, size=4, **options),
                softmax("triton", heads=8, kv_heads=4),
            )
    assert set(launched) == {"forward_kernel", "rows_kernel", "columns_kernel"}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_all_pairs_on_a_gpu(name):
    errors_by_name = errors(CASES[name], "cuda")
    assert max(errors_by_name.values()) < BOUNDS[CASES[name].dtype], errors_by_name


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_many_blocks_equal_the_naive_form_on_a_gpu(mask, monkeypatch):
    backend = select_backend("triton", "cuda", torch.bfloat16)
    monkeypatch.setattr(test_tiles, "select_backend", lambda *_: backend)
    tensors = tuple(x.cuda() for x in inputs(torch.bfloat16))
    for got, want in zip(
        attention_by_tiles("triton", tensors, tiles_of(mask)), truth(tensors, mask), strict=True
    ):
        assert ((got.double() - want).norm() / want.norm()).item() < 1e-2


@pytest.mark.gpu
@on_a_gpu
def test_blocks_and_the_merge_are_right_on_a_gpu():
    assert max(block_error(kind, "cuda") for kind in (FULL, CAUSAL, ANTI)) < BOUNDS["float32"]
    assert merge_error("cuda") < 1e-6
