"""Choose a resumed run's learning rate schedule: the checkpoint's or the configuration's."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from train.checkpoint.manifest import CheckpointError
from train.optimizers.config import OptimizerConfig
from train.schedule import Schedule, schedule_of


def shortened(config: OptimizerConfig, train_iters: int) -> list[str]:
    """Return a note for each setting that is reduced because the run is short."""
    schedule = schedule_of(config, train_iters)
    requested: dict[str, int | None] = {}
    if config.lr_warmup_fraction is None:
        requested["lr_warmup_iters"] = config.lr_warmup_iters
    if schedule.lr_wsd_decay_iters is not None:
        requested["lr_wsd_decay_iters"] = config.lr_wsd_decay_iters

    notes = []
    for name, value in requested.items():
        reduced = getattr(schedule, name)
        if value is not None and reduced < value:
            notes.append(
                f"note: {name} is {value}, too many for train_iters {train_iters}, "
                f"so this run uses {reduced}; --{name.replace('_', '-')} N sets another value"
            )
    return notes


def choose_schedule(
    optimizer: OptimizerConfig, train_iters: int, path: Path, extra: dict[str, Any], iteration: int
) -> tuple[OptimizerConfig, str | None]:
    """Choose the schedule of a resumed run; return the optimizer's settings and a note.

    If only train_iters changed, the checkpoint's schedule is kept, so that the learning rate does
    not jump; but not if this schedule reaches 0 before the longer run ends. If any other setting of
    the schedule changed, the configuration's is used. Both rules are overridden by
    override_opt_param_scheduler (the configuration's) and use_checkpoint_opt_param_scheduler (the
    checkpoint's). Raises CheckpointError if the checkpoint's schedule is not valid.
    """
    configured = schedule_of(optimizer, train_iters)
    saved = _saved_schedule(optimizer, configured, path, extra)
    if saved is None:
        if optimizer.use_checkpoint_opt_param_scheduler:
            note = f"note: {path} has no schedule, so this configuration's is used"
            return optimizer, note
        return optimizer, None

    differing_iteration = _first_difference(saved, configured, iteration, train_iters)
    if differing_iteration is None:
        return optimizer, None

    # If only the length has changed, this configuration with the old length has the saved schedule.
    is_longer_run = schedule_of(optimizer, saved.lr_decay_iters or train_iters) == saved
    keeps_saved = (
        is_longer_run and saved.rate(train_iters) > 0 and not optimizer.override_opt_param_scheduler
    ) or optimizer.use_checkpoint_opt_param_scheduler
    note = _choice_note(saved, configured, differing_iteration, keeps_saved)
    return saved.taken_by(optimizer) if keeps_saved else optimizer, note


def _first_difference(
    saved: Schedule, configured: Schedule, iteration: int, train_iters: int
) -> int | None:
    """Return the first remaining iteration with a different learning rate; None if there is none.

    Compares all remaining iterations, or 100,000 evenly spaced ones if there are more.
    """
    if saved == configured:
        return None
    stride = max(1, (train_iters - iteration) // 100_000)
    for number in range(iteration + 1, train_iters + 1, stride):
        if saved.rate(number) != configured.rate(number):
            return number
    return None


def _choice_note(saved: Schedule, configured: Schedule, iteration: int, keeps_saved: bool) -> str:
    """Return a note with both schedules' rates at an iteration, their settings and the choice."""
    configured_settings = asdict(configured)
    differences = []
    for name, before in asdict(saved).items():
        after = configured_settings[name]
        if before != after:
            differences.append(f"{name} was {before} and is {after}")

    later = ""
    end = saved.lr_decay_iters
    if end is not None:
        later = f" ({saved.rate(end + 1):.6E} after iteration {end})"
    choice = (
        "this configuration's is taken; --use-checkpoint-opt-param-scheduler keeps the checkpoint's"
    )
    if keeps_saved:
        choice = (
            "the checkpoint's is kept; --override-opt-param-scheduler takes this configuration's"
        )

    saved_rate = saved.rate(iteration)
    configured_rate = configured.rate(iteration)
    saved_text = f"{saved_rate:.6E}"
    configured_text = f"{configured_rate:.6E}"
    if saved_text == configured_text:
        saved_text = str(saved_rate)
        configured_text = str(configured_rate)
    return (
        f"note: lr at iteration {iteration} is {saved_text} by the checkpoint's schedule{later} "
        f"and {configured_text} by this configuration's ({', '.join(differences)}): {choice}"
    )


def _saved_schedule(
    optimizer: OptimizerConfig, configured: Schedule, path: Path, extra: dict[str, Any]
) -> Schedule | None:
    """Return the checkpoint's schedule; None for imported weights, which have no schedule."""
    if "schedule" not in extra:
        return None
    try:
        values = {field.name: extra["schedule"][field.name] for field in fields(Schedule)}
        for field in fields(Schedule):
            value: Any = values[field.name]
            field_type: Any = field.type
            has_type = isinstance(value, field_type) and not isinstance(value, bool)
            is_number = isinstance(value, (int, float))
            if not has_type or (is_number and not 0 <= value < 1 << 53):
                raise ValueError(f"{field.name} is {value!r:.40}")
        saved = replace(configured, **values)
        saved.taken_by(optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has an invalid schedule ({type(error).__name__}: {error}); load another "
            "checkpoint"
        ) from error
    return saved
