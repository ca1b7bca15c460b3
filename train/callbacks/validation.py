"""The validation loss every so many iterations, and after the last one."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from data.loader import Samples, evaluation_batches
from parallel.data import Runner
from runtime.together import from_first
from runtime.watchdog import Watchdog
from train.batches import Batches, summed
from train.callbacks import Callback, Step, say
from train.callbacks.metrics import RunLog, lacks_validation
from train.ema import Ema
from train.tasks.task import Task


@dataclass(kw_only=True)
class Validation(Callback):
    """Adds a validation's figures to the records of its iterations."""

    task: Task[Any]
    runner: Runner
    ema: Ema | None
    """Averages of the weights, which are validated in their place."""
    batches: Batches
    data: Samples
    log: RunLog | None
    watchdog: Watchdog
    constants: Mapping[str, float] = field(default_factory=dict)
    """Figures recorded with each loss, such as the corpus's unigram entropy."""
    then: Callable[[int], None] | None = None
    """Called with the iteration after a validation, while the averages are in place; collective."""

    def on_train_begin(self, iteration: int) -> None:
        """Validate the last iteration before this start if it was ended meanwhile."""
        log = self.log
        if self._is_due(iteration) and from_first(
            lambda: log is not None and lacks_validation(log.records, iteration)
        ):
            found = self.validate(iteration)
            if found and log is not None:
                say(self.task.objective.validation_line(log.amend(found)))

    def on_step_end(self, step: Step) -> None:
        """Validate every eval_interval iterations, and after the last one."""
        if step.last or self._is_due(step.iteration):
            step.wait()
            step.record |= self.validate(step.iteration)

    def _is_due(self, iteration: int) -> bool:
        train = self.task.config.train
        return iteration > 0 and (
            iteration % train.eval_interval == 0 or iteration == train.train_iters
        )

    @torch.no_grad()
    def validate(self, iteration: int) -> dict[str, float]:
        """Return the validation loss, of the averages of the weights where they are kept, and the
        constants.

        Nothing where the run was told to end before it was over.
        """
        with nullcontext() if self.ema is None else self.ema.in_place():
            loss = self._loss()
            if self.batches.stop.agreed:
                return {}
            if self.then is not None:
                with self.watchdog.paused():
                    self.then(iteration)
        return {"validation_loss": loss, **self.constants}

    def _loss(self) -> float:
        """Return the mean loss over the first eval_iters global batches of the validation data,
        always the same.
        """
        mesh, wanted = self.task.mesh, self.task.validation_samples
        total, tokens = torch.zeros((), dtype=torch.float64, device=mesh.device), 0
        with self.batches.prefetched(
            evaluation_batches(self.data, self.batches.batching, wanted)
        ) as steps:
            while (batch := self.batches.take(steps)) is not None:
                self.watchdog.beat()
                total += self.runner.forward(batch.micro_batches)
                tokens += batch.valid
        return summed(total, mesh).item() / max(tokens, 1)
