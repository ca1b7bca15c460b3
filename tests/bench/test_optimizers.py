"""The bench of optimizers: which runs it starts, that it resumes, and what it reports."""

import pytest

from bench import optimizers
from bench.optimizers import command_line, main, paired, search, step_of, time_steps, train
from model.registry import meta_model
from tools.common.report import read_records
from train.config.language import parse_args

SMALL = ("--num-layers", "1", "--hidden-size", "16", "--ffn-hidden-size", "16")


def runs_of(rates, best, seeds=(1, 2, 3)):
    """The runs of a search whose loss grows with the ratio to the best rate."""
    runs = []

    def run(optimizer, rate, seed):
        runs.append((rate, seed))
        return max(rate / best, best / rate)

    return search("adam", rates, seeds, run), runs


def test_the_best_rate_is_tried_with_all_seeds_and_has_neighbours():
    assert runs_of([4.0, 1.0, 2.0], 2.1) == (2.0, [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3)])
    best, runs = runs_of([1.0, 2.0, 4.0], 9.0)
    assert best == 8.0
    assert runs == [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 2), (8, 3)]
    assert runs_of([1.0, 2.0], 0.5)[0] == 0.5
    _, runs = runs_of([1.0], 1e9, seeds=[1])
    assert len(runs) == optimizers.MAX_RATES


def test_a_run_of_each_optimizer_trains_on_the_same_tokens(default_data):
    results = {}
    for optimizer in optimizers.OPTIMIZERS:
        flags = command_line(optimizer, 1e-2, 1, 3, default_data)
        results[optimizer] = train([*flags, *SMALL, "--eval-iters", "1"])
    adam, muon = results["adam"], results["muon"]
    assert adam["tokens"] == muon["tokens"] == 3 * 8 * 256
    assert [tokens for tokens, _ in adam["curve"]] == [tokens for tokens, _ in muon["curve"]]
    assert adam["loss"] != muon["loss"]


def test_finished_runs_are_not_trained_again(tmp_path, monkeypatch, capsys):
    trained = []

    def pretend(flags):
        words = dict(zip(flags[::2], flags[1::2], strict=True))
        trained.append((words["--optimizer"], words["--lr"], words["--seed"]))
        loss = abs(float(words["--lr"]) - 2e-3) + (words["--optimizer"] == "adam")
        return {"loss": loss, "tokens": 10, "curve": [[5, 3.0], [10, loss]]}

    monkeypatch.setattr(optimizers, "train", pretend)
    monkeypatch.setattr(optimizers, "prepare", lambda *_, **__: None)
    flags = ["--only", "losses", "--rates", "1e-3", "2e-3", "4e-3", "--seeds", "1", "2"]
    flags += ["--results", str(tmp_path), "--picture", str(tmp_path / "losses.png")]
    for _ in range(2):
        assert not main(flags)
    expected = [("0.001", "1"), ("0.002", "1"), ("0.004", "1"), ("0.002", "2")]
    assert trained == [(name, *run) for name in ("adam", "muon") for run in expected]
    (path,) = tmp_path.glob("optimizers-*.jsonl")
    result = read_records(path)
    assert result["best"] == {"adam": 2e-3, "muon": 2e-3}
    assert paired(result) == [-1.0, -1.0]
    assert (tmp_path / "losses.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "| AdamW | 0.002 | 2 | 1.0000 | 0.0000 |" in printed
    assert "seed by seed: -1.0000, -1.0000" in printed

    assert main([*flags, "--iterations", "7"]) == 1
    assert "give another --results" in capsys.readouterr().err


def test_steps_are_of_five_million_parameters():
    model = meta_model(parse_args(optimizers.STEP_MODEL.split()).model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(5e6, rel=0.05)


def test_steps_are_timed_and_move_every_weight(monkeypatch):
    """On a smaller model: without instructions for bfloat16, a matmul in it takes seconds."""
    small = f"{optimizers.STEP_MODEL} --hidden-size 32 --ffn-hidden-size 32 --vocab-size 64"
    monkeypatch.setattr(optimizers, "STEP_MODEL", small)
    rows = time_steps(3)
    assert [row["name"] for row in rows] == list(optimizers.STEPS)
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert len(row["seconds"]) >= 3
        assert 0 < min(row["seconds"]) <= row["median"]

    for flags in optimizers.STEPS.values():
        step, count = step_of(flags)
        assert count == rows[0]["parameters"]
        for group in step.__self__.param_groups:
            before = [parameter.detach().clone() for parameter in group["params"]]
            step()
            for old, new in zip(before, group["params"], strict=True):
                assert (old != new).any()
