"""A slowed rank is named, on real ranks; who is the slowest, by hand."""

import io
import socket
import time
from contextlib import redirect_stdout
from dataclasses import replace

from runtime.ranks import run_ranks
from tests.train.test_loop import run_with, settings
from tools import watch
from train.watching.metrics import METRICS, LoggingConfig, read_metrics
from train.watching.profile import PHASES, slowest


def slowed(trainer):
    """Let this rank take longer there, even for a loaded machine."""

    def late(*_):
        time.sleep(0.4)

    trainer.runner.parts[0].layers[0].mlp.down.register_forward_pre_hook(late)


def _run(rank, size, config, folder):
    with redirect_stdout(io.StringIO()) as said:
        run_with(rank, size, config, folder, slowed if rank == 1 else None)
    return said.getvalue()


def test_a_slowed_rank_is_named_with_its_host(tmp_path):
    said, _ = run_ranks(
        _run, 2, replace(settings(train_iters=4), logging=LoggingConfig(log_interval=2)), tmp_path / "slow"
    )
    first, second, _, last = read_metrics(tmp_path / "slow" / METRICS)
    assert "slowest_rank" not in first, "only at an interval's end"
    assert second["slowest_rank"] == 1
    assert last["slowest_rank"] == 1
    assert last["slowest_behind"] > 0.2
    assert last["mlp_ms"][1] > 200 > last["mlp_ms"][0]
    assert min(last["data_ms"] + last["update_ms"]) > 0
    assert f"warning: rank 1 on {socket.gethostname()} is " in said
    assert said.count("% behind the median: mlp_ms ") == 1
    assert all(len(last[name]) == 2 for name in PHASES)
    assert "  slowest: rank 1, " in "\n".join(watch.describe(tmp_path / "slow", time.time(), 80))


def test_who_is_behind_and_in_what():
    alike = {"data_ms": [1.0, 1.0, 1.0], "update_ms": [5.0, 5.0, 5.0], "mlp_ms": [2.0, 2.0, 2.0]}
    assert slowest(alike, 100.0, 40)[:2] == (0, 0.0)
    layer = alike | {"mlp_ms": [2.0, 2.0, 2.5]}
    assert slowest(layer, 100.0, 40) == (2, 0.25, "mlp_ms", True), "40 layers of 0.5 ms are 20 ms of a step"
    assert slowest(layer, 100.0, 39) == (2, 0.25, "mlp_ms", False), "too little to warn of"
    assert slowest(layer | {"data_ms": [1.0, 31.0, 2.0]}, 200.0, 4) == (1, 0.145, "data_ms", True), "before the layer"
    assert slowest(alike | {"data_ms": [1.0, 31.0, 2.0]}, 100.0, 40) == (1, 0.29, "data_ms", True)
    assert slowest(alike | {"data_ms": [1.0, 3.0, 1.0]}, 100.0, 40)[1] == 0.02, "of a step, not of the median"
    assert slowest(alike | {"mlp_ms": [0.0, 2.0, 2.0]}, 100.0, 40)[1] == 0, "a fast one is not slow, nor are the others"
