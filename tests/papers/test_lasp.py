"""LASP's tables: what is out of memory, longest sequences, counted bytes.

Those of convergence have what is run and kept.
"""

from pathlib import Path

import pytest

from papers import convergence, lasp
from runtime.ranks import run_ranks
from train.config.language import parse_args, validate


def above_floor(rows, backend):
    """Return the rows of a backend that hold more than the paper's least.

    The least is that for as many GPUs.
    """
    rows_of_backend = [row for row in rows if row.labels["backend"] == backend and row.difference]
    floors = {
        row.labels["gpus"]: row.published["gb"] for row in reversed(rows_of_backend)
    }  # the shortest is the first
    return [row for row in rows_of_backend if row.published["gb"] != floors[row.labels["gpus"]]]


def test_out_of_memory_and_memory_above_the_floor_are_predicted():
    rows = list(lasp.scalability())
    for backend in ("DDP", "FSDP"):
        rows_of_backend = [row for row in rows if row.labels["backend"] == backend]
        assert len(rows_of_backend) == 48
        assert (
            sum(
                (row.published["gb"] == "OOM") == (row.analytic["gb"] == "OOM")
                for row in rows_of_backend
            )
            == 48
        )
        above = above_floor(rows, backend)
        assert len(above) == {"DDP": 16, "FSDP": 17}[backend]
        assert max(abs(row.difference["gb"]) for row in above) < 0.15
    assert lasp.memory_gb(1 << 19, "DDP", 16) > lasp.MEMORY_GB > lasp.memory_gb(1 << 19, "FSDP", 16)


def test_longest_sequences_hold_where_the_paper_agrees_with_itself():
    off = {str(row.labels["method"]): abs(row.difference["ktokens"]) for row in lasp.ablation()}
    assert [name for name, size in off.items() if size > 0.25] == [
        "DDP",
        "DDP+LASP",
        "FSDP",
        "FSDP+LASP",
    ]
    assert max(size for name, size in off.items() if "AC" in name) < 0.1


def test_real_ranks_send_a_state_and_ulysses_its_tokens():
    counts = run_ranks(lasp.count, lasp.RANKS, [("lasp", {}, True), ("ulysses", {}, True)])[1]
    small, tokens = lasp.HEADS * lasp.WIDTH, lasp.TOKENS
    assert sum(counts[0]) == 4 * small**2 // lasp.HEADS
    assert sum(counts[1]) == 2 * 4 * tokens * small // lasp.RANKS * (lasp.RANKS - 1) // lasp.RANKS
    assert [row.difference["elements"] for row in [*lasp.volumes()][:2]] == [0.0, -1 / 16]


def test_the_papers_table_has_our_rows():
    published_rows = convergence.published()
    assert list(published_rows) == convergence.ROWS
    assert published_rows["transnormer/fsdp"] == {"without": 3.717, "lasp": 3.714}
    rows = list(lasp.trained())
    assert [row.published for row in rows] == list(published_rows.values())
    assert all(row.measured for row in rows)


def test_every_run_is_one_that_the_entry_takes():
    for row in convergence.ROWS:
        sizes = []
        for way in convergence.WAYS:
            config = parse_args(convergence.command_line(f"{row}/{way}", Path("data"), 300))
            validate(config, convergence.RANKS)
            sizes.append(config.mesh.context_parallel_size)
        assert sizes == [1, 2]


@pytest.mark.parametrize(
    ("lasp", "dropped", "wrong"),
    [
        (4.019, None, []),
        (4.021, None, ["transnormer/ddp"]),
        (float("nan"), None, ["transnormer/ddp"]),
        (4.00001, 4.00002, ["transnormer/ddp/dropped"]),
        (4.00001, 4.1, []),
    ],
)
def test_a_loss_outside_the_bound_and_a_control_that_is_no_further_off_are_named(
    lasp, dropped, wrong
):
    last = {"without": 4.0, "lasp": lasp} | ({"dropped": dropped} if dropped else {})
    runs = {
        f"transnormer/ddp/{way}": convergence.figures([5.0, loss]) for way, loss in last.items()
    }
    assert convergence.compared({"runs": runs})[1] == wrong


@pytest.mark.slow
def test_a_row_is_trained_once_and_kept(tmp_path, capsys):
    flags = [
        "--rows",
        "transnormer/zero1",
        "--iterations",
        "3",
        "--results",
        str(tmp_path / "results"),
    ]
    assert convergence.main([*flags, "--data", str(tmp_path / "stdlib")]) == 0
    assert "transnormer/zero1               lasp" in capsys.readouterr().out
    path = tmp_path / "results" / "lasp_convergence.jsonl"
    table = convergence.read_runs(path)
    without, with_lasp = (table["runs"][f"transnormer/zero1/{way}"] for way in convergence.WAYS)
    assert with_lasp["loss"] == pytest.approx(without["loss"], rel=1e-6)
    assert with_lasp["last"] == pytest.approx(without["last"], rel=1e-6)
    assert (
        convergence.main([*flags, "--data", str(tmp_path / "nothing")]) == 0
    )  # nothing is trained again, nor prepared
    assert "nothing is trained" in capsys.readouterr().out
    assert convergence.main([*flags, "--iterations", "4"]) == 1
    assert "has runs with" in capsys.readouterr().err


def test_the_committed_runs_are_all_and_within_the_bound():
    table = convergence.read_runs(convergence.RESULTS)
    assert len(table["runs"]) == len(convergence.ROWS) * len(convergence.WAYS) + len(
        convergence.MODELS
    )
    assert convergence.compared(table)[1] == []
