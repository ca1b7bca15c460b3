"""Training over context-parallel ranks equals training in one process with plain SDPA, on the default data."""

from pathlib import Path

import pytest

from kernels.attention import CAUSAL, FULL
from parallel.context import tiles
from runtime.ranks import run_ranks
from tests.pretraining import differences, on_rank, pretrain

BOUND = 1e-5
ALONE = ("--context-parallel-method", "none")
METHODS = ("ring", "striped", "zigzag", "allgather")
MESHES = [
    pytest.param(method, cp, marks=pytest.mark.slow if method in ("ring", "allgather") and cp != 2 else ())
    for method in METHODS
    for cp in (1, 2, 4)
]
PADDED = [pytest.param(method, marks=pytest.mark.slow if method in ("ring", "allgather") else ()) for method in METHODS]
ODD = ("--train-iters", "3", "--seq-length", "251")


@pytest.fixture(scope="module", params=["4", pytest.param("20", marks=pytest.mark.slow)])
def iterations(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Four of them see what twenty do, whose rounding has longer to grow."""
    return ("--train-iters", request.param)


@pytest.fixture(scope="module")
def one_process(
    iterations: tuple[str, str], default_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    """The reference: one process, no context parallelism, plain SDPA."""
    return pretrain(1, default_data, tmp_path_factory.mktemp("one") / "run", *iterations, *ALONE)


@pytest.fixture(scope="module")
def odd_length(default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return pretrain(1, default_data, tmp_path_factory.mktemp("odd") / "run", *ODD, *ALONE)


@pytest.mark.parametrize(("method", "cp"), MESHES)
def test_every_iteration_equals_one_process(
    method: str, cp: int, iterations: tuple[str, str], default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    flags = (*iterations, "--context-parallel-method", method, "--context-parallel-size", str(cp))
    assert differences(pretrain(cp, default_data, tmp_path / "run", *flags), one_process) <= BOUND


@pytest.mark.parametrize(
    "flags",
    [
        "wallfacer --context-parallel-size 4 --context-parallel-team-size 2 --context-parallel-placement p2p_intra",
        pytest.param("ulysses --context-parallel-size 4", marks=pytest.mark.slow),
        "zigzag --context-parallel-size 2 --ulysses-degree 2 --tensor-model-parallel-size 2",
        "double_ring --context-parallel-size 4 --context-parallel-ranks-per-node 2 --ulysses-degree 2 "
        "--recompute-granularity attention_boundary --context-parallel-layout striped",
        "ulysses --context-parallel-size 2",
    ],
)
def test_teams_heads_and_nodes_equal_one_process(
    flags: str, iterations: tuple[str, str], default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    """On four processes, the last as two data-parallel pairs that make their groups at once; two key-value heads."""
    got = pretrain(4, default_data, tmp_path / "run", *iterations, "--context-parallel-method", *flags.split())
    assert differences(got, one_process) <= BOUND


def test_data_parallel_and_context_parallel_together_equal_one_process(
    iterations: tuple[str, str], default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    flags = (*iterations, "--context-parallel-method", "zigzag", "--context-parallel-size", "2")
    assert differences(pretrain(4, default_data, tmp_path / "run", *flags), one_process) <= BOUND


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_tensor_parallel_equals_one_process(
    tp: int, cp: int, iterations: tuple[str, str], default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    """Two key-value heads: on tp 4 each is shared by two ranks."""
    flags = (*iterations, "--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp))
    got = pretrain(tp * cp, default_data, tmp_path / "run", *flags)
    assert differences(got, one_process) <= BOUND
    assert got[-1]["validation_loss"] == pytest.approx(one_process[-1]["validation_loss"], rel=BOUND)


@pytest.mark.parametrize(
    "flags",
    [
        "--data-parallel-sharding-strategy legacy_ddp",
        "--tensor-model-parallel-size 2 --recompute-granularity attention_boundary --pipeline-schedule GPipe",
    ],
)
def test_pipelines_equal_one_process(
    flags: str, iterations: tuple[str, str], default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    """Two stages of one layer each, validated in between; gradients are clipped, since their norm is above 1."""
    flags = f"--pipeline-model-parallel-size 2 --eval-interval 3 {flags}"
    got = pretrain(4, default_data, tmp_path / "run", *iterations, *flags.split())
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
    strategy: str,
    inner: str,
    copies: int,
    iterations: tuple[str, str],
    default_data: Path,
    one_process: list[dict],
    tmp_path: Path,
) -> None:
    """Two micro-batches a step, on two data-parallel ranks of two processes each; zero3 is the default elsewhere."""
    flags = (*iterations, "--data-parallel-sharding-strategy", strategy, f"--{inner}-parallel-size", "2")
    flags += ("--num-distributed-optimizer-instances", str(copies))
    got = pretrain(4, default_data, tmp_path / "run", *flags, "--eval-interval", "3")
    assert differences(got, one_process) <= BOUND
    assert got[-1]["validation_loss"] == pytest.approx(one_process[-1]["validation_loss"], rel=BOUND)


@pytest.mark.parametrize("method", PADDED)
def test_a_length_that_does_not_divide_is_padded_never_cut(
    method: str, default_data: Path, odd_length: list[dict], tmp_path: Path
) -> None:
    flags = (*ODD, "--context-parallel-method", method, "--context-parallel-size", "4")
    got = pretrain(4, default_data, tmp_path / "run", *flags)
    assert differences(got, odd_length) <= BOUND
    assert got[-1]["consumed_tokens"] == 3 * 4 * 251


def without_the_shift(rank: int, world_size: int, arguments: list[str]) -> None:
    """Train with the diagonal kept in every round of striping, where the later ranks' tokens must not be seen."""
    tiles._compare = lambda rows, columns, shift, q0, k0: [
        (q0, q0 + rows, k0, k0 + columns, CAUSAL if shift < columns else FULL)
    ]
    on_rank(rank, world_size, arguments)


def test_dropping_the_shift_of_the_striped_mask_makes_parity_fail(
    iterations: tuple[str, str],
    default_data: Path,
    one_process: list[dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tests.pretraining.run_ranks", lambda _, world_size, flags: run_ranks(without_the_shift, world_size, flags)
    )
    flags = (*iterations, "--context-parallel-method", "striped", "--context-parallel-size", "2")
    assert differences(pretrain(2, default_data, tmp_path / "run", *flags), one_process) > 10 * BOUND


@pytest.mark.parametrize("granularity", ["full", pytest.param("attention_boundary", marks=pytest.mark.slow)])
def test_recompute_changes_nothing_under_tensor_and_context_parallelism(
    granularity: str, iterations: tuple[str, str], default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    flags = (
        "--tensor-model-parallel-size",
        "2",
        "--context-parallel-size",
        "2",
        "--recompute-granularity",
        granularity,
    )
    assert differences(pretrain(4, default_data, tmp_path / "run", *iterations, *flags), one_process) <= BOUND
