"""The models of linear attention train as one process does, over ranks too, and go on from their checkpoints."""

from pathlib import Path

import pytest

from tests.pretraining import differences, pretrain

BOUND = 1e-5
CONFIGS = Path(__file__).parents[1] / "configs"
FIVE = ("--num-query-groups", "none", "--train-iters", "5")


def flags(kind: str) -> tuple[str, ...]:
    return ("--config", str(CONFIGS / f"{kind}_tiny.toml"), *FIVE)


@pytest.fixture(scope="module", params=["transnormer", "linear_transformer"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def one_process(kind: str, default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The reference: one process, all scores at once."""
    save = tmp_path_factory.mktemp("one") / "run"
    return pretrain(1, default_data, save, *flags(kind), "--attention-backend", "reference")


@pytest.mark.parametrize(
    ("ranks", "strategy", "cp", "method"),
    [(1, "zero3", 1, "lasp"), (2, "ddp", 1, "none"), (4, "zero1", 1, "none"), (2, "zero3", 2, "lasp"),
     (4, "zero2", 2, "lasp2")],
)  # fmt: skip
def test_ranks_in_chunks_equal_one_process(
    kind: str,
    ranks: int,
    strategy: str,
    cp: int,
    method: str,
    default_data: Path,
    one_process: list[dict],
    tmp_path: Path,
) -> None:
    context = ("--context-parallel-size", str(cp), "--context-parallel-method", method)
    arguments = (*flags(kind), "--data-parallel-sharding-strategy", strategy, *context)
    assert differences(pretrain(ranks, default_data, tmp_path / "run", *arguments), one_process) <= BOUND
    assert one_process[0]["lm_loss"] > one_process[-1]["lm_loss"]


def test_policies_chunked_losses_and_a_resume_change_nothing(
    kind: str, default_data: Path, one_process: list[dict], tmp_path: Path
) -> None:
    """Recomputation that keeps the attention, losses and feed-forward layers in chunks, stopped and gone on."""
    memory = ("--recompute-granularity", "attention_boundary", "--loss-chunk-size", "100", "--ffn-chunk-size", "100")
    arguments = (*flags(kind), *memory, "--exit-interval", "3")
    pretrain(2, default_data, tmp_path / "run", *arguments)
    got = pretrain(2, default_data, tmp_path / "run", *arguments, "--load", str(tmp_path / "run"))
    assert differences(got, one_process) <= BOUND
