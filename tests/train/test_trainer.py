"""The trainer on a tiny LLaMA and made-up samples: steps, skips, stops, validations and records."""

import io
import math
import signal
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data.loader import IGNORE_INDEX
from kernels.loss import cross_entropy_sum
from model.decoder import Decoder
from model.registry import flops_per_token
from parallel.data import to_local
from runtime.ranks import run_ranks
from runtime.signals import StopRequest
from tests.parallel.tiny import whole_tensors
from tests.starts import ROOT
from tests.train.runs import (
    LENGTH,
    MODEL,
    PEAK,
    VOCABULARY,
    Samples,
    by,
    checkpoints,
    run_with,
    settings,
    trained,
)
from train.callbacks.health import RunProgress
from train.callbacks.metrics import METRICS, read_metrics
from train.checkpoint.api import CheckpointConfig
from train.checkpoint.manifest import read_manifest
from train.optimizers import OPTIMIZERS
from train.trainer import describe_folder


def test_accumulation_micro_batches_and_ranks_change_no_loss(tmp_path):
    whole_batch = trained(tmp_path / "one", micro_batch_size=4)
    for name, size, micro in (("accumulated", 1, 1), ("both", 2, 1)):
        other = trained(tmp_path / name, size, micro_batch_size=micro)
        for got, want in zip(other, whole_batch, strict=True):
            assert got["lm_loss"] == pytest.approx(want["lm_loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    records = trained(
        tmp_path / "run", 2, micro_batch_size=3, global_batch_size=None, train_iters=1
    )
    assert records[0]["consumed_samples"] == 6, "a batch that is not given follows the ranks"


def test_records_are_megatrons_numbers(tmp_path):
    records = trained(tmp_path / "run", 2, train_iters=2)
    assert [r["iteration"] for r in records] == [1, 2]
    assert [r["consumed_samples"] for r in records] == [4, 8]
    assert [r["consumed_tokens"] for r in records] == [4 * LENGTH, 8 * LENGTH]
    assert [r["skipped_iterations"] for r in records] == [0, 0]
    for r in records:
        assert r["tokens_per_second"] == pytest.approx(4 * LENGTH / (r["iteration_time_ms"] / 1e3))
        per_process = flops_per_token(MODEL, LENGTH) * r["tokens_per_second"] / 2
        assert r["tflops_per_gpu"] == pytest.approx(per_process / 1e12)
        assert r["mfu"] == pytest.approx(per_process / PEAK)
        assert r["learning_rate"] == 0.01
        assert 0 < r["memory_gb"] < 100
    assert records[0]["lm_loss"] == pytest.approx(
        math.log(VOCABULARY), rel=0.02
    )  # untrained, it knows nothing
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in records[-1] if f"| `{name}` |" not in page] == []


def infinite_in(trainer, iterations):
    """A weight of the last rank's shard is infinite during these iterations, and back after."""
    weight = trainer.runner.parts[0].layers[0].mlp.down.weight
    plain, good = trainer.runner.forward_backward, weight.to_local()[0, 0].item()
    states = []

    def forward_backward(micro_batches, valid):
        hit = (
            trainer.progress.iteration in iterations
            and dist.get_rank() == dist.get_world_size() - 1
        )
        with torch.no_grad():
            weight.to_local()[0, 0] = math.inf if hit else good
        answer = plain(micro_batches, valid)
        with torch.no_grad():
            weight.to_local()[0, 0] = good
        tensors = list(trainer.runner.parts[0].parameters())
        for state in trainer.optimizer.state.values():
            tensors += state.values()
        states.append([to_local(tensor).clone() for tensor in tensors])
        if len(states) > 1 and trainer.progress.iteration - 1 in iterations:
            # What the skipped step before this one left as it was.
            assert all(torch.equal(a, b) for a, b in zip(*states[-2:], strict=True))
        return answer

    trainer.runner.forward_backward = forward_backward


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_whose_gradient_is_not_finite_changes_no_weight_on_any_rank(optimizer, tmp_path):
    """Nor does it change the optimizer's state."""
    prepare = partial(infinite_in, iterations=(2, 3))
    config = by(optimizer, settings(train_iters=5))
    ends = run_ranks(run_with, 2, config, tmp_path / "run", prepare)
    assert ends == [(RunProgress(5, 20, 5 * 4 * LENGTH, 2, 0), "")] * 2
    records = read_metrics(tmp_path / "run" / METRICS)
    assert [r["skipped_iterations"] for r in records] == [0, 1, 2, 2, 2]
    assert [r["grad_norm"] is not None for r in records] == [True, False, False, True, True]
    assert all(math.isfinite(r["lm_loss"]) for r in records[3:])


