"""A run: all that it needs is built in order, then it takes its steps, with callbacks beside them."""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.loader import Batch, batches
from runtime.progress import counted
from runtime.signals import StopRequest
from runtime.together import is_first
from runtime.watchdog import Watchdog
from train.batches import Batches, Clock, Prefetcher, summed
from train.callbacks import UPDATE, Callback, Step, say
from train.callbacks.checkpointing import Checkpointing
from train.callbacks.health import Health, Heartbeat
from train.callbacks.metrics import METRICS, RunLog
from train.callbacks.profile import Profiler, Stragglers
from train.callbacks.progress import Report, few_samples, peak_flops
from train.callbacks.ruler import Ruler
from train.callbacks.validation import Validation
from train.checkpoint.saving import Saves
from train.checkpoint.search import saved_iterations
from train.config.finalize import Final
from train.context_attention import kernel_lines
from train.ema import Ema
from train.gradients import reduce_and_clip
from train.optimizers.config import build_optimizer
from train.run import open_log
from train.schedule import schedule_of
from train.tasks.task import Data, Task


class Trainer:
    """A run, built as it is made and ready to train."""

    def __init__(
        self,
        task: Task[Any],
        final: Final[Any],
        *,
        peak_flops: float | None = None,
        open_log: Callable[..., RunLog | None] = open_log,
    ) -> None:
        """Build everything, and load what the run starts from; collective.

        Args:
            peak_flops: FLOP/s per process that MFU is measured against; by default what one can
                reach.
            open_log: opens the log of the first rank, as ``train.run.open_log`` does.
        """
        self.task, self.config, self.mesh = task, final.config, task.mesh
        self.start, self.progress = final.start, final.start.progress
        self.peak_flops = peak_flops or 0.0
        config = self.config

        # The model and what changes it.
        self.data = task.load_data(final.tokenizer)
        self.train_data, self.valid_data = self.data.train, self.data.valid
        self.parts = task.build_parts()
        self.optimizer = build_optimizer(config.optimizer, *self.parts)
        self.ema = Ema(config.ema_decay, self.parts) if config.ema_decay else None
        self.schedule = schedule_of(config.optimizer, config.train.train_iters)
        self.start.load(self.parts, self.optimizer, self.ema)
        if is_first():
            print(task.description(self.data), *kernel_lines(config), sep="\n", flush=True)

        # What takes a step.
        self.log = open_log(config, final.saved, self.progress)
        self.runner = task.build_runner(self.parts)
        self.clock = Clock()
        self.saves = Saves(config=config.checkpoint, say=say)
        self.batches = Batches(
            task, self.clock, self.saves if config.checkpoint.async_save else None
        )
        self.watchdog = Watchdog(
            config.health.watchdog_factor,
            config.health.watchdog_min_seconds,
            config.checkpoint.save,
        )
        self.health = Health(
            config.health, config.checkpoint.save, self._good_steps(), self.progress
        )

        # What stands beside a step.
        self.checkpointing = self._checkpointing()
        self.callbacks = [*self._callbacks(self.data), self.checkpointing]

    def train(self, request: StopRequest | None = None) -> None:
        """Train from ``progress`` to train_iters, or until told to stop; save the last iteration.

        A signal in ``request`` on any rank, or the end of exit_duration_in_mins, ends all ranks
        before their next step.
        """
        config, progress, stop = self.config, self.progress, self.batches.stop
        stop.request = request or stop.request
        stop.request.works = True
        if not self.peak_flops:
            self.peak_flops = peak_flops(self.mesh.device, config.train.dtype)
        available = None if self.valid_data is None else len(self.valid_data)
        if note := few_samples(
            progress.iteration, config.train, available, self.task.validation_samples
        ):
            say(note)

        with self.saves.finished(), self.watchdog:
            for callback in self.callbacks:
                callback.on_train_begin(progress.iteration)
            while self._take_steps():
                self.checkpointing.roll_back()
            for callback in self.callbacks:
                callback.on_train_end(progress.iteration)

        if config.checkpoint.save is not None and is_first():
            say(files_left(Path(config.checkpoint.save)))
        if stop.agreed:
            say(f"ended early after iteration {progress.iteration}: {stop.why()}; --load goes on")

    def _take_steps(self) -> bool:
        """Take steps until the run ends; return whether it is to roll back instead."""
        progress, train_iters = self.progress, self.config.train.train_iters
        left = max(0, train_iters - progress.iteration)
        steps = islice(
            batches(self.train_data, self.batches.batching, progress.consumed_samples), left
        )
        with self.batches.prefetched(steps) as prefetched:
            while progress.iteration < train_iters and not self.batches.stop.agreed:
                for callback in self.callbacks:
                    callback.on_step_begin(progress.iteration + 1)
                step = self.train_step(prefetched)
                if step is None:
                    break
                for callback in self.callbacks:
                    callback.on_step_end(step)
                if step.last or self.health.rolls_back:
                    break
        return self.health.rolls_back

    def train_step(self, prefetched: Prefetcher[list[Batch]]) -> Step | None:
        """Take one optimizer step; None if there is no batch to take, or the run is to roll back."""
        task, progress, start = self.task, self.progress, time.perf_counter()
        batch = self.batches.take(prefetched)
        if batch is None:
            return None
        progress.iteration += 1
        rate = self.schedule.rate(progress.iteration)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)

        share = self.runner.forward_backward(batch.micro_batches, max(batch.valid, 1))
        total = summed(share, self.mesh)  # over the ranks with different tokens
        loss, norm = reduce_and_clip(
            self.runner, self.mesh.dp_cp, self.config.optimizer.clip_grad, total
        )

        bad = self.health.judge(loss, norm)
        with self.clock.part(UPDATE):
            if not bad:
                self.optimizer.step()
                if self.ema is not None:
                    self.ema.update()
            self.optimizer.zero_grad(set_to_none=True)
        progress.consumed_samples += task.batch_samples
        progress.consumed_tokens += task.batch_tokens
        if self.health.rolls_back:
            return None

        seconds = time.perf_counter() - start
        flops = batch.flops / (seconds * dist.get_world_size())
        record = {
            **asdict(progress),
            task.objective.loss_name: loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "iteration_time_ms": 1e3 * seconds,
            "tokens_per_second": task.batch_tokens / seconds,
            "samples_per_second": task.batch_samples / seconds,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / self.peak_flops,
            "memory_gb": memory_gb(self.mesh.device),
        }
        interval = self.config.train.exit_interval
        last = progress.iteration == self.config.train.train_iters
        last |= interval is not None and progress.iteration % interval == 0
        return Step(batch.micro_batches, batch.valid, loss, record, prefetched.wait, last)

    def _good_steps(self) -> list[tuple[Any, Any]]:
        """Return the loss and the gradient norm of the good steps so far, on the first rank."""
        records = self.log.records if self.log is not None else []
        name = self.task.objective.loss_name
        return [
            (record[name], record["grad_norm"])
            for record in records
            if not record.get("skipped_in_a_row")
        ]

    def _callbacks(self, data: Data) -> Iterator[Callback]:
        """Yield the callbacks before the checkpoints, in the order in which each moment calls them."""
        config, device, save = self.config, self.mesh.device, self.config.checkpoint.save
        if config.profiling.profile:
            yield Profiler(config.profiling, save, device)
        yield Heartbeat(self.watchdog)
        yield self.batches.stop
        if data.valid is not None:
            yield Validation(
                task=self.task,
                runner=self.runner,
                ema=self.ema,
                batches=self.batches,
                data=data.valid,
                log=self.log,
                watchdog=self.watchdog,
                constants=data.constants,
                then=self.task.after_validation(self.parts),
            )
        if data.curve is not None:
            yield Ruler(data.curve, self.runner, self.watchdog)
        if dist.get_world_size() > 1:
            yield Stragglers(self.parts, device, config.logging.log_interval, self.clock.seconds)
        yield Report(
            self.log,
            self.task.objective,
            config.train.train_iters,
            config.logging.log_interval,
            device.type,
        )

    def _checkpointing(self) -> Checkpointing:
        return Checkpointing(
            config=self.config,
            mesh=self.mesh,
            runner=self.runner,
            optimizer=self.optimizer,
            ema=self.ema,
            start=self.start,
            saves=self.saves,
            log=self.log,
            health=self.health,
            stop=self.batches.stop,
            watchdog=self.watchdog,
        )


def files_left(folder: Path) -> str:
    """Say which files a run has left in its folder, for people who look for its curve."""
    meanings = {"loss.png": "the curve", METRICS: "every iteration", "config.toml": "every setting"}
    files = [
        f"{name} ({meaning})" for name, meaning in meanings.items() if (folder / name).exists()
    ]
    saved = saved_iterations(folder)
    if saved:
        files.append(f"{counted(len(saved), 'checkpoint')}, the newest of iteration {saved[0]}")
    return f"{folder} holds {', '.join(files) or 'nothing'}"


def memory_gb(device: torch.device) -> float:
    """Return this process's peak memory in GB (10^9 bytes): the GPU's, or on the CPU the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
