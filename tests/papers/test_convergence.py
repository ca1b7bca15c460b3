"""LASP's table of convergence: what is run, what is kept, and what is outside the bound."""

from pathlib import Path
from typing import Any

import pytest

from papers import convergence as lasp
from train.config.language import parse_args, validate


def result(without: float, with_lasp: float) -> dict[str, Any]:
    runs = {"transnormer/ddp/without": [5.0, without], "transnormer/ddp/lasp": [5.0, with_lasp]}
    return {
        "settings": {"iterations": 2, "ranks": 4, "sequences": 8, "seq_length": 256, "vocabulary": 1024},
        "machine": {"device": "a processor", "cores": 2, "platform": "a system", "torch": "2.13.0", "date": "today"},
        "runs": {name: {**lasp.figures(losses), "losses": losses, "seconds": 1.0} for name, losses in runs.items()},
    }


def test_the_papers_table_has_our_rows() -> None:
    found = lasp.published()
    assert list(found) == lasp.rows()
    assert found["transnormer/fsdp"] == {"without": 3.717, "lasp": 3.714}


def test_every_run_is_one_that_the_entry_takes() -> None:
    for row in lasp.rows():
        sizes = []
        for way in lasp.WAYS:
            config = parse_args(lasp.command_line(f"{row}/{way}", Path("data"), 300))
            validate(config, lasp.RANKS)
            sizes.append(config.mesh.context_parallel_size)
        assert sizes == [1, 2]


def test_a_row_stands_beside_the_papers() -> None:
    text = lasp.markdown(result(4.0, 4.001))
    assert "| TransNormer | DDP | 4.5000 (4.0000) | 4.5005 (4.0010) | 2.5e-04 | 3.719 | 3.715 | 1.1e-03 |" in text
    assert "FSDP" not in text


@pytest.mark.parametrize(
    ("loss", "wrong"), [(4.019, []), (4.021, ["transnormer/ddp"]), (float("nan"), ["transnormer/ddp"])]
)
def test_a_loss_outside_the_bound_is_named(loss: float, wrong: list[str]) -> None:
    assert lasp.outside(result(4.0, loss)) == wrong


def test_a_control_that_is_no_further_off_than_lasp_is_named() -> None:
    found = result(4.0, 4.00001)
    for last, wrong in ((4.00002, ["transnormer/ddp/dropped"]), (4.1, [])):
        found["runs"]["transnormer/ddp/dropped"] = lasp.figures([5.0, last])
        assert lasp.outside(found) == wrong
    assert "* TransNormer, DDP: 4.5500 (4.1000), 2.5e-02 apart\n" in lasp.markdown(found)


@pytest.mark.slow
def test_a_row_is_trained_once_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rows", "transnormer/zero1", "--iterations", "3", "--results", str(tmp_path / "results")]
    assert lasp.main([*flags, "--data", str(tmp_path / "stdlib")]) == 0
    assert "transnormer/zero1               lasp" in capsys.readouterr().out
    path = tmp_path / "results" / "lasp_convergence.jsonl"
    assert "losses" not in path.read_text()  # a line of figures for each run; the curves lie beside it
    kept = lasp.kept(path)
    assert kept is not None
    without, with_lasp = (kept["runs"][f"transnormer/zero1/{way}"]["losses"] for way in lasp.WAYS)
    assert len(without) == 3
    assert without == pytest.approx(with_lasp, rel=1e-6)
    assert kept["runs"]["transnormer/zero1/lasp"]["last"] == with_lasp[-1]
    assert path.with_suffix(".png").stat().st_size > 1000
    path.with_suffix(".png").unlink()
    lasp.curves_of(path).unlink()
    assert lasp.main([*flags, "--data", str(tmp_path / "nothing")]) == 0  # nothing is trained again, nor prepared
    assert "no picture: the curves of 2 runs" in capsys.readouterr().out
    assert not path.with_suffix(".png").exists()
    assert lasp.main([*flags, "--iterations", "4"]) == 1
    assert "holds runs of" in capsys.readouterr().err


def test_the_picture_shows_how_far_the_losses_are_apart(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    without, with_lasp = [4.0] * 12, [4.0] * 11 + [4.04]
    assert lasp.apart(without, with_lasp)[-2:] == pytest.approx([0.0, 0.01 / lasp.LAST])
    drawn: list[Figure] = []
    found = result(4.0, 4.04)
    found["runs"] |= {
        f"transnormer/{name}/{way}": {"losses": [5.0, 4.1]} for name in ("zero1", "zero2") for way in lasp.WAYS
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        lasp.picture(found, tmp_path / "picture.png")
    difference = drawn[0].axes[2]
    assert difference.get_yscale() == "log"
    assert [line.get_label() for line in difference.lines[:2]] == ["DDP", "ZeRO-1, ZeRO-2"]
    assert difference.lines[0].get_ydata()[-1] == pytest.approx(0.01 / 2)


def test_the_committed_table_comes_from_its_lines() -> None:
    path = lasp.RESULTS
    kept = lasp.kept(path)
    assert kept is not None
    assert len(kept["runs"]) == len(lasp.rows()) * len(lasp.WAYS) + len(lasp.MODELS)
    assert path.with_suffix(".md").read_text() == lasp.markdown(kept)
    assert lasp.outside(kept) == []
