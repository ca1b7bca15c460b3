"""The training loop that every entry shares."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.saving import Saves
from data.loader import Batch, Batching, Samples, batches, evaluation_batches
from parallel.data import reshard
from parallel.mesh import Mesh
from parallel.pipeline.runner import Runner
from runtime.errors import UserError
from runtime.signals import Notice
from runtime.together import from_first, raise_together
from runtime.watchdog import Watchdog
from train.ahead import Ahead
from train.config.common import CommonConfig
from train.ema import Ema
from train.ending import Ending
from train.objectives.base import Objective
from train.optim import finish_step
from train.resume import AVERAGED, kept, resume, rolled_back
from train.schedule import schedule_of
from train.watching.health import Health, Progress
from train.watching.metrics import RunLog, memory_gb
from train.watching.peak import peak_flops
from train.watching.profile import DATA, SAVING, UPDATE, Profiler
from train.watching.progress import ProgressLines, few_samples


@dataclass(kw_only=True)
class Trainer:
    """A run with everything built, ready to train."""

    config: CommonConfig
    mesh: Mesh
    runner: Runner
    optimizer: torch.optim.Optimizer
    objective: Objective
    train_data: Samples
    valid_data: Samples | None
    architecture: dict[str, Any]
    flops_per_token: Callable[[int], float]
    """FLOPs of training on one token of a document of so many."""
    log: RunLog | None
    """On the first rank; None elsewhere."""
    validation_constants: dict[str, float] = field(default_factory=dict)
    """Figures recorded with each validation loss, such as the corpus's unigram entropy."""
    ema: Ema | None = None
    """Averages of the weights, used in validation."""
    after_validation: Callable[[int], None] | None = None
    """Called on every rank with the iteration after a validation, while the averages are in place."""
    progress: Progress = field(default_factory=Progress)
    contents: dict[str, str] = field(default_factory=dict)
    """Digests of the training files, for checkpoints."""
    peak_flops: float | None = None
    """FLOP/s per process that MFU is measured against; None: found as the run starts."""
    _ending: Ending = field(default_factory=lambda: Ending(Notice(), None), init=False)
    _watchdog: Watchdog = field(default_factory=lambda: Watchdog(0, 0, None), init=False)
    _begun: int = field(default=0, init=False)
    """The iteration that this start of the run goes on from."""
    _saved: int = field(default=0, init=False)
    """The iteration of the newest checkpoint, not counting local ones."""
    _last: tuple[list[Batch], int, float] = field(default=([], 0, 0.0), init=False)
    """The last step's micro-batches, all ranks' valid tokens in them, and their loss before the update."""

    @property
    def global_batch_size(self) -> int:
        """Return the sequences per iteration."""
        return self.config.train.batch_size(self.mesh.dp.size())

    def run(self, notice: Notice | None = None) -> None:
        """Train from ``progress`` to train_iters, or until told to stop; save the last iteration.

        A signal in ``notice`` on any rank, or the end of exit_duration_in_mins, ends all ranks before their next step.
        """
        config, progress = self.config, self.progress
        notice = notice or Notice()
        notice.works = True
        self._ending = Ending(notice, config.train.exit_duration_in_mins)
        self._begun = self._saved = progress.iteration
        if config.checkpoint.non_persistent_save_interval and not self._saves.holds(progress.iteration):
            self._saved = 0  # it went on from a local one
        good = self.log.good_steps(self.objective.loss_name) if self.log else []
        self._health = Health(config.health, config.checkpoint.save, good)
        if self.peak_flops is None:
            self.peak_flops = peak_flops(self.mesh.device, torch.bfloat16 if config.train.bf16 else torch.float32)
        processor = "GPU" if self.mesh.device.type == "cuda" else "process"
        lines = ProgressLines(type(self.objective), config.train.train_iters, config.logging.log_interval, processor)
        there = None if self.valid_data is None else len(self.valid_data)
        if note := few_samples(progress.iteration, config.train, there, self._wanted):
            self._say(note)
        if self.valid_data is not None and self._owes_validation() and (found := self._validate(self.valid_data)):
            self._say(self.objective.validation_line(self.log.amend(found)) if self.log else "")
        limits = config.health.watchdog_factor, config.health.watchdog_min_seconds
        with self._saves.finished(), Watchdog(*limits, config.checkpoint.save) as self._watchdog:
            while self._train(lines, self.peak_flops):
                self._roll_back()
            self._profiler.end(self.progress.iteration + 1)
            owed = self._ending.agreed and config.checkpoint.save and self.progress.iteration > self._saved
            if owed and not self._is_bad():
                self._save()
            with self._watchdog.paused():
                self._saves.end(self.progress.iteration)
        if self._ending.agreed:
            self._say(f"ended early after iteration {self.progress.iteration}: {self._ending.why()}; --load goes on")

    def _train(self, lines: ProgressLines, peak: float) -> bool:
        """Train until the run ends, or is to roll back: then return True."""
        config, progress = self.config, self.progress
        left = max(0, config.train.train_iters - progress.iteration)
        with self._local(islice(batches(self.train_data, self._batching, progress.consumed_samples), left)) as steps:
            while progress.iteration < config.train.train_iters and not self._ending.agreed:
                self._profiler.before(progress.iteration + 1)
                record = self._iteration(steps, peak)
                if record is None:
                    return not self._ending.agreed
                stop = progress.iteration % (config.train.exit_interval or progress.iteration + 1) == 0
                last = stop or progress.iteration == config.train.train_iters
                if self.valid_data is not None and (last or progress.iteration % config.train.eval_interval == 0):
                    steps.wait()
                    record |= self._validate(self.valid_data)
                record |= self._profiler.stragglers.step(progress.iteration, record["iteration_time_ms"], last)
                self._report(record, lines.add(record, time.monotonic(), last))
                tier = self._saves.due(progress.iteration, last)
                if tier is not None and (last or not progress.skipped_in_a_row):
                    if self._is_bad():
                        return True
                    self._save(tier)
                if stop:
                    break
        return False

    @torch.no_grad()
    def _is_bad(self) -> bool:
        """Whether the last update made weights that are not to be saved, and the run is to roll back; collective.

        Costs a forward of the last step's samples. Raises TrainingError where the policy ends the run.
        """
        micro_batches, valid, before = self._last
        if self.progress.skipped_in_a_row or not micro_batches:
            return False  # the weights are those before it, or those of the checkpoint: no step was made
        after = self._over_all(self.runner.forward(micro_batches)).item() / max(valid, 1)
        for part in self.runner.parts:
            reshard(part)
        at = self.progress.iteration
        why = self._health.judge_update(before, after)
        return bool(why) and self._health.fail(at, at - 1, f"iteration {at} is not saved: {why}")

    def _roll_back(self) -> None:
        """Go on from the newest checkpoint with samples that no step has had; collective."""
        with self._watchdog.paused():
            self._saves.wait()
        for part in self.runner.parts:
            reshard(part)
        run = (self.runner.parts, self.optimizer, self.architecture, self.contents, self.ema)
        with self._watchdog.paused():
            self.progress = rolled_back(self.config, self.progress, lambda config: resume(config, *run))
        self._saved = self.progress.iteration if self._saves.holds(self.progress.iteration) else 0
        if self.log is not None:
            self.log.rewind(self.progress.iteration)

    def _local(self, steps: Iterator[list[Batch]]) -> Ahead[list[Batch]]:
        """Return this rank's parts of the micro-batches of each step, made while the step before runs."""
        return Ahead(([self.objective.local(batch) for batch in step] for step in steps), self.mesh.device)

    def _iteration(self, steps: Iterator[list[Batch]], peak: float) -> dict[str, Any] | None:
        """Take one optimizer step and return its record; None where the run is told to end, or to roll back."""
        start = time.perf_counter()
        micro_batches, valid, flops = self._next_step(steps)
        if self._ending.agreed:
            return None
        self.progress.iteration += 1
        rate = schedule_of(self.config.optimizer, self.config.train.train_iters).rate(self.progress.iteration)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, norm = self._forward_backward(micro_batches, valid)
        self._last = micro_batches, valid, loss
        why = self._health.judge(loss, norm)
        with self._profiler.part(UPDATE):
            if not why:
                self.optimizer.step()
                if self.ema is not None:
                    self.ema.update()
            self.optimizer.zero_grad(set_to_none=True)
        tokens = self.global_batch_size * self.config.sequence_length
        self.progress.consumed_samples += self.global_batch_size
        self.progress.consumed_tokens += tokens
        if self._health.count(self.progress, why):
            return None
        seconds = time.perf_counter() - start
        self._watchdog.beat(seconds)
        flops /= seconds * dist.get_world_size()
        return {
            **asdict(self.progress),
            self.objective.loss_name: loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "iteration_time_ms": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
            "samples_per_second": self.global_batch_size / seconds,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / peak,
            "memory_gb": memory_gb(self.mesh.device),
        }

    def _next_step(self, steps: Iterator[list[Batch]]) -> tuple[list[Batch], int, float]:
        """Return a step's micro-batches (none at the end, on all ranks alike), and all ranks' valid tokens and FLOPs.

        A bad sample on one rank raises the same error on all: its flag travels with the count, at no cost.
        So do requests to end: then all ranks have ``_ending.agreed``, and there is no step to take.
        """
        error: Exception | None = None
        micro_batches: list[Batch] = []
        try:
            with self._profiler.part(DATA):
                micro_batches = next(steps, [])
        except (UserError, RuntimeError) as caught:  # a sample, its plan, or memory for its copy on the device
            error = caught
        flags = [error is not None, self._saves.ready, *self._ending.flags(self.progress.iteration > self._begun)]
        lengths = [length for local in micro_batches for length in self.objective.lengths(local)]
        flops = sum(length * self.flops_per_token(length) for length in lengths) / self.mesh.cp.size()
        counted = [sum(map(self.objective.count, micro_batches)), flops, *flags]
        counts = torch.tensor(counted, dtype=torch.float64)  # not on the device, whose queue it would wait for
        dist.all_reduce(counts)  # over tp too: it counts the same tokens again, but one rank alone may fail
        valid, flops, failed, ready, *asked = counts.tolist()
        self._watchdog.beat()
        self._saves.agree(int(ready))
        self._ending.agree([int(count) for count in asked])
        if self._ending.agreed:
            return [], 0, 0.0
        again = dist.get_world_size() // self.mesh.dp_cp.size()
        if failed:
            with raise_together():
                if error is not None:
                    raise error
        return micro_batches, int(valid) // again, flops / again

    def _forward_backward(self, micro_batches: list[Batch], valid: int) -> tuple[float, float]:
        """Accumulate and clip the gradients of the mean loss over ``valid`` tokens; return the loss and their norm."""
        total = self._over_all(self.runner.forward_backward(micro_batches, max(valid, 1)))
        strategy, largest = self.config.data_parallel.strategy, self.config.optimizer.clip_grad
        return finish_step(self.runner, self.mesh.dp_cp, strategy, largest, total)

    def _over_all(self, share: Tensor) -> Tensor:
        """Sum a loss's shares over the ranks with different tokens; pipeline stages without a loss get it too."""
        for mesh in (self.mesh.dp_cp, self.mesh.pp):
            dist.all_reduce(share, group=mesh.get_group())
        return share

    def _owes_validation(self) -> bool:
        """Whether the run that this one goes on from was ended during the validation of its last iteration."""
        train, at = self.config.train, self.progress.iteration
        if at == 0 or (at % train.eval_interval and at != train.train_iters):
            return False
        return from_first(lambda: self.log is not None and self.log.lacks_validation(at))

    @torch.no_grad()
    def _validate(self, data: Samples) -> dict[str, float]:
        """Return the validation loss, of the averaged weights if there are any; then call ``after_validation``.

        Empty where the run was told to end before it was over.
        """
        with nullcontext() if self.ema is None else self.ema.in_place():
            loss = self._evaluate(data)
            if self._ending.agreed:
                return {}
            if self.after_validation is not None:
                with self._watchdog.paused():
                    self.after_validation(self.progress.iteration)
        return {"validation_loss": loss, **self.validation_constants}

    def _evaluate(self, data: Samples) -> float:
        """Return the mean loss over the first eval_iters global batches of the validation data, always the same."""
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.mesh.device), 0
        with self._local(evaluation_batches(data, self._batching, self._wanted)) as steps:
            while True:
                micro_batches, valid, _ = self._next_step(steps)
                if not micro_batches:
                    break
                total += self.runner.forward(micro_batches)
                tokens += valid
        return self._over_all(total).item() / max(tokens, 1)

    @property
    def _wanted(self) -> int:
        """Return the number of validation samples to evaluate."""
        return self.config.train.eval_iters * self.global_batch_size

    @cached_property
    def _profiler(self) -> Profiler:
        save, device, interval = self.config.checkpoint.save, self.mesh.device, self.config.logging.log_interval
        return Profiler(self.config.profiling, save, device, self._say, self.runner.parts, interval)

    @cached_property
    def _batching(self) -> Batching:
        return Batching(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.config.train.micro_batch_size,
            dp_rank=self.mesh.dp.get_local_rank(),
            dp_size=self.mesh.dp.size(),
            num_workers=self.config.reading.num_workers,
            pin_memory=self.mesh.device.type == "cuda",
        )

    def _report(self, record: dict[str, Any], lines: list[str]) -> None:
        if self.log is None:
            return
        self.log.write(record)
        for line in lines:
            self._say(line)
        if "validation_loss" in record:
            self._say(self.objective.validation_line(record))
            self.log.sync()

    def _say(self, line: str) -> None:
        """Print a line on the first rank."""
        if self.log is not None:
            print(line, flush=True)

    def _save(self, tier: Literal["shared", "local"] = "shared") -> None:
        if self.log is not None:
            self.log.sync(draw=tier == "shared")
        with self._profiler.part(SAVING), self._watchdog.paused():
            self._saves.save(
                tier,
                self.progress.iteration,
                self.runner.parts,
                self.optimizer,
                architecture=self.architecture,
                extra={"progress": asdict(self.progress), **kept(self.config, self.contents)}
                | ({} if self.ema is None else {AVERAGED: self.ema.decay}),
                more={} if self.ema is None else {"ema": self.ema.weights},
            )
        if tier == "shared":
            self._saved = self.progress.iteration

    @cached_property
    def _saves(self) -> Saves:
        return Saves(config=self.config.checkpoint, say=self._say)
