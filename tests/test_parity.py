"""Training over context-parallel ranks equals training in one process with plain SDPA, on the default data."""

import pytest

from kernels.attention import CAUSAL, FULL
from parallel.context import tiles
from runtime.ranks import run_ranks
from tests.pretraining import differences, on_rank, pretrain
from tools.common.cases import cases_of

BOUND = 1e-5
ALONE = ("--context-parallel-method", "none")
METHODS = ("ring", "striped", "zigzag", "allgather")
CASES = """
    cp=1|2|4 striped|zigzag
    cp=2 ring|allgather
    cp=4 wallfacer team=2 p2p_intra
    cp=2 tp=2 zigzag degree=2
    cp=4 double_ring per_node=2 degree=2 attention_boundary --context-parallel-layout striped
    cp=2 dp=2 ulysses|zigzag
    tp=2 cp=1|2
    tp=2 cp=2 full
    pp=2 dp=2 legacy_ddp --eval-interval 3
    pp=2 tp=2 attention_boundary GPipe --eval-interval 3
    dp=2 tp=2 ddp|legacy_ddp --eval-interval 3
    dp=2 cp=2 zero1|zero2 --eval-interval 3
    dp=2 cp=2 fsdp copies=2 --eval-interval 3
"""
SLOW = """
    cp=1|4 ring|allgather
    cp=4 ulysses
    tp=4
    tp=2 cp=2 attention_boundary
"""
PADDED = [pytest.param(method, marks=pytest.mark.slow if method in ("ring", "allgather") else ()) for method in METHODS]
ODD = ("--train-iters", "3", "--seq-length", "251")


@pytest.fixture(scope="module", params=["4", pytest.param("20", marks=pytest.mark.slow)])
def iterations(request):
    """Four of them see what twenty do, whose rounding has longer to grow."""
    return ("--train-iters", request.param)


@pytest.fixture(scope="module")
def one_process(iterations, default_data, tmp_path_factory):
    """The reference: one process, no context parallelism, plain SDPA."""
    return pretrain(1, default_data, tmp_path_factory.mktemp("one") / "run", *iterations, *ALONE)


@pytest.fixture(scope="module")
def odd_length(default_data, tmp_path_factory):
    return pretrain(1, default_data, tmp_path_factory.mktemp("odd") / "run", *ODD, *ALONE)


@pytest.mark.parametrize(
    "case",
    [*cases_of(CASES), *(pytest.param(case, marks=pytest.mark.slow) for case in cases_of(SLOW))],
    ids=lambda case: " ".join([case.title.replace(" ", ""), *case.recompute.split(), *case.more]),
)
def test_every_iteration_and_the_validation_equal_one_process(case, iterations, default_data, one_process, tmp_path):
    """Gradients are clipped, since their norm is above 1; two key-value heads: on tp 4 each is shared by two ranks."""
    got = pretrain(case.ranks, default_data, tmp_path / "run", *iterations, *case.flags)
    assert differences(got, one_process) <= BOUND
    assert got[-1]["validation_loss"] == pytest.approx(one_process[-1]["validation_loss"], rel=BOUND)


@pytest.mark.parametrize("method", PADDED)
def test_a_length_that_does_not_divide_is_padded_never_cut(method, default_data, odd_length, tmp_path):
    flags = (*ODD, "--context-parallel-method", method, "--context-parallel-size", "4")
    got = pretrain(4, default_data, tmp_path / "run", *flags)
    assert differences(got, odd_length) <= BOUND
    assert got[-1]["consumed_tokens"] == 3 * 4 * 251


def without_the_shift(rank, world_size, arguments):
    """Train with the diagonal kept in every round of striping, where the later ranks' tokens must not be seen."""
    tiles._compare = lambda rows, columns, shift, q0, k0: [
        (q0, q0 + rows, k0, k0 + columns, CAUSAL if shift < columns else FULL)
    ]
    on_rank(rank, world_size, arguments)


def test_dropping_the_shift_of_the_striped_mask_makes_parity_fail(
    iterations, default_data, one_process, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "tests.pretraining.run_ranks", lambda _, world_size, flags: run_ranks(without_the_shift, world_size, flags)
    )
    flags = (*iterations, "--context-parallel-method", "striped", "--context-parallel-size", "2")
    assert differences(pretrain(2, default_data, tmp_path / "run", *flags), one_process) > 10 * BOUND
