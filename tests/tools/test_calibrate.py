"""A calibration is a cluster file that the planner reads; what was not measured is named.

Bad outputs are refused.
"""

import os
from pathlib import Path

import pytest
import torch

from planner.cluster import CLUSTERS, ClusterError, load_cluster
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tools.calibrate import __main__ as calibration
from tools.calibrate import devices
from tools.calibrate import links as link_figures
from tools.calibrate.__main__ import ABOUT_LINKS, calibrate
from tools.common import ceilings
from tools.common.report import read_records
from tools.common.shapes import AttentionShape

SMALL = ("--device", "cpu", "--num-heads", "2", "--head-dim", "16", "--lengths", "64")


def _calibrated(rank, size, local, argv):
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    devices.peak_flops = lambda device, dtype: 1e9
    link_figures.MAX_BYTES, ceilings.COPY_BYTES["cpu"] = 1 << 18, 1 << 16
    calibrate([*SMALL, *argv])


@pytest.mark.slow
def test_two_nodes_give_every_figure(tmp_path):
    path = tmp_path / "two.toml"
    run_ranks(_calibrated, 4, 2, ("--out", str(path), "--name", "two nodes"))
    cluster = load_cluster(path)
    assert (cluster.name, cluster.device, cluster.gpus_per_node) == ("two nodes", "cpu", 2)
    assert cluster.peak_tflops * max(cluster.matmul_fraction, cluster.attention_fraction) > 1e-3
    assert 1 < cluster.inside_latency_us < 1e6
    assert 0 <= cluster.masked_share <= 1
    assert f"torch {torch.__version__}" in path.read_text()
    assert "commit" in path.read_text()


def test_alone_the_links_are_named_as_missing_or_taken_from_a_file(tmp_path):
    path = tmp_path / "alone.toml"
    run_ranks(_calibrated, 1, 1, ("--out", str(path)))
    assert all(f"# {name} is missing" in path.read_text() for name in ABOUT_LINKS)
    with pytest.raises(ClusterError, match=r"alone.toml: inside_gb_per_s is missing"):
        load_cluster(path)
    more = ("--force", "--links", str(CLUSTERS / "cpu.toml"), "--lengths", "1")
    run_ranks(_calibrated, 1, 1, ("--out", str(path), *more))
    cluster, cpu_cluster = load_cluster(path), load_cluster(CLUSTERS / "cpu.toml")
    assert cluster.masked_share == 0, "a tile of one position hides nothing"
    assert all(getattr(cluster, name) == getattr(cpu_cluster, name) for name in ABOUT_LINKS)
    assert path.read_text().count("not measured: taken from a CPU") == len(ABOUT_LINKS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--out", "there.toml"), r"--out is there.toml, but that exists; give --force"),
        (("--out", ".", "--force"), r"--out is ., but that is a folder; give a file"),
        (("--out", "new.toml", "--links", "no.toml"), r"no.toml: cannot be read"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("before")
    monkeypatch.setattr(calibration, "measure", lambda *_: pytest.fail("measured"))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(UserError, match=message):
            calibrate([*SMALL, *flags])
    finally:
        torch.set_num_threads(threads)
    assert Path("there.toml").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("rails", [True, False])
def test_one_rank_alone_tells_rails_from_a_shared_link(monkeypatch, rails):
    sizes = []

    def exchange(device, peers, size):
        inside, alone = peers == [1, 3], size in sizes  # one rank alone repeats the largest size
        sizes.extend([] if inside else [size])
        return 1e-4 + (1 if inside or rails or alone else 4) * size / 1e7

    monkeypatch.setattr(link_figures, "exchange_seconds", exchange)
    monkeypatch.setattr(link_figures.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(link_figures.dist, "get_world_size", lambda: 8)
    inside = link_figures.measure_inside(torch.device("cpu"), 4)
    figures = inside | link_figures.measure_between(torch.device("cpu"), 4)
    assert figures["between_link"][0] == ("rank" if rails else "node")
    assert figures["between_gb_per_s"][0] == pytest.approx(
        0.01, rel=0.02
    )  # of a rail, or of the one link
    assert figures["inside_gb_per_s"][0] == pytest.approx(0.01, rel=0.02)


def test_a_disturbed_exchange_makes_no_link_of_any_speed(monkeypatch):
    rate = link_figures.rate_of(1 << 20, smaller_seconds=3e-3, larger_seconds=1e-3)
    assert rate == pytest.approx(1.5 * (1 << 20) / 1e-3)
    monkeypatch.setattr(
        link_figures, "exchange_seconds", lambda device, peers, size: 0.06 + size / 1e8
    )  # far away
    latency, rate, _ = link_figures.measure_link("far", torch.device("cpu"), [1])
    assert latency == pytest.approx(0.06, rel=0.01)
    assert rate == pytest.approx(1e8, rel=0.1)


def test_attention_without_a_kernel_says_why(monkeypatch):
    monkeypatch.setattr(devices, "middle_of_ranks", lambda measured: measured())
    monkeypatch.setattr(devices, "step_of", lambda *_: torch.linalg.cholesky(-torch.ones(1, 1)))
    work = AttentionShape(seq_length=16, num_heads=1, kv_heads=1, head_dim=8)
    with pytest.raises(
        UserError, match=r"attention cannot be measured at 16 positions: .*cholesky"
    ):
        devices.attention_seconds(torch.device("cpu"), work, True)


def test_ceilings_are_printed_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(ceilings.MATMUL_SIZES, "cpu", (64,))
    path, threads = tmp_path / "ceilings.jsonl", torch.get_num_threads()
    try:
        calibrate(["--ceilings", "--device", "cpu", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    ceiling_figures = read_records(path)["ceilings"]
    assert set(ceiling_figures["matmul_tflops"]) == {"bfloat16", "float32"}
    assert f"{ceiling_figures['copy_gb_per_s']:.1f} GB/s" in capsys.readouterr().out
