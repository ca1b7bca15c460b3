"""Meshes of every kind train as one process does.

A bug that breaks that is seen, and no process stays behind.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.compositions import MASKED
from tests.parity import bugs
from tests.parity import cases as parity_cases
from tests.parity import run as parity
from tests.parity.cases import reference_of
from tests.parity.run import Masked, Row, compare, main
from tools.common.cases import Case

STEPS = 2
"""The second has weights that the first one's gradients made.

A third, as in the bench, would see nothing else.
"""
CONTROLS = (
    (bugs.local_means, "llama", Case(dp=2)),
    (bugs.alike_shards, "llama", Case(dp=2)),
    (bugs.stage_without_norm, "llama", Case(pp=2)),
    (bugs.copies_left_alone, "dit", Case(pp=2, method="ring")),
)


def trained(kind, case, data, sabotage=None, micro_batch=1):
    return parity.trained(
        kind, case, data, sabotage, "--micro-batch-size", str(micro_batch), iterations=STEPS
    )


@pytest.fixture(scope="module")
def reference(default_data):
    """One process of a kind of model, of softmax attention with plain SDPA."""
    return cache(lambda kind: trained(kind, reference_of(kind), default_data))


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=pytest.mark.slow if slow else ())
        for kind, case, slow in MASKED
    ],
    ids=lambda value: getattr(value, "title", value),
)
def test_a_mesh_trains_as_one_process_does(kind, case, default_data, reference):
    """Loss, first gradients, gradient norms and initial weights.

    Ranks have unequal numbers of valid tokens.

    Its micro-batches have two samples, those of the reference one.
    """
    row = compare(trained(kind, case, default_data, micro_batch=2), reference(kind))
    assert row.within, row.cells
    assert len(reference(kind).records) == STEPS


@pytest.mark.parametrize(
    ("bug", "kind", "case"), CONTROLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_what_is_broken_is_outside_of_the_bounds(bug, kind, case, default_data, reference):
    row = compare(trained(kind, case, default_data, bug), reference(kind))
    assert not row.within
    outside = {
        bugs.local_means: row.loss > 100 * parity.LOSS and row.gradients > parity.GRADIENTS,
        bugs.alike_shards: not row.same_start,
        bugs.copies_left_alone: row.gradients > 1000 * parity.GRADIENTS and bool(row.copies_differ),
        bugs.stage_without_norm: row.norm > 1000 * parity.NORM
        and row.gradients <= parity.GRADIENTS,
    }
    assert outside[bug], row.cells


def test_ranks_hold_unequal_numbers_of_valid_tokens():
    class Ones:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"loss_mask": torch.ones(128)}

    masks = torch.stack([Masked(Ones())[index]["loss_mask"] for index in range(8)])
    assert masks[0].sum() == 0
    assert masks[0::2].sum() != masks[1::2].sum()  # two data-parallel ranks
    assert masks[:, :64].sum() != masks[:, 64:].sum()  # the halves of a ring
    assert masks[:, 0::2].sum() != masks[:, 1::2].sum()  # stripes
    assert Ones()[0]["loss_mask"].sum() == 128


def test_a_row_outside_of_any_bound_is_marked():
    bounds = {"loss": parity.LOSS, "norm": parity.NORM, "gradients": parity.GRADIENTS}
    row = Row(**bounds, weights=1.0, same_start=True, memory_mb=1.0, seconds=1.0, copies_differ=())
    assert row.within
    for name, bound in bounds.items():
        for value in (1.01, float("nan")):
            assert not replace(row, **{name: value * bound}).within
    assert not replace(row, same_start=False).within
    assert not replace(row, copies_differ=("x",)).within


def test_the_command_writes_its_table_and_fails_where_a_row_is_outside(
    default_data, reference, tmp_path, monkeypatch, capsys
):
    """No mesh is trained here; one of them has the losses of other samples."""

    def broken(kind, case, data):
        whole = reference(kind)
        moved = [{**record, "lm_loss": record["lm_loss"] + 1e-3} for record in whole.records]
        return replace(whole, records=moved) if case == Case(pp=2) else whole

    monkeypatch.setattr(parity, "trained", broken)
    monkeypatch.setitem(parity_cases.MESHES, "softmax", "pp=2 GPipe\n dp=2\n pp=2")
    flags = [
        "--kind",
        "gpt",
        "--only",
        "pp 2",
        "--data",
        str(default_data),
        "--output",
        str(tmp_path / "x.md"),
    ]
    assert main(flags) == 1
    table = (tmp_path / "x.md").read_text()
    assert "| gpt | 2 | pp 2, GPipe | same |" in table
    assert re.search(r"3 rows in \d+ minutes, 1 of them not as they should be\.", table)
    assert "| gpt | 2 | pp 2 **outside of the bounds** | same |" in table
    assert "wrote" in capsys.readouterr().out
    assert main(["--only", "pp 7"]) == 1
    assert "--only is 'pp 7'" in capsys.readouterr().err
