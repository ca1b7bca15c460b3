"""Learning-rate schedules of Megatron as functions of the iteration alone."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from checkpoint.manifest import CheckpointError
from train.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of a learning-rate schedule without defaults that depend on train_iters; OptimizerConfig's names.

    The formulas are those of ``megatron.core.optimizer_param_scheduler``, which counts completed iterations: its rate
    in iteration n + 1 is the one here in iteration n, so that a warm-up's first iteration learns.
    """

    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_iters: int
    lr_warmup_init: float
    lr_decay_iters: int | None
    """None if the style has no end."""
    lr_wsd_decay_iters: int | None
    """None if the style is not WSD."""
    lr_wsd_decay_style: str

    def rate(self, iteration: int) -> float:
        """Return the learning rate of ``iteration``; the first is 1."""
        warmup, style, end = self.lr_warmup_iters, self.lr_decay_style, self.lr_decay_iters
        if iteration <= warmup:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * iteration / warmup
        if style == "constant":
            return self.lr
        if end is not None and iteration > end:
            return self.min_lr
        if style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(warmup, 1) / iteration))
        return self.min_lr + (self.lr - self.min_lr) * self._share(iteration)

    def _share(self, iteration: int) -> float:
        """Return the share of the way from min_lr to lr that is left; 1 where the decay begins, 0 where it ends."""
        assert self.lr_decay_iters is not None
        style, begin = self.lr_decay_style, self.lr_warmup_iters
        if style == "WSD":
            assert self.lr_wsd_decay_iters is not None
            style, begin = self.lr_wsd_decay_style, self.lr_decay_iters - self.lr_wsd_decay_iters
        decay = self.lr_decay_iters - begin
        progress = max(0.0, (iteration - begin) / decay)
        if style == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if style == "exponential":
            return 2 * 0.5**progress - 1
        if style == "minus_sqrt":
            return 1 - math.sqrt(progress)
        return min(1.0, (decay - (iteration - begin)) / decay)

    def taken_by(self, config: OptimizerConfig) -> OptimizerConfig:
        """Return ``config`` with this schedule."""
        return replace(config, **asdict(self), lr_warmup_fraction=None)


def schedule_of(config: OptimizerConfig, train_iters: int) -> Schedule:
    """Return the schedule of a run of ``train_iters`` iterations.

    If lr_decay_iters is not set, a run too short for its warm-up takes a tenth of its iterations instead, and caps
    lr_wsd_decay_iters at the rest: a shorter run needs no other configuration. The default of lr_wsd_decay_iters never
    reaches into the warm-up.
    """
    end = config.lr_decay_iters or train_iters
    warmup = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup = min(round(config.lr_warmup_fraction * end), end - 1)
    decay = config.lr_wsd_decay_iters or max(1, end // 10)
    if config.lr_decay_iters is None:
        warmup = warmup if warmup < end else min(max(1, end // 10), end - 1)
    if config.lr_decay_iters is None or config.lr_wsd_decay_iters is None:
        decay = max(1, min(decay, end - warmup))
    wsd = config.lr_decay_style == "WSD"
    endless = config.lr_decay_style == "inverse-square-root" and config.lr_decay_iters is None
    return Schedule(
        lr=config.lr,
        min_lr=config.min_lr,
        lr_decay_style=config.lr_decay_style,
        lr_warmup_iters=warmup,
        lr_warmup_init=config.lr_warmup_init,
        lr_decay_iters=None if endless or config.lr_decay_style == "constant" else end,
        lr_wsd_decay_iters=decay if wsd else None,
        lr_wsd_decay_style=config.lr_wsd_decay_style if wsd else "linear",
    )


def shortened(config: OptimizerConfig, train_iters: int) -> list[str]:
    """Return a note for each setting that a short run reduces."""
    schedule = schedule_of(config, train_iters)
    wanted: dict[str, int | None] = {
        "lr_warmup_iters": config.lr_warmup_iters if config.lr_warmup_fraction is None else None
    }
    if schedule.lr_wsd_decay_iters is not None:
        wanted["lr_wsd_decay_iters"] = config.lr_wsd_decay_iters
    return [
        f"note: {name} is {value}, too many for train_iters {train_iters}: it is {taken} in this run; "
        f"--{name.replace('_', '-')} N chooses another"
        for name, value in wanted.items()
        if value is not None and (taken := getattr(schedule, name)) < value
    ]


def continued(
    optimizer: OptimizerConfig, train_iters: int, path: Path, extra: dict[str, Any], iteration: int
) -> tuple[OptimizerConfig, str | None]:
    """Choose the schedule of a run from ``iteration`` of a checkpoint on; return it and a note on the choice.

    The checkpoint's, if only train_iters changed, so that a longer run has no jump, unless its learning rate reaches 0
    before the run ends; the configuration's, if anything else of it changed. The flags of OptimizerConfig override.
    Raises CheckpointError: the checkpoint's schedule is not valid.
    """
    own = schedule_of(optimizer, train_iters)
    before = _saved_schedule(optimizer, own, path, extra)
    if before is None:
        wanted = optimizer.use_checkpoint_opt_param_scheduler
        return optimizer, f"note: {path} keeps no schedule: this configuration's is taken" if wanted else None
    ahead = range(iteration + 1, train_iters + 1)[:: max(1, (train_iters - iteration) // 100_000)]  # each, or some
    differs = next((n for n in ahead if before.rate(n) != own.rate(n)), None) if before != own else None
    if differs is None:
        return optimizer, None
    longer = schedule_of(optimizer, before.lr_decay_iters or train_iters) == before
    keep = longer and before.rate(train_iters) > 0 and not optimizer.override_opt_param_scheduler
    keep |= optimizer.use_checkpoint_opt_param_scheduler
    other = asdict(own)
    differing = [f"{name} was {was} and is {other[name]}" for name, was in asdict(before).items() if was != other[name]]
    end = before.lr_decay_iters
    later = f" ({before.rate(end + 1):.6E} after iteration {end})" if end is not None else ""
    choice = (
        "it goes on with the checkpoint's; --override-opt-param-scheduler takes the other"
        if keep
        else "it goes on with this configuration's; --use-checkpoint-opt-param-scheduler keeps the checkpoint's"
    )
    rates = before.rate(differs), own.rate(differs)
    there, here = (f"{rate:.6E}" for rate in rates)
    there, here = (there, here) if there != here else map(str, rates)
    note = (
        f"note: lr at iteration {differs} is {there} by the checkpoint's schedule{later} and {here} by this "
        f"configuration's ({', '.join(differing)}): {choice}"
    )
    return before.taken_by(optimizer) if keep else optimizer, note


def _saved_schedule(optimizer: OptimizerConfig, own: Schedule, path: Path, extra: dict[str, Any]) -> Schedule | None:
    """Return the saved schedule; None in a checkpoint of imported weights."""
    if "schedule" not in extra:
        return None
    try:
        known = {field.name: extra["schedule"][field.name] for field in fields(Schedule)}
        for field in fields(Schedule):
            value: Any = known[field.name]
            fits = isinstance(value, field.type) and not isinstance(value, bool)  # type: ignore[arg-type]
            if not fits or (isinstance(value, (int, float)) and not 0 <= value < 1 << 53):
                raise ValueError(f"{field.name} is {value!r:.40}")
        before = replace(own, **known)
        before.taken_by(optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} keeps a schedule that makes no sense ({type(error).__name__}: {error}); load another one"
        ) from error
    return before
