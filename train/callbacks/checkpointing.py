"""Checkpoints of a run, at their intervals and at its end, and its way back to the newest of them."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch.profiler import record_function

from parallel.data import Runner, reshard
from parallel.mesh import Mesh
from runtime.watchdog import Watchdog
from train.batches import StopAgreement, summed
from train.callbacks import SAVING, Callback, Step, say
from train.callbacks.health import Health
from train.callbacks.metrics import RunLog
from train.checkpoint.saving import Saves
from train.config.common import CommonConfig
from train.ema import Ema
from train.resume import AVERAGED, Start, checkpoint_extra, find_start


@dataclass(kw_only=True)
class Checkpointing(Callback):
    """Saves a run, but for weights whose last update went wrong."""

    config: CommonConfig
    mesh: Mesh
    runner: Runner
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    start: Start
    saves: Saves
    log: RunLog | None
    health: Health
    stop: StopAgreement
    watchdog: Watchdog

    def __post_init__(self) -> None:
        self._progress = self.start.progress
        self._saved = self._progress.iteration
        """The iteration of the newest checkpoint, not counting local ones."""
        self._step: Step | None = None
        """The last one since this start, or since the run was rolled back."""

    def on_train_begin(self, iteration: int) -> None:
        """Find out whether the run goes on from a local checkpoint, which its end then replaces."""
        if self.config.checkpoint.non_persistent_save_interval and not self.saves.holds(iteration):
            self._saved = 0

    def on_step_end(self, step: Step) -> None:
        """Save where an interval has come, but not after a skipped step, unless it is the last."""
        self._step = step
        tier = self.saves.due(step.iteration, step.last)
        if tier is None or (self._progress.skipped_in_a_row and not step.last):
            return
        if not self.health.update_went_wrong(step, self._loss_of):
            self._save(tier)

    def on_train_end(self, iteration: int) -> None:
        """Save where the run was told to stop between two saves, and finish the one under way."""
        owed = self.stop.agreed and self.config.checkpoint.save and iteration > self._saved
        if owed and not (self._step and self.health.update_went_wrong(self._step, self._loss_of)):
            self._save("shared")
        with self.watchdog.paused():
            self.saves.end(iteration)

    def roll_back(self) -> None:
        """Go on from the newest checkpoint of ``--save`` with samples that no step has had, and say
        so; collective.
        """
        parts, start, progress, checkpoint = (
            self.runner.parts,
            self.start,
            self._progress,
            self.config.checkpoint,
        )
        self._step = None
        newest = replace(checkpoint, load=checkpoint.save, ckpt_step=None, finetune=False)
        with self.watchdog.paused():
            self.saves.wait()
            for part in parts:
                reshard(part)
            earlier = find_start(self.config, start.architecture, start.contents, newest)
            earlier.load(parts, self.optimizer, self.ema)
        left = progress.consumed_samples - earlier.progress.consumed_samples
        say(
            f"rolled back from iteration {progress.iteration}; the {left} samples since are left out"
        )
        progress.iteration, progress.skipped_in_a_row = earlier.progress.iteration, 0
        self._saved = progress.iteration if self.saves.holds(progress.iteration) else 0
        if self.log is not None:
            self.log.rewind(progress.iteration)
        self.health.rolls_back = False

    @torch.no_grad()
    def _loss_of(self, step: Step) -> float:
        """Return the mean loss of a step's samples with the weights of now; collective."""
        total = summed(self.runner.forward(step.micro_batches), self.mesh)
        for part in self.runner.parts:
            reshard(part)
        return total.item() / max(step.valid, 1)

    def _save(self, tier: Literal["shared", "local"]) -> None:
        if self.log is not None:
            self.log.sync(draw=tier == "shared")
        start, ema = self.start, self.ema
        extra = {
            "progress": asdict(self._progress),
            **checkpoint_extra(self.config, start.contents),
            **start.recorded,
        }
        with record_function(SAVING), self.watchdog.paused():
            self.saves.save(
                tier,
                self._progress.iteration,
                self.runner.parts,
                self.optimizer,
                architecture=start.architecture,
                extra=extra if ema is None else extra | {AVERAGED: ema.decay},
                sections={} if ema is None else {"ema": ema.weights},
            )
        if tier == "shared":
            self._saved = self._progress.iteration
