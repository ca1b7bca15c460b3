"""Packed documents and windows of one rank: figures that agree with each other, and bad input said once."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench import packed
from bench.attention import MASKED_METHODS, slowest_pairs
from bench.packing import LENGTHS, documents_of
from bench.processes import ONE_PROCESS
from bench.workload import Workload
from runtime.machine import usable_cores
from tools.report import read_records


@pytest.mark.parametrize("name", LENGTHS)
def test_documents_fill_the_sequence_and_are_the_same_in_every_process(name: str) -> None:
    found = documents_of(name, 16384)
    assert found == documents_of(name, 16384) != documents_of(name, 16384, seed=4)
    lengths = [b - a for a, b in pairwise(found)]
    assert sum(lengths) == 16384
    least, most = {"lognormal": (64, 4096), "short": (100, 1500), "chat": (32, 8192)}[name]
    assert min(lengths[:-1]) >= least
    assert max(lengths) <= most
    assert documents_of(name, 1) == (0, 1)


def test_targets_are_judged_by_the_faster_dense_attention() -> None:
    work = Workload(seq_length=2048)
    masks = {"dense": work, "short": replace(work, documents="short"), "window": replace(work, window=256)}
    per_pair = 1e-6
    dense = per_pair * work.pairs
    seconds = {
        "dense": [dense],
        "short": [1.5 * per_pair * masks["short"].pairs],
        "window": [dense / 3.5],
        ONE_PROCESS: [0.8 * dense],
    }
    found = packed.judge({**masks, ONE_PROCESS: work}, seconds)
    rate, gain = found["alone_targets"]
    assert (rate["ratio"], rate["met"]) == (pytest.approx(0.8 / 1.5), False)
    assert (gain["ratio"], gain["met"]) == (pytest.approx(3.5), True)
    row = found["alone"]["short"]
    assert row["tiles"] == len(masks["short"].mask["documents"]) - 1  # a causal square each
    assert row["per_tile"] == pytest.approx(0.5 * per_pair * row["pairs"] / row["tiles"])


@pytest.mark.skipif(len(usable_cores()) < 2, reason="two ranks need a core each")
def test_a_run_writes_both_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "packed.jsonl"
    shape = ["--seq-length", "300", "--num-heads", "2", "--head-dim", "8", "--window", "32", "--repeats", "3"]
    assert packed.main([*shape, "--json", str(path)]) == 0, capsys.readouterr().err
    result = read_records(path)
    assert list(result["contestants"]) == [*MASKED_METHODS, ONE_PROCESS]
    work = Workload(seq_length=300, num_heads=2, kv_heads=2, head_dim=8, documents="lognormal")
    for name, found in result["contestants"].items():
        assert found["slowest_pairs"] == (work.pairs / 2 if name == ONE_PROCESS else slowest_pairs(name, work, 2))
        assert found["tflops"] == pytest.approx(14 * work.pairs * 2 * 8 / found["median"] / 1e12)
    assert {f"{a}/exchange" for a in ("zigzag", "striped")} <= set(result["ratios"])
    assert f"causal, {len(work.mask['documents']) - 1} documents (lognormal)" in capsys.readouterr().out
    assert list(result["alone"]) == ["dense", "short", "window", ONE_PROCESS]
    assert all(len(row["seconds"]) == 3 for row in result["alone"].values())
    assert result["alone"]["window"]["pairs"] == 32 * 33 / 2 + (300 - 32) * 32
    assert max(map(len, path.read_text().splitlines())) < 1000


def test_bad_arguments_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert packed.main(["--window", "1"]) == 1
    assert packed.main(["--seq-length", "512"]) == 1
    assert packed.main(["--kv-heads", "3"]) == 1
    assert [line.split(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "error: --window is 1",
        "error: --window is 1024",
        "error: kv_heads is 3, which does not divide num_heads 8",
    ]
