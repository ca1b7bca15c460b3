"""The comparison with axolotl-ringmaster: its own code, without the package and with it."""

import pytest
import torch

from runtime.errors import UserError
from tests.peers import run, tables
from tests.peers.cases import DIVISIBLE, KINDS, Case, batch_of
from tests.peers.contestants import LONGMESH, RING, ULYSSES
from tests.starts import ROOT

PAGE = ROOT / "docs" / "evidence" / "model_peers.md"


def test_without_the_package_the_program_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"run `make model-peers`, or install it: pip install -e"):
        run.check_installed()
    assert run.main(["--only", "time"]) == 1
    assert "axolotl-ringmaster is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_documents_labels_and_a_divisible_count(kind):
    for batch in Case("Llama", kind).batches():
        divisible = batch.count % DIVISIBLE == 0
        assert divisible == (kind != "number of labels not divisible")
        assert batch.count > 0
        lengths = [end - first for _, first, end in batch.documents]
        assert lengths == [length for row in KINDS[kind] for length in row]
        assert all(batch.labels[row, first] == -100 for row, first, _ in batch.documents)

    assert batch_of(kind).ids.count_nonzero() == sum(lengths)


def test_an_altered_result_is_seen():
    """The reference itself has no error; a loss that is a mean of two means has one."""
    case = Case("Llama", "2 micro-batches")
    tensors = list(run.reference(case, 2, torch.float32))
    assert max(run.smaller_errors(tensors, case, 2).values()) == 0

    first, second = (
        run.one_process(run.model_of("Llama", 2, torch.float32), [batch])
        for batch in case.batches()
    )
    means = [(a + b) / 2 for a, b in zip(first[1:], second[1:], strict=True)]
    errors = run.smaller_errors([tensors[0], *means], case, 2)
    assert errors["logits"] == 0
    assert errors["loss"] > 1e-4
    assert errors["gradients"] > 1e-2


@pytest.mark.parametrize("kind", ["rows padded at the left", "2 micro-batches"])
def test_longmesh_is_right_without_the_package(kind):
    row = run.result_of(Case("Llama", kind), LONGMESH)
    assert row["verdict"] == "right"
    assert tables.largest(row) <= run.RIGHT


@pytest.mark.slow
def test_ringmaster_is_right_for_a_llama_and_drops_sinks():
    pytest.importorskip("ringmaster", reason="make model-peers installs it")
    for name in (ULYSSES, RING):
        assert run.result_of(Case("Llama", "packed"), name)["verdict"] == "right"
        wrong = run.result_of(Case("GptOss", "packed"), name)
        assert wrong["verdict"] == "wrong"
        assert wrong["logits"] > 0.1


def row(kind, contestant, verdict, **others):
    errors = {"logits": 1e-7, "loss": 0.0, "gradients": 4e-7}
    return {"kind": kind, "contestant": contestant, "verdict": verdict, **errors, **others}


def test_a_cell_has_the_error_the_wrong_parts_or_the_refusal():
    right = row("one document", LONGMESH, "right")
    wrong = row("packed", LONGMESH, "wrong", loss=0.021)
    refused = row("packed", LONGMESH, "refused", message="ValueError: needs | (12) a mask_2d")
    assert tables.cell(right) == "4e-07"
    assert tables.cell(wrong) == "**wrong**: loss 2.1%"
    assert tables.cell(refused) == "refused: needs / (N) a mask\\_2d"
    assert tables.merged([right, row("packed", LONGMESH, "right", loss=9e-7)], "kind") == "9e-07"
    assert tables.merged([right, wrong], "kind") == (
        "one document: 4e-07; packed: **wrong**: loss 2.1%"
    )


def test_a_refusal_is_the_last_line_of_a_traceback():
    trace = "rank 1 failed:\nTraceback:\n  line\nruntime.errors.UserError: give less\n"
    assert run.last_line(trace) == "UserError: give less"


def test_the_page_has_the_tables_of_the_results():
    (results,) = (ROOT / "bench" / "results").glob("models-*.md")
    lines = results.read_text().splitlines()
    on_page = set(PAGE.read_text().splitlines())
    end = lines.index("Messages")
    missing = [line for line in lines[:end] if line.startswith("|") and line not in on_page]
    assert missing == []
