"""LASP's table of convergence: what is run, what is kept, and what is outside the bound."""

from pathlib import Path

import pytest

from papers import convergence as lasp
from train.config.language import parse_args, validate


def result(without, with_lasp):
    runs = {"transnormer/ddp/without": [5.0, without], "transnormer/ddp/lasp": [5.0, with_lasp]}
    return {
        "settings": {"iterations": 2, "ranks": 4, "sequences": 8, "seq_length": 256, "vocabulary": 1024},
        "machine": {"device": "a processor", "cores": 2, "platform": "a system", "torch": "2.13.0", "date": "today"},
        "runs": {name: {**lasp.figures(losses), "seconds": 1.0} for name, losses in runs.items()},
    }


def test_the_papers_table_has_our_rows():
    found = lasp.published()
    assert list(found) == lasp.ROWS
    assert found["transnormer/fsdp"] == {"without": 3.717, "lasp": 3.714}


def test_every_run_is_one_that_the_entry_takes():
    for row in lasp.ROWS:
        sizes = []
        for way in lasp.WAYS:
            config = parse_args(lasp.command_line(f"{row}/{way}", Path("data"), 300))
            validate(config, lasp.RANKS)
            sizes.append(config.mesh.context_parallel_size)
        assert sizes == [1, 2]


@pytest.mark.parametrize(
    ("loss", "wrong"), [(4.019, []), (4.021, ["transnormer/ddp"]), (float("nan"), ["transnormer/ddp"])]
)
def test_a_loss_outside_the_bound_is_named(loss, wrong):
    assert lasp.compared(result(4.0, loss))[1] == wrong


def test_a_control_that_is_no_further_off_than_lasp_is_named():
    found = result(4.0, 4.00001)
    for last, wrong in ((4.00002, ["transnormer/ddp/dropped"]), (4.1, [])):
        found["runs"]["transnormer/ddp/dropped"] = lasp.figures([5.0, last])
        assert lasp.compared(found)[1] == wrong
    assert "2.5e-02 where states are dropped" in lasp.compared(found)[0][1]


@pytest.mark.slow
def test_a_row_is_trained_once_and_kept(tmp_path, capsys):
    flags = ["--rows", "transnormer/zero1", "--iterations", "3", "--results", str(tmp_path / "results")]
    assert lasp.main([*flags, "--data", str(tmp_path / "stdlib")]) == 0
    assert "transnormer/zero1               lasp" in capsys.readouterr().out
    path = tmp_path / "results" / "lasp_convergence.jsonl"
    kept = lasp.kept(path)
    without, with_lasp = (kept["runs"][f"transnormer/zero1/{way}"] for way in lasp.WAYS)
    assert with_lasp["loss"] == pytest.approx(without["loss"], rel=1e-6)
    assert with_lasp["last"] == pytest.approx(without["last"], rel=1e-6)
    assert lasp.main([*flags, "--data", str(tmp_path / "nothing")]) == 0  # nothing is trained again, nor prepared
    assert "nothing trained" in capsys.readouterr().out
    assert lasp.main([*flags, "--iterations", "4"]) == 1
    assert "holds runs of" in capsys.readouterr().err


def test_the_committed_runs_are_all_and_within_the_bound():
    kept = lasp.kept(lasp.RESULTS)
    assert len(kept["runs"]) == len(lasp.ROWS) * len(lasp.WAYS) + len(lasp.MODELS)
    assert lasp.compared(kept)[1] == []
