"""Checkpoints of a run: saves at intervals and at the end, and rollbacks after bad steps."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch.profiler import record_function

from parallel.data import Runner, reshard
from parallel.mesh import Mesh
from runtime.watchdog import Watchdog
from train.batches import StopAgreement, sum_over_ranks
from train.callbacks import SAVING, Callback, Step, say
from train.callbacks.health import Health
from train.callbacks.metrics import RunLog
from train.checkpoint.saving import Saves
from train.config.common import CommonConfig
from train.ema import Ema
from train.resume.settings import AVERAGED, checkpoint_extra
from train.resume.start import Start, find_start


@dataclass(kw_only=True)
class Checkpointing(Callback):
    """Saves a run's checkpoints, but not weights that the last update has broken."""

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
        self._saved_iteration = self._progress.iteration
        """Iteration of the newest checkpoint, not counting local ones."""
        self._last_step: Step | None = None
        """The last step since this start or since a rollback; None before the first."""

    def on_train_begin(self, iteration: int) -> None:
        """Note a resume from a local checkpoint, so that the run's end saves a shared one."""
        if self.config.checkpoint.non_persistent_save_interval and not self.saves.holds(iteration):
            self._saved_iteration = 0

    def on_step_end(self, step: Step) -> None:
        """Save if a save interval ends here; a skipped step is saved only if it is the last one."""
        self._last_step = step
        tier = self.saves.due(step.iteration, step.last)
        if tier is None or (self._progress.skipped_in_a_row and not step.last):
            return
        if not self.health.update_went_wrong(step, self._loss_after_update):
            self._save(tier)

    def on_train_end(self, iteration: int) -> None:
        """Save if the run was stopped between two saves, and finish a save in the background."""
        if self._stopped_unsaved(iteration) and not self._last_update_went_wrong():
            self._save("shared")
        with self.watchdog.paused():
            self.saves.end(iteration)

    def _stopped_unsaved(self, iteration: int) -> bool:
        has_folder = bool(self.config.checkpoint.save)
        return self.stop.agreed and has_folder and iteration > self._saved_iteration

    def _last_update_went_wrong(self) -> bool:
        if self._last_step is None:
            return False
        return self.health.update_went_wrong(self._last_step, self._loss_after_update)

    def roll_back(self) -> None:
        """Return to the newest checkpoint of ``--save`` and report it; collective.

        The position in the data does not go back: the run continues with samples that no step has
        used, since those before the failure may have caused it.
        """
        start = self.start
        progress = self._progress
        checkpoint = self.config.checkpoint
        self._last_step = None

        newest = replace(checkpoint, load=checkpoint.save, ckpt_step=None, finetune=False)
        with self.watchdog.paused():
            self.saves.wait()
            for part in self.runner.parts:
                reshard(part)
            earlier = find_start(self.config, start.architecture, start.contents, newest)
            earlier.load(self.runner.parts, self.optimizer, self.ema)
        skipped_samples = progress.consumed_samples - earlier.progress.consumed_samples
        say(
            f"rolled back from iteration {progress.iteration} to the newest checkpoint; "
            f"the {skipped_samples} samples consumed after that checkpoint are left out"
        )

        progress.iteration = earlier.progress.iteration
        progress.skipped_in_a_row = 0
        is_persistent = self.saves.holds(progress.iteration)
        self._saved_iteration = progress.iteration if is_persistent else 0
        if self.log is not None:
            self.log.rewind(progress.iteration)
        self.health.rolls_back = False

    @torch.no_grad()
    def _loss_after_update(self, step: Step) -> float:
        """Return the mean loss of a step's samples with the updated weights; collective."""
        total = sum_over_ranks(self.runner.forward(step.micro_batches), self.mesh)
        for part in self.runner.parts:
            reshard(part)
        return total.item() / max(step.valid, 1)

    def _save(self, tier: Literal["shared", "local"]) -> None:
        if self.log is not None:
            self.log.sync(draw=tier == "shared")
        start = self.start
        extra: dict[str, Any] = {
            "progress": asdict(self._progress),
            **checkpoint_extra(self.config, start.contents),
            **start.recorded,
        }
        more_tensors = {}
        if self.ema is not None:
            extra[AVERAGED] = self.ema.decay
            more_tensors["ema"] = self.ema.weights

        with record_function(SAVING), self.watchdog.paused():
            self.saves.save(
                tier,
                self._progress.iteration,
                self.runner.parts,
                self.optimizer,
                architecture=start.architecture,
                extra=extra,
                sections=more_tensors,
            )
        if tier == "shared":
            self._saved_iteration = self._progress.iteration
