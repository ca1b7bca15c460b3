"""A run's saves, as their intervals come and at its end, and its way back to the newest of them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import nn
from torch.profiler import record_function

from checkpoint.saving import Saves
from parallel.data import reshard
from runtime.watchdog import Watchdog
from train.config.common import CommonConfig
from train.ema import Ema
from train.resume import AVERAGED, Start, checkpoint_extra, roll_back
from train.watching.health import Health, Progress
from train.watching.metrics import RunLog
from train.watching.moments import SAVING, Step, Watcher
from train.watching.stop import StopAgreement


class BackgroundSave(Watcher):
    """Goes on with the save under way once all ranks can, with --async-save."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves

    def ask(self) -> Sequence[bool]:
        """Tell whether its next step waits for the other ranks alone."""
        return [self._saves.ready]

    def hear(self, counts: Sequence[int]) -> bool:
        """Take that step if all are ready. Raises CheckpointError on every rank if it could not be written."""
        self._saves.agree(counts[0])
        return False


@dataclass(kw_only=True)
class Saving(Watcher):
    """Saves a run, but for weights whose last update went wrong."""

    start: Start[CommonConfig]
    saves: Saves
    progress: Progress
    parts: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    log: RunLog | None
    health: Health
    stop: StopAgreement
    watchdog: Watchdog
    loss_of: Callable[[Step], float]
    """Computes the loss of a step's samples again, with the weights of now; collective."""

    def __post_init__(self) -> None:
        self._saved = self.progress.iteration
        """The iteration of the newest checkpoint, not counting local ones."""
        self._step: Step | None = None
        """The last one since this start, or since the run was rolled back."""

    def begin(self) -> None:
        """Find out whether the run goes on from a local checkpoint, which its end then replaces."""
        if self.start.config.checkpoint.non_persistent_save_interval and not self.saves.holds(self._saved):
            self._saved = 0

    def after(self, step: Step) -> None:
        """Save where an interval has come, but not after a skipped step, unless it is the last."""
        self._step = step
        tier = self.saves.due(step.iteration, step.last)
        if tier is None or (self.progress.skipped_in_a_row and not step.last):
            return
        if not self.health.update_went_wrong(step, self.loss_of):
            self._save(tier)

    def end(self, iteration: int) -> None:
        """Save where the run was told to stop between two saves, and finish the one under way."""
        owed = self.stop.agreed and self.start.config.checkpoint.save and iteration > self._saved
        if owed and not (self._step and self.health.update_went_wrong(self._step, self.loss_of)):
            self._save("shared")
        with self.watchdog.paused():
            self.saves.end(iteration)

    def roll_back(self) -> None:
        """Go on from the newest checkpoint with samples that no step has had; collective."""
        self._step = None
        with self.watchdog.paused():
            self.saves.wait()
        for part in self.parts:
            reshard(part)
        with self.watchdog.paused():
            roll_back(self.start, self.progress, self.parts, self.optimizer, self.ema)
        self._saved = self.progress.iteration if self.saves.holds(self.progress.iteration) else 0
        if self.log is not None:
            self.log.rewind(self.progress.iteration)
        self.health.rolls_back = False

    def _save(self, tier: Literal["shared", "local"]) -> None:
        if self.log is not None:
            self.log.sync(draw=tier == "shared")
        averaged, config = {} if self.ema is None else {AVERAGED: self.ema.decay}, self.start.config
        with record_function(SAVING), self.watchdog.paused():
            self.saves.save(
                tier,
                self.progress.iteration,
                self.parts,
                self.optimizer,
                architecture=self.start.architecture,
                extra={"progress": asdict(self.progress), **checkpoint_extra(config, self.start.contents)} | averaged,
                more={} if self.ema is None else {"ema": self.ema.weights},
            )
        if tier == "shared":
            self._saved = self.progress.iteration
