"""Training over context-parallel ranks equals training in one process with plain SDPA, on the default data."""

from pathlib import Path

import pytest

from kernels.attention import CAUSAL, FULL
from parallel.context import METHODS, tiles
from tests.pretraining import differences, on_rank, pretrain
from tests.ranks import run_ranks

BOUND = 1e-5
ITERATIONS = ("--train-iters", "20")


@pytest.fixture(scope="module")
def one_process(default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The reference: one process, no context parallelism, plain SDPA."""
    return pretrain(
        1, default_data, tmp_path_factory.mktemp("one") / "run", *ITERATIONS, "--context-parallel-method", "none"
    )


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_twenty_iterations_equal_one_process(
    method: str, cp: int, default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    flags = (*ITERATIONS, "--context-parallel-method", method, "--context-parallel-size", str(cp))
    assert differences(pretrain(cp, default_data, tmp_path / "run", *flags), one_process) <= BOUND


def test_data_parallel_and_context_parallel_together_equal_one_process(
    default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    flags = (*ITERATIONS, "--context-parallel-method", "zigzag", "--context-parallel-size", "2")
    assert differences(pretrain(4, default_data, tmp_path / "run", *flags), one_process) <= BOUND


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (2, 2), (4, 1)])
def test_tensor_parallel_equals_one_process(
    tp: int, cp: int, default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    """Two key-value heads: on tp 4 each is shared by two ranks."""
    flags = (*ITERATIONS, "--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp))
    got = pretrain(tp * cp, default_data, tmp_path / "run", *flags)
    assert differences(got, one_process) <= BOUND
    assert got[-1]["validation_loss"] == pytest.approx(one_process[-1]["validation_loss"], rel=BOUND)


@pytest.mark.parametrize(
    ("strategy", "inner", "copies"),
    [
        ("ddp", "tensor-model", 1),
        ("legacy_ddp", "tensor-model", 1),
        ("zero1", "context", 1),
        ("zero2", "context", 1),
        ("fsdp", "context", 2),
    ],
)
def test_data_parallel_strategies_equal_one_process(
    strategy: str, inner: str, copies: int, default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    """Two micro-batches a step, on two data-parallel ranks of two processes each; zero3 is the default elsewhere."""
    flags = (*ITERATIONS, "--data-parallel-sharding-strategy", strategy, f"--{inner}-parallel-size", "2")
    flags += ("--num-distributed-optimizer-instances", str(copies))
    got = pretrain(4, default_data, tmp_path / "run", *flags, "--eval-interval", "10")
    assert differences(got, one_process) <= BOUND
    assert got[-1]["validation_loss"] == pytest.approx(one_process[-1]["validation_loss"], rel=BOUND)


@pytest.mark.parametrize("method", METHODS)
def test_a_length_that_does_not_divide_is_padded_never_cut(method: str, default_data: Path, tmp_path: Path) -> None:
    flags = ("--train-iters", "5", "--seq-length", "251")
    want = pretrain(1, default_data, tmp_path / "one", *flags, "--context-parallel-method", "none")
    split = ("--context-parallel-method", method, "--context-parallel-size", "4")
    got = pretrain(4, default_data, tmp_path / "four", *flags, *split)
    assert differences(got, want) <= BOUND
    assert got[-1]["consumed_tokens"] == 5 * 4 * 251


def without_the_shift(rank: int, world_size: int, arguments: list[str]) -> None:
    """Train with the diagonal kept in every round of striping, where the later ranks' tokens must not be seen."""
    tiles._compare = lambda rows, columns, shift: [(0, rows, 0, columns, CAUSAL if shift < columns else FULL)]
    on_rank(rank, world_size, arguments)


def test_dropping_the_shift_of_the_striped_mask_makes_parity_fail(
    default_data: Path, one_process: list[dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.pretraining.run_ranks", lambda _, world_size, flags: run_ranks(without_the_shift, world_size, flags)
    )
    flags = (*ITERATIONS, "--context-parallel-method", "striped", "--context-parallel-size", "2")
    assert differences(pretrain(2, default_data, tmp_path / "run", *flags), one_process) > 10 * BOUND


@pytest.mark.parametrize("granularity", ["full", "attention_boundary"])
def test_recompute_changes_nothing_under_tensor_and_context_parallelism(
    granularity: str, default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    flags = (
        "--tensor-model-parallel-size",
        "2",
        "--context-parallel-size",
        "2",
        "--recompute-granularity",
        granularity,
    )
    assert differences(pretrain(4, default_data, tmp_path / "run", *ITERATIONS, *flags), one_process) <= BOUND
