"""Validation loss, computed every eval_interval iterations and after the last one."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from data.loader import Samples, evaluation_batches
from parallel.data import Runner
from runtime.together import from_first
from runtime.watchdog import Watchdog
from train.batches import Batches, sum_over_ranks
from train.callbacks import Callback, Step, say
from train.callbacks.metrics import RunLog, lacks_validation
from train.ema import Ema
from train.tasks.task import Task


@dataclass(kw_only=True)
class Validation(Callback):
    """Computes the validation loss at intervals, and adds it to the iterations' records."""

    task: Task[Any]
    runner: Runner
    ema: Ema | None
    """EMA of the weights; if it is not None, it is validated in place of the weights."""
    batches: Batches
    data: Samples
    log: RunLog | None
    watchdog: Watchdog
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are recorded with each loss, such as the corpus's unigram entropy."""
    after_validation: Callable[[int], None] | None = None
    """Called with the iteration after a validation, while the EMA is in the model; collective."""

    def on_train_begin(self, iteration: int) -> None:
        """Validate the last iteration before this start, if the run ended during its validation."""
        log = self.log
        if self._is_due(iteration) and from_first(
            lambda: log is not None and lacks_validation(log.records, iteration)
        ):
            figures = self.validate(iteration)
            if figures and log is not None:
                say(self.task.objective.validation_line(log.amend(figures)))

    def on_step_end(self, step: Step) -> None:
        """Validate every eval_interval iterations, and after the last one."""
        if step.last or self._is_due(step.iteration):
            step.wait()
            step.record |= self.validate(step.iteration)

    def _is_due(self, iteration: int) -> bool:
        train = self.task.config.train
        if iteration == 0:
            return False
        return iteration % train.eval_interval == 0 or iteration == train.train_iters

    @torch.no_grad()
    def validate(self, iteration: int) -> dict[str, float]:
        """Return the validation loss, computed with the EMA if there is one, and the constants.

        Returns an empty mapping if the run was stopped before the validation was complete.
        """
        with nullcontext() if self.ema is None else self.ema.in_place():
            loss = self._loss()
            if self.batches.stop.agreed:
                return {}
            if self.after_validation is not None:
                with self.watchdog.paused():
                    self.after_validation(iteration)
        return {"validation_loss": loss, **self.constants}

    def _loss(self) -> float:
        """Return the mean loss over eval_iters validation batches, the same in each validation."""
        mesh = self.task.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        num_tokens = 0
        steps = evaluation_batches(self.data, self.batches.batching, self.task.validation_samples)
        with self.batches.prefetched(steps) as prefetched:
            while (batch := self.batches.take(prefetched)) is not None:
                self.watchdog.beat()
                total += self.runner.forward(batch.micro_batches)
                num_tokens += batch.valid
        return sum_over_ranks(total, mesh).item() / max(num_tokens, 1)
