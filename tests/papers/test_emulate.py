"""Emulated ranks: the work is that of the real plan, and with its rates the cost is the model's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.emulate import Tiles
from papers import emulate
from parallel.context import make_plan
from parallel.context.traffic import sizes
from planner.attention_cost import BACKWARD, FORWARD, AttentionCost
from planner.cluster import CLUSTERS, load_cluster
from runtime.errors import UserError

CLUSTER = replace(load_cluster(CLUSTERS / "h100_pod.toml"), launch_us=0.0)
DOCUMENTS = (0, 100, 260, 512)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("method", ["ring", "striped", "zigzag", "wallfacer", "ulysses"])
def test_at_the_models_rate_the_emulated_cost_is_the_models(method, documents):
    plan = make_plan(method, seq_len=512, size=4, documents=documents)
    of, made = sizes(plan.geometry, 1, 4, 4, 16, 2), list[int]()
    model = AttentionCost(plan, of, CLUSTER)

    def at_rate(step, tiles):
        made.append(sum(tile.pairs for tile in tiles))
        return made[-1] * of.batch * of.heads * of.head_dim / model._rate

    per_pair = emulate.emulate(plan, of, "cpu", torch.float32, at_rate)
    operations = {None: FORWARD, plan.backward_moves(of): BACKWARD}
    busy = {moves: operations[moves] * seconds for moves, seconds in per_pair.items()}
    emulated = emulate.EmulatedCost(plan, of, CLUSTER, busy=busy)
    assert (emulated.forward(), emulated.backward()) == pytest.approx((model.forward(), model.backward()))
    slower = emulate.EmulatedCost(plan, of, CLUSTER, busy={moves: 1e6 * seconds for moves, seconds in busy.items()})
    assert slower.forward() > 100 * model.forward()


def test_rounds_with_the_same_tiles_are_timed_once_and_every_step_computes():
    plan, steps = make_plan("zigzag", seq_len=64, size=4), list[Tiles]()

    def run(step, tiles):
        steps.append(tiles)
        step()
        return 1.0

    of = sizes(plan.geometry, 1, 4, 2, 16, 4)
    busy = emulate.emulate(plan, of, "cpu", torch.float32, run)
    assert len(steps) == 2 * 3, "own block, an earlier one's and a later one's, forward and backward"
    assert {moves: seconds.shape for moves, seconds in busy.items()} == {None: (4, 4), plan.backward_moves(of): (4, 4)}
    assert np.all(busy[None] == 1)


def test_the_command_prints_a_row_per_method(capsys):
    sized = ["--seq-length", "256", "--num-heads", "2", "--head-dim", "16", "--repeats", "1"]
    emulate.main(["--methods", "ring", "striped", "--context-parallel-size", "4", *sized])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("4 ranks, 256 tokens")
    assert [line.split()[0] for line in lines[-2:]] == ["ring", "striped"]


def test_a_method_that_passes_states_is_refused():
    plan = make_plan("lasp", seq_len=64, size=4)
    with pytest.raises(UserError, match="lasp passes states, and has no rounds"):
        emulate.emulate(plan, sizes(plan.geometry, 1, 4, 4, 16, 4), "cpu", torch.float32, lambda *_: 1.0)
