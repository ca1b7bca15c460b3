"""Packed documents train as each document alone does, on every kind of mesh; what is between them is zero."""

from pathlib import Path

import pytest
import torch

from data.loader import IGNORE_INDEX, Batch
from testing.ranks import run_ranks
from tests.packed import TINY, Step, alone, as_it_is, over_ranks, validation_on_rank, write_packed
from tests.pretraining import on_rank
from train.metrics import METRICS, read_metrics

LOSS, GRADIENTS = 1e-6, 5e-6
"""Bounds of relative differences from float64. The Linear Transformer divides by sums of few weights."""
WINDOWS = "--window-size 9,0 --softmax-type learnable"
KINDS = {
    "llama": "",
    "windows": f"--window-attn-skip-freq 2 {WINDOWS}",
    "gpt": "--model-type gpt --max-position-embeddings 61",
    "transnormer": "--model-type transnormer",
    "hybrid": "--model-type transnormer --softmax-every 2",
    "hybrid windows": f"--model-type transnormer --softmax-every 2 {WINDOWS}",
    "linear": "--model-type linear_transformer",
}
CP = "--context-parallel-size 2 --context-parallel-method"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2 --micro-batch-size 1"
CASES = [
    *((1, kind, "") for kind in KINDS),
    *((2, "llama", f"{CP} {method}") for method in ("ring", "zigzag", "striped", "ulysses", "exchange")),
    (2, "llama", f"{CP} zigzag --recompute-granularity full"),
    *((2, "windows", f"{CP} {method}") for method in ("zigzag", "ulysses", "exchange")),
    *((2, "windows", mesh) for mesh in (TP, PP)),
    (2, "llama", PP),
    (2, "gpt", TP),
    (2, "gpt", f"{CP} exchange"),
    (2, "transnormer", f"{CP} lasp --recompute-granularity attention_boundary"),
    (2, "linear", f"{CP} lasp2"),
    (2, "hybrid", f"{CP} lasp --hybrid-softmax-layout zigzag"),
    (2, "hybrid windows", f"{CP} lasp --hybrid-softmax-layout zigzag"),
]


@pytest.fixture(scope="module")
def flags(default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_packed(tmp_path_factory.mktemp("packed"), Path(f"{default_data}.model"))


@pytest.fixture(scope="module")
def want(flags: list[str]) -> dict[str, Step]:
    """Of each kind of model, every document alone."""
    return {kind: alone([*flags, *words.split()]) for kind, words in KINDS.items()}


@pytest.fixture(scope="module")
def found(flags: list[str]) -> dict[tuple[int, str, str], Step]:
    """All cases of as many ranks in one go."""
    steps: dict[tuple[int, str, str], Step] = {}
    for ranks in sorted({case[0] for case in CASES}):
        cases = [case for case in CASES if case[0] == ranks]
        runs = [[*flags, *KINDS[kind].split(), *mesh.split()] for _, kind, mesh in cases]
        steps |= {case: step for case, (step,) in zip(cases, over_ranks(ranks, runs), strict=True)}
    return steps


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].replace('--', '')}")
def test_a_packed_step_is_that_of_its_documents_alone(
    case: tuple[int, str, str], found: dict[tuple[int, str, str], Step], want: dict[str, Step]
) -> None:
    alone, got = want[case[1]], found[case]
    assert got.valid == alone.valid
    assert abs(got.loss - alone.loss) <= LOSS * alone.loss
    assert got.difference(alone) <= GRADIENTS * (10 if case[1] == "linear" else 1)


