"""Curves of the learning rate equal Megatron's, and fit runs of any length."""

import warnings
from types import SimpleNamespace

import pytest

from train.optimizers.config import OptimizerConfig
from train.resume.schedule import shortened
from train.schedule import schedule_of


def test_two_warm_ups_and_two_choices_of_a_schedule_contradict_themselves():
    with pytest.raises(
        ValueError, match=r"^lr_warmup_iters is 3; it must be 0 with lr_warmup_fraction 0.1"
    ):
        OptimizerConfig(lr_warmup_iters=3, lr_warmup_fraction=0.1)
    with pytest.raises(
        ValueError,
        match="override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are set",
    ):
        OptimizerConfig(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)


def rates(train_iters, *iterations, **config):
    schedule = schedule_of(OptimizerConfig(lr=1.0, **config), train_iters)
    return [schedule.rate(iteration) for iteration in iterations]


def test_curves_begin_with_a_warm_up_and_end_with_the_decay():
    """Nothing but the iteration counts, so a resumed or stopped run is on the same curve."""
    for style in ("cosine", "WSD", "constant"):
        curve = rates(100, 1, 2, 3, 4, lr_decay_style=style, lr_warmup_iters=4, min_lr=0.1)
        assert curve == [0.25, 0.5, 0.75, 1.0]
    assert rates(100, 10, 20, 21, 100, lr_decay_iters=20) == pytest.approx(
        [0.5, 0.0, 0.0, 0.0], abs=1e-12
    )
    assert rates(100, 10, lr_decay_iters=40) == rates(40, 10)
    late = {"lr_decay_style": "WSD", "lr_warmup_iters": 95, "lr_decay_iters": 100}
    assert rates(100, 95, 96, 97, 100, **late) == pytest.approx([1.0, 0.8, 0.6, 0.0])
    assert rates(100, 400, lr_decay_style="inverse-square-root", lr_warmup_iters=4) == [0.1]


STYLES = [
    ("constant", "linear"),
    ("linear", "linear"),
    ("cosine", "linear"),
    ("inverse-square-root", "linear"),
    *(("WSD", shape) for shape in ("linear", "cosine", "exponential", "minus_sqrt")),
]


def megatrons(schedule, batch):
    """The rates of Megatron's first 60 iterations, as its training loop steps the schedule.

    After each, by its batch.

    Without a warm-up its inverse square root is that of the samples, here of the iterations: alike
    for a batch of 1.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"params": []}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=schedule.lr_warmup_init,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * batch,
        lr_decay_steps=(schedule.lr_decay_iters or 50) * batch,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=50 * batch,
        wd_incr_style="constant",
        wsd_decay_steps=(schedule.lr_wsd_decay_iters or 1) * batch,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
    megatron_rates = []
    for _ in range(60):
        megatron_rates.append(group["lr"])
        scheduler.step(batch)
    return megatron_rates


@pytest.mark.parametrize(("style", "wsd"), STYLES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_every_style_is_megatrons_one_iteration_earlier(style, wsd, warmup):
    config = OptimizerConfig(
        lr=2e-3,
        min_lr=1e-5,
        lr_decay_style=style,
        lr_wsd_decay_style=wsd,
        lr_warmup_iters=warmup,
        lr_warmup_init=3e-4,
        lr_decay_iters=50,
        lr_wsd_decay_iters=20,
    )
    schedule = schedule_of(config, 60)
    assert [schedule.rate(n) for n in range(1, 60)] == pytest.approx(
        megatrons(schedule, batch=4 if warmup else 1)[1:], rel=1e-12
    )


def test_a_fraction_of_the_decay_is_megatrons_warm_up():
    schedule = schedule_of(OptimizerConfig(lr=1.0, lr_warmup_fraction=0.1, lr_decay_iters=50), 100)
    assert schedule.lr_warmup_iters == 5
    assert schedule_of(OptimizerConfig(lr_warmup_fraction=0.99), 10).lr_warmup_iters == 9


def test_a_run_too_short_for_its_warm_up_and_final_decay_takes_less_and_says_so():
    config = OptimizerConfig(lr_warmup_iters=10)
    decay_iterations = {
        length: schedule_of(config, length).lr_warmup_iters for length in (1, 2, 5, 10, 11, 1000)
    }
    assert decay_iterations == {1: 0, 2: 1, 5: 1, 10: 1, 11: 10, 1000: 10}
    assert shortened(config, 11) == []
    (note,) = shortened(config, 5)
    assert note.startswith(
        "note: lr_warmup_iters is 10, too many for train_iters 5, so this run uses 1"
    )
    config = OptimizerConfig(lr_decay_style="WSD", lr_warmup_iters=10, lr_wsd_decay_iters=20)
    assert schedule_of(config, 5).lr_wsd_decay_iters == 4
    assert [note.split()[1] for note in shortened(config, 5)] == [
        "lr_warmup_iters",
        "lr_wsd_decay_iters",
    ]
    assert schedule_of(config, 5).rate(5) == config.min_lr


def test_a_schedule_taken_over_gives_the_same_rates_in_a_run_of_any_length():
    for style, wsd in STYLES:
        config = OptimizerConfig(
            lr_decay_style=style, lr_wsd_decay_style=wsd, lr_warmup_fraction=0.1
        )
        schedule = schedule_of(config, 40)
        assert schedule_of(schedule.taken_by(OptimizerConfig(lr=7.0)), 300) == schedule
