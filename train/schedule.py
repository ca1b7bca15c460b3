"""Learning rate schedules: their settings, and the rate of each iteration."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeVar, get_args

from runtime.errors import UserError, at_least, require

DecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Settings of the learning rate."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: DecayStyle = "cosine"
    """Shape after the warm-up: cosine or linear to min_lr, constant, inverse-square-root, or WSD
    (warm-up, stable, decay)."""
    lr_warmup_iters: int = 0
    """Number of iterations of linear warm-up; a run that is too short for it uses a tenth of its
    iterations instead."""
    lr_warmup_fraction: float | None = None
    """Length of the warm-up as a share of lr_decay_iters, in [0, 1); replaces lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_decay_iters: int | None = None
    """Iteration at which the decay ends; by default train_iters, and in a resumed run the first
    start's value."""
    lr_wsd_decay_iters: int | None = None
    """Number of iterations of WSD's final decay; by default a tenth of lr_decay_iters."""
    lr_wsd_decay_style: WsdDecayStyle = "linear"
    """Shape of WSD's final decay."""
    override_opt_param_scheduler: bool = False
    """On resume, use this configuration's schedule, even if only train_iters differs."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, use the checkpoint's schedule, whatever this configuration says."""

    def __post_init__(self) -> None:
        require(self, self.lr > 0, "lr", "it must be above 0")
        at_least(self, 0, "min_lr", "lr_warmup_iters", "lr_warmup_init")
        for name in ("min_lr", "lr_warmup_init"):
            fix = f"it must not exceed lr, which is {self.lr}"
            require(self, getattr(self, name) <= self.lr, name, fix)
        at_least(self, 1, "lr_decay_iters", "lr_wsd_decay_iters")

        for name, styles in (("lr_decay_style", DecayStyle), ("lr_wsd_decay_style", WsdDecayStyle)):
            choices = get_args(styles)
            fix = f"it must be one of {', '.join(choices)}"
            require(self, getattr(self, name) in choices, name, fix)

        fraction = self.lr_warmup_fraction
        if fraction is not None:
            require(self, 0 <= fraction < 1, "lr_warmup_fraction", "it must be in [0, 1)")
            fix = f"it must be 0 with lr_warmup_fraction {fraction}; give --lr-warmup-iters 0, or "
            fix += "--lr-warmup-fraction none"
            require(self, not self.lr_warmup_iters, "lr_warmup_iters", fix)

        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise UserError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are set, but "
                "the first uses this configuration's schedule and the second the checkpoint's; "
                "leave one of them out"
            )


AnySchedule = TypeVar("AnySchedule", bound=ScheduleConfig)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate schedule with all defaults resolved: it no longer depends on train_iters.

    The formulas are those of ``megatron.core.optimizer_param_scheduler``, one iteration earlier:
    Megatron counts completed iterations, so its rate in iteration n + 1 is the one here in
    iteration n. Here the first iteration of a warm-up thus has a rate above lr_warmup_init. Names
    are those of ``ScheduleConfig``.
    """

    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_iters: int
    lr_warmup_init: float
    lr_decay_iters: int | None
    """None if the schedule has no end."""
    lr_wsd_decay_iters: int | None
    """None if lr_decay_style is not WSD."""
    lr_wsd_decay_style: str

    def rate(self, iteration: int) -> float:
        """Return the learning rate of ``iteration``; the first iteration is 1."""
        warmup = self.lr_warmup_iters
        style = self.lr_decay_style
        end = self.lr_decay_iters
        if iteration <= warmup:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * iteration / warmup
        if style == "constant":
            return self.lr
        if end is not None and iteration > end:
            return self.min_lr
        if style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(warmup, 1) / iteration))
        return self.min_lr + (self.lr - self.min_lr) * self._decay_factor(iteration)

    def _decay_factor(self, iteration: int) -> float:
        """Return the factor on lr - min_lr: 1 until the decay begins, 0 at its end."""
        assert self.lr_decay_iters is not None
        style = self.lr_decay_style
        begin = self.lr_warmup_iters
        if style == "WSD":
            assert self.lr_wsd_decay_iters is not None
            style = self.lr_wsd_decay_style
            begin = self.lr_decay_iters - self.lr_wsd_decay_iters
        decay = self.lr_decay_iters - begin
        progress = max(0.0, (iteration - begin) / decay)
        if style == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if style == "exponential":
            return 2 * 0.5**progress - 1
        if style == "minus_sqrt":
            return 1 - math.sqrt(progress)
        return min(1.0, (decay - (iteration - begin)) / decay)

    def taken_by(self, config: AnySchedule) -> AnySchedule:
        """Return a copy of ``config`` with the settings of this schedule."""
        return replace(config, **asdict(self), lr_warmup_fraction=None)


def schedule_of(config: ScheduleConfig, train_iters: int) -> Schedule:
    """Return the schedule of a run of ``train_iters`` iterations.

    If lr_decay_iters is not set, a run too short for its warm-up uses a tenth of its iterations for
    it, and caps lr_wsd_decay_iters at the rest. So a short trial can use a long run's
    configuration. The default of lr_wsd_decay_iters never reaches into the warm-up.
    """
    end = config.lr_decay_iters or train_iters
    warmup = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup = min(round(config.lr_warmup_fraction * end), end - 1)
    decay = config.lr_wsd_decay_iters or max(1, end // 10)
    if config.lr_decay_iters is None and warmup >= end:
        warmup = min(max(1, end // 10), end - 1)
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