def first_averages(rank, world_size, config, clip_grad):
    """Return the averages of gradients after a first step, each divided by its weight."""
    averages = {}

    def prepare(trainer):
        plain = trainer.runner.forward_backward

        def forward_backward(micro_batches, valid):
            if trainer.progress.iteration == 2:
                state = whole_tensors(trainer.runner.parts[0], trainer.optimizer)
                for name, value in state.items():
                    if name.endswith("/exp_avg"):
                        averages[name] = value / (1 - config.optimizer.adam_beta1)
                    elif name.endswith("/momentum_buffer"):
                        averages[name] = value / (1 - config.optimizer.muon_momentum)
            return plain(micro_batches, valid)

        trainer.runner.forward_backward = forward_backward

    clipped = replace(config, optimizer=replace(config.optimizer, clip_grad=clip_grad))
    run_with(rank, world_size, clipped, prepare=prepare)
    return averages


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_averages_of_gradients_are_of_clipped_ones(optimizer):
    config = by(optimizer, settings(train_iters=2))
    whole = run_ranks(first_averages, 2, config, 0.0)[0]
    norm = sum(gradient.square().sum() for gradient in whole.values()).sqrt()
    assert norm > 0.1
    for clipped in run_ranks(first_averages, 2, config, 0.01):
        assert clipped.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(clipped[name], gradient * 0.01 / norm, rtol=1e-4, atol=1e-9)


def test_ten_skipped_in_a_row_end_the_run_and_nine_do_not():
    prepare = partial(infinite_in, iterations=[*range(2, 11), *range(12, 22)])
    for progress, error in run_ranks(run_with, 2, settings(train_iters=50), None, prepare):
        assert (progress.iteration, progress.skipped_iterations) == (21, 19)
        assert error.startswith(
            "TrainingError: 10 steps in a row were bad, the last one in iteration 21: the loss was"
        )
        assert "; the last good iteration was 11; lower lr" in error


def infinite_after_a_resume(trainer):
    vars(trainer.progress).update(iteration=6, skipped_iterations=4, skipped_in_a_row=4)
    infinite_in(trainer, range(3, 100))


def test_steps_skipped_in_a_row_are_counted_over_a_resume(tmp_path):
    config = settings(train_iters=50, exit_interval=6)
    config = replace(config, checkpoint=CheckpointConfig(save="set below", save_interval=1))
    prepare = partial(infinite_in, iterations=range(3, 100))
    ((progress, error),) = run_ranks(run_with, 1, config, tmp_path / "run", prepare)
    assert (progress.skipped_in_a_row, error) == (4, "")
    assert (
        read_manifest(tmp_path / "run" / "iter_0000006").extra["progress"]["skipped_in_a_row"] == 4
    )
    config = replace(config, train=replace(config.train, exit_interval=None))
    ((progress, error),) = run_ranks(run_with, 1, config, tmp_path / "run", infinite_after_a_resume)
    assert progress.iteration == 12
    assert "10 steps in a row were bad, the last one in iteration 12: " in error
    assert "the last good iteration was 2; lower lr" in error
    assert error.endswith(f"--load {tmp_path}/run --ckpt-step 2 and another --save")


def traced(trainer):
    """Note every file that the second step enters, after what is made once.

    Those around the model are few.
    """
    plain, entered = trainer.train_step, set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            entered.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    def step(prefetched):
        sys.setprofile(note if trainer.progress.iteration == 1 else None)
        try:
            return plain(prefetched)
        finally:
            sys.setprofile(None)
            if trainer.progress.iteration == 2:
                assert {"train/trainer.py", "train/batches.py"} < entered, (
                    "the control: something is noted"
                )
                around = {
                    name
                    for name in entered
                    if name.split("/")[0] in ("data", "parallel", "runtime", "train")
                }
                assert len(around) <= 10, sorted(around)

    trainer.train_step = step


def test_one_step_enters_few_files():
    assert run_ranks(run_with, 1, settings(), None, traced)[0][1] == ""


def idle_weight(trainer, frozen=False):
    trainer.runner.parts[0].register_parameter(
        "idle", nn.Parameter(torch.ones(2), requires_grad=not frozen)
    )


def test_a_weight_without_a_gradient_is_named():
    assert run_ranks(run_with, 1, settings(), None, idle_weight) == [
        (
            RunProgress(iteration=1),
            "RuntimeError: no gradient reached idle: part of the model is not trained",
        )
    ]
    assert run_ranks(run_with, 1, settings(), None, partial(idle_weight, frozen=True))[0][1] == ""


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_saves_and_validations_come_at_their_intervals_and_at_the_end(tmp_path, beside):
    config = settings(train_iters=7, eval_interval=3)
    config = replace(
        config, checkpoint=CheckpointConfig(save="set below", save_interval=2, async_save=beside)
    )
    run_ranks(run_with, 2, config, tmp_path / "run", None, Samples())
    records = read_metrics(tmp_path / "run" / METRICS)
    assert [r["iteration"] for r in records if "validation_loss" in r] == [3, 6, 7]
    assert checkpoints(tmp_path / "run") == [2, 4, 6, 7]
    assert (tmp_path / "run" / "loss.png").is_file()
    left = (
        "loss.png (the curve), metrics.jsonl (every iteration), 4 checkpoints, the newest of "
        "iteration 7"
    )
    assert describe_folder(tmp_path / "run") == f"{tmp_path}/run holds {left}"


