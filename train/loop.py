"""The training loop that every entry shares: a step on one screen, and what stands beside it in the order of calls."""

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from data.loader import Batch, Samples, batches
from parallel.data import Runner
from runtime.progress import counted
from runtime.signals import StopRequest
from runtime.together import is_first
from runtime.watchdog import Watchdog
from train.assemble import Run, build_runner
from train.batches import Batches, Clock, Prefetcher, summed
from train.checkpoint.saving import Saves
from train.checkpoint.search import saved_iterations
from train.config.common import CommonConfig
from train.gradients import reduce_and_clip
from train.resume import Start
from train.schedule import schedule_of
from train.watching import UPDATE, Step, Watcher, say
from train.watching.health import Health, Heartbeat
from train.watching.metrics import METRICS, RunLog
from train.watching.profile import Profiler, Stragglers
from train.watching.progress import Report, few_samples, peak_flops
from train.watching.saving import Saving
from train.watching.validation import Curve, Ruler, Validation


@dataclass(kw_only=True)
class Trainer:
    """A run with everything built and loaded, ready to train."""

    run: Run[CommonConfig]
    start: Start[CommonConfig]
    train_data: Samples
    valid_data: Samples | None
    flops_per_token: Callable[[int], float]
    """FLOPs of training on one token of a document of so many."""
    log: RunLog | None
    """On the first rank; None elsewhere."""
    validation_constants: Mapping[str, float] = field(default_factory=dict)
    """Figures recorded with each validation loss, such as the corpus's unigram entropy."""
    after_validation: Callable[[int], None] | None = None
    """Called on every rank with the iteration after a validation, while the averages are in place."""
    curve: Curve | None = None
    """The small curve of RULER that a language model's run draws."""
    peak_flops: float = 0.0
    """FLOP/s per process that MFU is measured against; 0: found as the run starts."""

    def __post_init__(self) -> None:
        self.progress, self.optimizer, self._ema = self.start.progress, self.run.optimizer, self.run.ema
        self.runner: Runner = build_runner(self.run)
        config, self._clock = self.run.config, Clock()
        self._saves = Saves(config=config.checkpoint, say=say)
        background = self._saves if config.checkpoint.async_save else None
        self.batches = Batches(self.run, self.flops_per_token, self._clock, background)
        self._schedule = schedule_of(config.optimizer, config.train.train_iters)

    def step(self, ahead: Prefetcher[list[Batch]]) -> Step | None:
        """Take one optimizer step; None where there is no batch to take, or the run is to roll back."""
        run, progress, start = self.run, self.progress, time.perf_counter()
        batch = self.batches.take(ahead)
        if batch is None:
            return None
        progress.iteration += 1
        rate = self._schedule.rate(progress.iteration)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)

        share = self.runner.forward_backward(batch.micro_batches, max(batch.valid, 1))
        total = summed(share, run.mesh)  # over the ranks with different tokens
        loss, norm = reduce_and_clip(self.runner, run.mesh.dp_cp, run.config.optimizer.clip_grad, total)

        bad = self._health.judge(loss, norm)
        with self._clock.part(UPDATE):
            if not bad:
                self.optimizer.step()
                if self._ema is not None:
                    self._ema.update()
            self.optimizer.zero_grad(set_to_none=True)
        progress.consumed_samples += run.batch_samples
        progress.consumed_tokens += run.batch_tokens
        if self._health.rolls_back:
            return None

        seconds = time.perf_counter() - start
        flops = batch.flops / (seconds * dist.get_world_size())
        record = {
            **asdict(progress),
            run.objective.loss_name: loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "iteration_time_ms": 1e3 * seconds,
            "tokens_per_second": run.batch_tokens / seconds,
            "samples_per_second": run.batch_samples / seconds,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / self.peak_flops,
            "memory_gb": memory_gb(run.mesh.device),
        }
        train, at = run.config.train, progress.iteration
        last = at == train.train_iters or (train.exit_interval is not None and at % train.exit_interval == 0)
        return Step(batch.micro_batches, batch.valid, loss, record, ahead.wait, last)

    def train(self, request: StopRequest | None = None) -> None:
        """Train from ``progress`` to train_iters, or until told to stop; save the last iteration.

        A signal in ``request`` on any rank, or the end of exit_duration_in_mins, ends all ranks before their next step.
        """
        config, progress, stop = self.run.config, self.progress, self.batches.stop
        stop.request = request or stop.request
        stop.request.works = True
        if not self.peak_flops:
            self.peak_flops = peak_flops(self.run.mesh.device, config.train.dtype)
        there = None if self.valid_data is None else len(self.valid_data)
        if note := few_samples(progress.iteration, config.train, there, self.run.validation_samples):
            say(note)
        limits = config.health.watchdog_factor, config.health.watchdog_min_seconds
        with self._saves.finished(), Watchdog(*limits, config.checkpoint.save) as watchdog:
            watchers = list(self._beside(watchdog))
            for one in watchers:
                one.begin(progress.iteration)
            while self._take_steps(watchers):
                self._saving.roll_back()
            for one in watchers:
                one.end(progress.iteration)
        if config.checkpoint.save is not None and is_first():
            say(what_is_left(Path(config.checkpoint.save)))
        if stop.agreed:
            say(f"ended early after iteration {progress.iteration}: {stop.why()}; --load goes on")

    def _beside(self, watchdog: Watchdog) -> Iterator[Watcher]:
        """Yield what stands beside the step, in the order in which each moment calls it."""
        run, config, device = self.run, self.run.config, self.run.mesh.device
        objective, interval, save = run.objective, config.logging.log_interval, config.checkpoint.save
        kept = [r for r in self.log.records if not r.get("skipped_in_a_row")] if self.log else []
        good = [(record[objective.loss_name], record["grad_norm"]) for record in kept]
        self._health = Health(config.health, save, good, self.progress)
        if config.profiling.profile:
            yield Profiler(config.profiling, save, device)
        yield Heartbeat(watchdog)
        yield self.batches.stop
        if self.valid_data is not None:
            yield Validation(
                run=run,
                runner=self.runner,
                batches=self.batches,
                data=self.valid_data,
                log=self.log,
                watchdog=watchdog,
                constants=self.validation_constants,
                then=self.after_validation,
            )
        if self.curve is not None:
            yield Ruler(self.curve, self.runner, watchdog)
        if dist.get_world_size() > 1:
            yield Stragglers(run.parts, device, interval, self._clock.seconds)
        yield Report(self.log, objective, config.train.train_iters, interval, device.type)
        self._saving = Saving(
            run=run,
            runner=self.runner,
            start=self.start,
            saves=self._saves,
            log=self.log,
            health=self._health,
            stop=self.batches.stop,
            watchdog=watchdog,
        )
        yield self._saving

    def _take_steps(self, watchers: Sequence[Watcher]) -> bool:
        """Take steps until the run ends; return whether it is to roll back instead."""
        progress, train = self.progress, self.run.config.train
        left = max(0, train.train_iters - progress.iteration)
        steps = islice(batches(self.train_data, self.batches.batching, progress.consumed_samples), left)
        with self.batches.prefetched(steps) as ahead:
            while progress.iteration < train.train_iters and not self.batches.stop.agreed:
                for one in watchers:
                    one.before(progress.iteration + 1)
                step = self.step(ahead)
                if step is None:
                    break
                for one in watchers:
                    one.after(step)
                if step.last or self._health.rolls_back:
                    break
        return self._health.rolls_back


def what_is_left(folder: Path) -> str:
    """Say which files a run has left in its folder, for people who look for its curve and its checkpoint."""
    meanings = {"loss.png": "the curve", METRICS: "every iteration", "config.toml": "every setting"}
    files = [f"{name} ({meaning})" for name, meaning in meanings.items() if (folder / name).exists()]
    saved = saved_iterations(folder)
    if saved:
        files.append(f"{counted(len(saved), 'checkpoint')}, the newest of iteration {saved[0]}")
    return f"{folder} holds {', '.join(files) or 'nothing'}"


def memory_gb(device: torch.device) -> float:
    """Return this process's peak memory so far in GB (10^9 bytes): the GPU's, or on the CPU the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