def without_an_end(batch: Batch) -> Batch:
    """Take a document's end in the first row for none."""
    (places,) = batch["starts"][0, 1:].nonzero(as_tuple=True)
    starts = batch["starts"].clone()
    starts[0, 1 + places[len(places) // 2]] = False
    return batch | {"starts": starts}


def rows_joined(batch: Batch) -> Batch:
    """Let the second row go on with the last document of the first."""
    starts = batch["starts"].clone()
    starts[1:, 0] = False
    return batch | {"starts": starts}


@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (2, f"{CP} zigzag"), (2, f"--model-type transnormer {CP} lasp")])
def test_an_end_that_is_ignored_is_seen(ranks: int, mesh: str, flags: list[str]) -> None:
    plain, one, rows = over_ranks(ranks, [[*flags, *mesh.split()]], (as_it_is, without_an_end, rows_joined))[0]
    for wrong in (one, rows):
        assert abs(wrong.loss - plain.loss) > 10 * LOSS * plain.loss
        assert wrong.difference(plain) > 100 * GRADIENTS


def second_document_alone(batch: Batch) -> Batch:
    """Leave loss to the second document of the first row only."""
    mine = torch.zeros_like(batch["starts"])
    mine[0] = batch["starts"][0].cumsum(0) == 2
    return batch | {"labels": batch["labels"].where(mine, IGNORE_INDEX)}


def others_changed(batch: Batch) -> Batch:
    """Do the same, and change every token of all other documents."""
    batch = second_document_alone(batch)
    other = batch["starts"].clone().fill_(True)
    other[0] = batch["starts"][0].cumsum(0) != 2
    return batch | {"tokens": batch["tokens"].where(~other, (batch["tokens"] + 7) % 2000)}


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(1, ""), (2, f"{CP} zigzag"), (2, f"{CP} striped"), (2, f"--model-type transnormer {CP} lasp"), (2, PP)],
)
def test_other_documents_change_nothing_at_all(ranks: int, mesh: str, flags: list[str]) -> None:
    """Loss and gradients of one document, whatever tokens the others hold: the same bits."""
    own, changed = over_ranks(ranks, [[*flags, *mesh.split()]], (second_document_alone, others_changed))[0]
    assert own.loss > 0
    assert own.equal(changed)


def test_one_circle_over_data_and_context_parallel_ranks_is_a_larger_context(
    flags: list[str], want: dict[str, Step]
) -> None:
    """2 x 2 ranks with a row each, and 4 ranks with both rows; the samples are those of any arrangement."""
    shared = [*flags, "--context-parallel-method", "zigzag"]
    (joined,), (large,), (apart,) = over_ranks(
        4,
        [
            [*shared, "--context-parallel-size", "2", "--micro-batch-size", "1", "--balance-over", "dp_cp"],
            [*shared, "--context-parallel-size", "4", "--micro-batch-size", "2"],
            [*shared, "--context-parallel-size", "2", "--micro-batch-size", "1"],
        ],
    )
    assert joined.equal(large)
    for got in (joined, apart):
        assert abs(got.loss - want["llama"].loss) <= LOSS * got.loss
        assert got.difference(want["llama"]) <= GRADIENTS


@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (2, f"{CP} zigzag")])
def test_validation_counts_each_document_once_and_no_filler(ranks: int, mesh: str, flags: list[str]) -> None:
    arguments = [*flags, "--eval-iters", "9", *mesh.split()]
    loss = alone(arguments, validation=True).loss
    assert run_ranks(validation_on_rank, ranks, arguments) == [pytest.approx(loss, rel=LOSS)] * ranks


def test_a_run_that_stops_and_goes_on_changes_no_bit(flags: list[str], tmp_path: Path) -> None:
    """Steps are made ahead, and what was made when the run stopped is made again."""
    names = ("lm_loss", "grad_norm", "validation_loss", "consumed_tokens")

    def train(folder: str, *more: str) -> list[list[float]]:
        save = tmp_path / folder
        arguments = [*TINY, *flags, *f"{CP} zigzag --eval-interval 2 --eval-iters 9 --train-iters 4".split(), *more]
        run_ranks(on_rank, 2, [*arguments, "--save", str(save), "--load", str(save)])
        return [[record[name] for name in names if name in record] for record in read_metrics(save / METRICS)]

    whole = train("whole")
    assert [len(record) for record in whole] == [3, 4, 3, 4]
    train("stopped", "--exit-interval", "2")
    assert train("stopped") == whole