@pytest.mark.parametrize(
    ("limit", "last"), [({"exit_interval": 2}, 2), ({"exit_duration_in_mins": 1e-9}, 1), ({}, 5)]
)
def test_told_to_stop_it_saves_and_stops(limit, last, tmp_path):
    config = settings(train_iters=5, **limit)
    for progress, error in run_ranks(run_with, 2, config, tmp_path / "run", None, Samples()):
        assert (progress.iteration, error) == (last, "")
    records = read_metrics(tmp_path / "run" / METRICS)
    assert [r["iteration"] for r in records] == list(range(1, last + 1))
    assert ("validation_loss" in records[-1]) == ("exit_duration_in_mins" not in limit), (
        "time does not wait for it"
    )
    assert checkpoints(tmp_path / "run") == [last]


def told_to_end_with_a_local_checkpoint_loaded(trainer):
    trainer.progress.iteration, notice = 6, StopRequest()
    notice.signal = signal.SIGTERM
    trainer.train = partial(trainer.train, notice)


def test_told_to_end_before_a_step_it_saves_what_the_local_checkpoint_held(tmp_path):
    local = CheckpointConfig(
        save="set below",
        non_persistent_save_interval=2,
        non_persistent_local_ckpt_dir=str(tmp_path / "node"),
    )
    config = replace(settings(train_iters=9), checkpoint=local)
    ends = run_ranks(
        run_with, 1, config, tmp_path / "run", told_to_end_with_a_local_checkpoint_loaded
    )
    assert ends == [(RunProgress(iteration=6), "")]
    assert checkpoints(tmp_path / "run") == [6]


def hours_later_on_rank_1(trainer):
    """Clocks differ: one rank alone would think that the time is over."""
    if dist.get_rank() == 1:
        times = iter([0.0])
        time.monotonic = lambda: next(times, 1e6)


def test_all_ranks_go_by_the_first_ones_clock():
    config = settings(train_iters=3, exit_duration_in_mins=10.0)
    ends = run_ranks(run_with, 2, config, None, hours_later_on_rank_1)
    assert [progress.iteration for progress, _ in ends] == [3, 3]


def expected_validation(samples, weights=None):
    """Mean loss of these or the initial weights over the tokens of samples 0, 1, ...

    It is that of one process.
    """
    model = Decoder(MODEL)
    model.init_weights(5)
    model.load_state_dict(weights or {}, strict=weights is not None)
    items = [Samples()[n] for n in range(samples)]
    tokens, labels, mask = (
        torch.stack([item[k] for item in items]) for k in ("tokens", "labels", "loss_mask")
    )
    loss, count = cross_entropy_sum(model(tokens), labels.masked_fill(mask == 0, IGNORE_INDEX))
    assert count < labels.numel()
    return (loss / count).item()


def half_rate(trainer):
    """Have the second group learn at half of the rate.

    The run ends by the rates that its last step had.
    """
    matrices, vectors = trainer.optimizer.param_groups
    vectors["lr_factor"], train = 0.5, trainer.train

    def checked():
        train()
        raise RuntimeError(f"rates {matrices['lr']} {vectors['lr']}")

    trainer.train = checked


def test_a_groups_rate_is_the_schedules_times_its_factor():
    for _, end in run_ranks(run_with, 1, settings(), None, half_rate):
        assert end == "RuntimeError: rates 0.01 0.005"


def frozen(trainer):
    trainer.optimizer.step = lambda: None


def said_of_validation(rank, world_size, eval_iters, folder, length):
    """Validate after each of two iterations; the notes that are printed."""
    config, output = settings(train_iters=2, eval_iters=eval_iters, eval_interval=1), io.StringIO()
    with redirect_stdout(output):
        run_with(rank, world_size, config, folder, frozen, Samples(length))
    return [line for line in output.getvalue().splitlines() if line.startswith("note:")]


@pytest.mark.parametrize(
    ("size", "length", "eval_iters", "used"), [(1, 20, 2, 8), (2, 3, 4, 3), (2, 20, 2, 8)]
)
def test_validation_is_the_mean_over_the_tokens_that_there_are(
    size, length, eval_iters, used, tmp_path
):
    first, *others = run_ranks(said_of_validation, size, eval_iters, tmp_path / "run", length)
    for record in read_metrics(tmp_path / "run" / METRICS):
        assert record["validation_loss"] == pytest.approx(expected_validation(used), rel=1e-6)
    few = [
        "note: eval_iters 4 needs 16 validation samples, but there are only 3; all of them are used"
    ]
    assert first == (few if length < 4 * eval_iters else [])
    assert not any(others)


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_bad_sample_of_one_rank_ends_all(where, tmp_path):
    bad = Samples(bad=6)  # in the second global batch, on the first rank
    data = {"training": (Samples(), bad), "validation": (bad, Samples())}[where]
    config = settings(train_iters=3, eval_iters=2)
    ends = run_ranks(run_with, 2, config, tmp_path / "run", None, *data)
    assert [error for _, error in ends] == ["DataError: x.bin: sample 6 is bad"] * 2
    assert len({progress.iteration for progress, _ in ends}) == 1
    assert checkpoints(tmp_path / "run") == []
