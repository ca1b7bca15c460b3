"""A run that goes on keeps its schedule if only its length changes; other changes are told."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from data.text.config import DataConfig
from parallel.mesh import MeshConfig
from train.callbacks.health import RunProgress
from train.checkpoint.api import CheckpointConfig
from train.checkpoint.manifest import CheckpointError
from train.config.derive import IMPORTED, config_as_trained
from train.config.entries import Config, TrainConfig
from train.config.finalize import config_to_save
from train.config.flags import ConfigError
from train.config.language import parse_args
from train.optimizers.config import OptimizerConfig
from train.resume import schedule
from train.resume.settings import changes, check_allowed, checkpoint_extra
from train.run import claim_folder, open_log
from train.schedule import schedule_of

PATH = Path("runs/x/iter_0000120")


def config(train_iters=120, **optimizer):
    settings = {"lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 10} | optimizer
    return Config(optimizer=OptimizerConfig(**settings), train=TrainConfig(train_iters=train_iters))


ENDLESS = ("constant", "inverse-square-root")


def saved(before, contents=None):
    return json.loads(json.dumps(checkpoint_extra(before, contents or {})))


def continued(now, path, extra, iteration):
    optimizer, note = schedule.choose_schedule(
        now.optimizer, now.train.train_iters, path, extra, iteration
    )
    return replace(now, optimizer=optimizer), note or ""


def rate(goes_on, iteration):
    return schedule_of(goes_on.optimizer, goes_on.train.train_iters).rate(iteration)


def test_a_longer_or_shorter_run_stays_on_the_schedule_that_it_began_with():
    goes_on, note = continued(config(240), PATH, saved(config(120)), 120)
    assert [rate(goes_on, n) for n in (60, 121, 240)] == [rate(config(120), 60), 2e-4, 2e-4]
    assert note == (
        "note: lr at iteration 121 is 2.000000E-04 by the checkpoint's schedule (2.000000E-04 "
        "after iteration 120) "
        "and 1.149148E-03 by this configuration's (lr_decay_iters was 120 and is 240): the "
        "checkpoint's is kept; --override-opt-param-scheduler takes this configuration's"
    )
    # Stopped and begun again by the same command, and longer still: the first schedule stays.
    for length in (240, 360):
        assert rate(continued(config(length), PATH, saved(goes_on), 180)[0], 181) == 2e-4
    for min_rate in (2e-4, 0.0):  # or would come to 0 after its end
        shorter, note = continued(
            config(90, min_lr=min_rate), PATH, saved(config(120, min_lr=min_rate)), 60
        )
        assert [rate(shorter, n) for n in (80, 90)] == [
            rate(config(120, min_lr=min_rate), n) for n in (80, 90)
        ]
        assert note
    goes_on, _ = continued(config(240), PATH, saved(config(5)), 5)  # cut short with its warm-up
    assert schedule_of(goes_on.optimizer, 240) == schedule_of(config(5).optimizer, 5)


@pytest.mark.parametrize(
    "change", [{"lr": 1e-3}, {"lr_decay_style": "WSD"}, {"lr_decay_iters": 300}]
)
def test_a_schedule_that_is_changed_by_name_is_taken_and_the_flag_keeps_the_old_one(change):
    now = config(240, **change)
    goes_on, note = continued(now, PATH, saved(config(120)), 60)
    assert goes_on == now
    assert (
        f"is {rate(config(120), 61):.6E} by the checkpoint's schedule (2.000000E-04 after "
        f"iteration 120)"
    ) in note
    assert f" and {rate(now, 61):.6E} by this" in note
    for name, value in change.items():
        assert (
            f"{name} was {getattr(schedule_of(config(120).optimizer, 120), name)} and is {value}"
            in note
        )
    assert (
        "this configuration's is taken; --use-checkpoint-opt-param-scheduler keeps the checkpoint's"
    ) in note
    goes_on, note = continued(
        config(240, **change, use_checkpoint_opt_param_scheduler=True), PATH, saved(config(120)), 60
    )
    assert [rate(goes_on, n) for n in (61, 200)] == [rate(config(120), 61), 2e-4]
    assert "the checkpoint's is kept" in note


@pytest.mark.parametrize("iteration", [60, 120])
def test_a_schedule_that_comes_to_0_before_the_end_is_not_gone_on_with_unless_asked_for(iteration):
    now, extra = config(240, min_lr=0.0), saved(config(120, min_lr=0.0))
    goes_on, note = continued(now, PATH, extra, iteration)
    assert goes_on == now
    assert all(rate(goes_on, n) > 0 for n in range(iteration + 1, 240))
    assert "(lr_decay_iters was 120 and is 240): this configuration's is taken" in note
    resumed_config = config(240, min_lr=0.0, use_checkpoint_opt_param_scheduler=True)
    assert rate(continued(resumed_config, PATH, extra, iteration)[0], 121) == 0


@pytest.mark.parametrize(
    ("now", "before", "iteration"),
    [
        *(
            (config(240, lr_decay_style=style), config(lr_decay_style=style), 120)
            for style in ENDLESS
        ),
        *(
            (config(now), config(before), last)
            for before, now, last in ((120, 120, 60), (120, 60, 60), (240, 120, 180))
        ),
        # Schedules that differ and give the same rates: a decay and a warm-up that are over.
        (config(300, lr_decay_iters=120), config(300, lr_decay_iters=110), 120),
        (
            config(240, lr_decay_style="constant", lr_warmup_iters=5),
            config(240, lr_decay_style="constant"),
            20,
        ),
    ],
)
def test_nothing_is_said_where_no_rate_changes_or_nothing_is_left_to_train(now, before, iteration):
    assert continued(now, PATH, saved(before), iteration) == (now, "")
    assert changes(now, saved(now, {"data_path a": "1"}), {"data_path a": "1"}) == {}


def test_a_schedule_that_is_overridden_or_not_kept_is_this_configurations():
    now = config(240, override_opt_param_scheduler=True)
    goes_on, note = continued(now, PATH, saved(config(120)), 120)
    assert goes_on == now
    assert "this configuration's is taken" in note
    # Once taken it is the run's own.
    assert continued(config(240), PATH, saved(now), 130) == (config(240), "")
    early = {"sample_order": config().named(Config.SAMPLE_ORDER), "trained_for": {}}
    assert continued(config(240), PATH, early, 120) == (config(240), "")
    _, note = continued(config(240, use_checkpoint_opt_param_scheduler=True), PATH, early, 120)
    assert note == f"note: {PATH} has no schedule, so this configuration's is used"


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {"lr": "high"},
        {"lr": math.inf},
        {"lr_decay_style": "stepwise"},
        {"lr_warmup_iters": True},
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_name(broken):
    extra = saved(config())
    extra["schedule"] = {**extra["schedule"], **broken} if broken else broken
    with pytest.raises(CheckpointError, match=rf"^{PATH} has an invalid schedule"):
        continued(config(240), PATH, extra, 120)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--weight-decay 0.01", "weight_decay was 0.1 and is 0.01; --weight-decay 0.1 keeps it"),
        ("--adam-beta1 0.8", "adam_beta1 was 0.9 and is 0.8; --adam-beta1 0.9 keeps it"),
        ("--adam-beta2 0.99", "adam_beta2 was 0.95 and is 0.99; --adam-beta2 0.95 keeps it"),
        ("--adam-eps 1e-6", "adam_eps was 1e-08 and is 1e-06; --adam-eps 1e-08 keeps it"),
        ("--clip-grad 0", "clip_grad was 1.0 and is 0.0; --clip-grad 1.0 keeps it"),
        ("--bf16", "bf16 was False and is True; --no-bf16 keeps it"),
        (
            "--global-batch-size 8",
            "global_batch_size was 1 and is 8; --global-batch-size 1 keeps it",
        ),
        ("--eod-mask-loss", "eod_mask_loss was False and is True; --no-eod-mask-loss keeps it"),
        (
            "--reset-attention-mask",
            "reset_attention_mask was False and is True; --no-reset-attention-mask keeps it",
        ),
        (
            "--data-path b",
            "data_path was ['a'] and is ['b']: the samples to come may repeat consumed ones",
        ),
    ],
)
def test_what_changes_is_told_with_the_flag_that_keeps_it(flags, line):
    before = replace(Config(), data=DataConfig(data_path=("a",)))
    now = parse_args(["--data-path", "a", *flags.split()])
    (note,) = changes(now, saved(before), {}).values()
    assert note.startswith(line)


def test_batches_are_compared_as_they_are_whatever_number_of_processes_makes_them():
    """As many micro-batches as there are data-parallel processes are joined by balance_over.

    No flag gives them.
    """
    extra = saved(Config(mesh=MeshConfig(), train=TrainConfig(global_batch_size=4)))
    line = "global_batch_size was 4 and is 1; --global-batch-size 4 keeps it"
    assert changes(Config(), extra, {}) == {"global_batch_size": line}
    before, now = (
        Config(
            mesh=MeshConfig(balance_over="dp_cp"),
            train=TrainConfig(micro_batch_size=size, global_batch_size=8),
        )
        for size in (8, 4)
    )
    changed = changes(now, saved(before), {})
    assert changed == {
        "micro_batch_size": (
            "micro_batch_size was 8 and is 4, counted over all data-parallel processes"
        )
    }
    check_allowed(PATH, changed, ())


def test_files_that_hold_something_else_are_told_by_name(tmp_path):
    for name, content in {"d.idx": "index", "d.bin": "tokens", "t.model": "words"}.items():
        (tmp_path / name).write_text(content)
    data = DataConfig(data_path=(str(tmp_path / "d"),), tokenizer_model=str(tmp_path / "t.model"))
    run = replace(Config(), data=data)
    extra = saved(run, run.contents())
    assert changes(run, extra, run.contents()) == {}
    (tmp_path / "d.bin").write_text("T0kens")
    (tmp_path / "t.model").write_text("other words")
    changed = changes(run, extra, run.contents())
    assert [line.partition(" (digest ")[0] for line in changed.values()] == [
        "tokenizer_model has changed since the run began",
        f"data_path {tmp_path}/d has changed since the run began",
    ]
    with pytest.raises(
        CheckpointError,
        match=r"\. Keep the old values, or give --allow-changed tokenizer_model data_path$",
    ):
        check_allowed(PATH, changed, ())
    with pytest.raises(
        CheckpointError,
        match=r" trained with other settings or files: data_path .* --allow-changed data_path$",
    ):
        check_allowed(PATH, changed, ("tokenizer_model",))
    for allowed in (("all",), ("data_path", "tokenizer_model")):
        check_allowed(PATH, changed, allowed)


def test_an_import_computes_in_bfloat16_on_cuda():
    """Flash kernels take nothing wider, and no flag of a tool that opens it says so."""
    on_gpu, on_cpu = (Config(mesh=MeshConfig(device=device)) for device in ("cuda", "cpu"))
    assert config_as_trained(on_gpu, {IMPORTED: "elsewhere"}).train.bf16
    assert not config_as_trained(on_cpu, {IMPORTED: "elsewhere"}).train.bf16
    assert not config_as_trained(on_gpu, {}).train.bf16


def test_a_start_after_one_that_was_killed_before_its_first_checkpoint_takes_the_folder(tmp_path):
    base, save = tmp_path / "base", tmp_path / "run"
    (base / "iter_0000002").mkdir(parents=True)
    run = Config(
        checkpoint=CheckpointConfig(
            save=str(save), load=str(base), finetune=True, allow_changed=("seed",)
        )
    )
    claim_folder(run)
    log = open_log(run, config_to_save(run, run, 1), RunProgress())
    log.write({"iteration": 1, "lm_loss": 2.0})
    assert "allow_changed = []" in (save / "config.toml").read_text()
    claim_folder(run)
    with pytest.raises(
        ConfigError,
        match=r"but it holds a run \(run-[0-9a-f]{12}\) without a checkpoint; move it away",
    ):
        claim_folder(replace(run, optimizer=OptimizerConfig(lr=1.0)))
    (save / "iter_0000002").mkdir()
    with pytest.raises(
        ConfigError, match="with a checkpoint of iteration 2; continue it with --load"
    ):
        claim_folder(run)
