"""Bad steps: spikes and losses that are not finite, and what each policy does.

Restarts are counted.
"""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from runtime.ranks import run_ranks
from tests.parallel.tiny import equal, whole_tensors
from tests.train.runs import by, checkpoints, run_with, settings
from tests.train.test_trainer import infinite_in
from train.callbacks.health import (
    FAILURES,
    MIN_GOOD_STEPS,
    Health,
    HealthConfig,
    RunProgress,
    TrainingError,
)
from train.callbacks.metrics import METRICS, read_metrics
from train.checkpoint.api import CheckpointConfig
from train.checkpoint.search import find_checkpoint
from train.optimizers import OPTIMIZERS

ALWAYS = partial(infinite_in, iterations=range(4, 100))


def health(policy="skip", save_interval=None, **more):
    config = settings(train_iters=6)
    checkpoint = CheckpointConfig(save="set below", save_interval=save_interval)
    return replace(
        config, checkpoint=checkpoint, health=HealthConfig(bad_step_policy=policy, **more)
    )


def judged(rank, world_size):
    """The verdicts on a step after MIN_GOOD_STEPS good ones, if one rank alone has a high loss."""
    config = HealthConfig(check_for_spiky_loss=True, spike_factor=3.0)
    verdicts = []
    for loss, norm in ((6.1, 0.5), (5.9, 50.0), (math.nan, 0.5), (2.0, math.inf)):
        of_run = Health(config, None, [(2.0, 0.5)] * MIN_GOOD_STEPS, RunProgress())
        verdicts.append(of_run.judge(loss if rank == 0 else 2.0, norm))
    young = Health(config, None, [(2.0, 0.5)] * (MIN_GOOD_STEPS - 1), RunProgress())
    large = Health(
        replace(config, check_for_large_grads=True),
        None,
        [(2.0, 0.5)] * MIN_GOOD_STEPS,
        RunProgress(),
    )
    return [*verdicts, young.judge(6.1, 0.5), large.judge(2.0, 1.6)]


def test_what_one_rank_sees_all_ranks_say():
    verdicts, other = run_ranks(judged, 2)
    spike, plain, nan, infinite, young, large = verdicts
    assert (
        [bool(text) for text in verdicts]
        == [bool(text) for text in other]
        == [True, False, True, True, False, True]
    )
    assert spike == "the loss was 6.1, a spike above the limit 6 on 1 of 2 ranks"
    assert plain == young == ""
    assert nan == other[2] == "the loss was not finite on 1 of 2 ranks"
    assert infinite == "the gradient norm was not finite"
    assert large == "the gradient norm was 1.6, a spike above the limit 1.5"


def infinite_once_at_4(trainer):
    """The run comes to iteration 4 a second time when it has been rolled back.

    Before iteration 3, weights and the optimizer's state are those of the first time.
    """
    runner, plain = trainer.runner, trainer.runner.forward_backward
    infinite_in(trainer, range(4, 5))
    broken = runner.forward_backward
    states = []

    def note(micro_batches, valid):
        if trainer.progress.iteration == 3:
            states.append(whole_tensors(runner.parts[0], trainer.optimizer))
            assert equal(states[0], states[1])
        return plain(micro_batches, valid)

    def once(micro_batches, valid):
        if trainer.progress.iteration in (3, 4):
            states.append(whole_tensors(runner.parts[0], trainer.optimizer))
        if trainer.progress.iteration == 4:
            assert not equal(*states), "the comparison can tell states apart"
            states.pop()
            runner.forward_backward = note
        return broken(micro_batches, valid)

    runner.forward_backward = once


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rolled_back_it_goes_on_with_other_samples(optimizer, tmp_path):
    config = by(optimizer, health("rollback", save_interval=2))
    for progress, error in run_ranks(run_with, 2, config, tmp_path / "run", infinite_once_at_4):
        assert (error, progress.iteration, progress.consumed_samples) == ("", 6, (6 + 2) * 4)
        assert (progress.skipped_iterations, progress.skipped_in_a_row) == (1, 0)
    records = read_metrics(tmp_path / "run" / METRICS)
    assert [r["iteration"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["consumed_samples"] for r in records] == [4, 8, 20, 24, 28, 32]
    assert checkpoints(tmp_path / "run") == [2, 4, 6]
    (failure,) = map(json.loads, (tmp_path / "run" / FAILURES).read_text().splitlines())
    assert failure == {
        "iteration": 4,
        "checkpoint": 2,
        "why": "a step was bad in iteration 4: the loss was not finite",
    }


def test_rolled_back_three_times_it_ends(tmp_path):
    ((progress, error),) = run_ranks(run_with, 1, health("rollback", 2), tmp_path / "run", ALWAYS)
    assert error.startswith(
        "TrainingError: the run failed 3 times after iteration 2, "
        "the last time because a step was bad"
    )
    assert progress.iteration == 4
    assert checkpoints(tmp_path / "run") == [2]


def four_starts(rank, world_size, config, folder):
    return [run_with(rank, world_size, config, folder, ALWAYS) for _ in range(4)]


def test_after_three_starts_that_failed_the_next_one_does_not_train(tmp_path):
    folder = tmp_path / "run"
    for starts in run_ranks(four_starts, 2, health("stop"), folder):
        assert [progress.iteration for progress, _ in starts] == [4, 4, 4, 0]
        assert all(
            "a step was bad in iteration 4: the loss was not" in error for _, error in starts
        )
        assert f"remove {folder}/{FAILURES} to continue from iteration 0" in starts[3][1]


def test_failures_after_a_local_checkpoint_are_counted_and_a_cut_line_is_left_out(tmp_path):
    """They note the newest shared one, of iteration 2, whatever local one a start went on from."""
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / FAILURES).write_text('{"iteration": 1, "checkpoint": 0, "why": "old"}\n{"iter')
    for start in range(3):
        of_start = Health(HealthConfig(), str(tmp_path), [], RunProgress())
        with pytest.raises(TrainingError, match=r"^bad"):
            of_start._fail(4 + 2 * start, 3, "bad")
    with pytest.raises(
        TrainingError, match="the run failed 3 times after iteration 2, the last time because bad"
    ):
        Health(HealthConfig(), str(tmp_path), [], RunProgress())
    assert [
        json.loads(line)["iteration"] for line in (tmp_path / FAILURES).read_text().splitlines()
    ] == [1, 4, 6, 8]


def poisoned_at_4(trainer):
    """The update of iteration 4 makes weights of which the loss is high, though it is finite."""
    plain = trainer.optimizer.step

    def step(*args):
        answer = plain(*args)
        if trainer.progress.iteration == 4:
            with torch.no_grad():
                for parameter in trainer.runner.parts[0].output.parameters():
                    parameter.mul_(-1e4)
        return answer

    trainer.optimizer.step = step


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_weights_that_an_update_broke_are_never_saved(policy, tmp_path):
    for _, error in run_ranks(
        run_with, 2, health(policy, save_interval=2), tmp_path / "run", poisoned_at_4
    ):
        assert "iteration 4 is not saved: its update raised its samples' loss from 3." in error
    assert checkpoints(tmp_path / "run") == [2]
    assert find_checkpoint(tmp_path / "run") is not None


def test_a_save_waits_for_a_good_step(tmp_path):
    ((_, error),) = run_ranks(
        run_with,
        1,
        health("skip", save_interval=2),
        tmp_path / "run",
        partial(infinite_in, iterations=(2, 3)),
    )
    assert error == ""
    assert checkpoints(tmp_path / "run") == [4, 6]
