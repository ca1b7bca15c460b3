"""A training run: build everything in order, then take the steps, with callbacks between them."""

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
from train.batches import Batches, Clock, Prefetcher, StepBatch, sum_over_ranks
from train.callbacks import UPDATE, Callback, Step, say
from train.callbacks.checkpointing import Checkpointing
from train.callbacks.health import Health, Heartbeat
from train.callbacks.metrics import METRICS, RunLog
from train.callbacks.profile import Profiler
from train.callbacks.progress import ProgressReport, peak_flops, shortage_note
from train.callbacks.ruler import Ruler
from train.callbacks.stragglers import Stragglers
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
    """Trains one model: builds the run in `__init__`, and takes its steps in `train`.

    A step is the same for every model and every split over ranks. The task builds the model and
    computes its loss, the runner takes micro-batches through the local pipeline stages, and
    everything that does not change the weights (logging, validation, checkpoints, profiling) is a
    callback.
    """

    def __init__(
        self,
        task: Task[Any],
        final: Final[Any],
        *,
        peak_flops: float | None = None,
        open_log: Callable[..., RunLog | None] = open_log,
    ) -> None:
        """Build everything, and load the weights and state that the run starts from; collective.

        Args:
            peak_flops: FLOP/s per process that count as an MFU of 100 %; by default the device's
                peak.
            open_log: opens the log of the first rank, as ``train.run.open_log`` does.
        """
        self.task = task
        self.config = final.config
        self.mesh = task.mesh
        self.start = final.start
        self.progress = final.start.progress
        self.peak_flops = peak_flops or 0.0
        config = self.config

        # Data, model and optimizer, and the state that they start from.
        self.data = task.load_data(final.tokenizer)
        self.train_data = self.data.train
        self.valid_data = self.data.valid
        self.parts = task.build_parts()
        self.optimizer = build_optimizer(
            config.optimizer, *self.parts, seed=config.train.seed, mesh=self.mesh
        )
        self.ema = Ema(config.ema_decay, self.parts) if config.ema_decay else None
        self.schedule = schedule_of(config.optimizer, config.train.train_iters)
        self.start.load(self.parts, self.optimizer, self.ema)
        if is_first():
            lines = [*kernel_lines(config), *config.optimizer.lines]
            print(task.description(self.data), *lines, sep="\n", flush=True)

        # The training step, and the objects that supervise it.
        self.log = open_log(config, final.saved, self.progress)
        self.runner = task.build_runner(self.parts)
        self.clock = Clock()
        self.saves = Saves(config=config.checkpoint, say=say)
        background_saves = self.saves if config.checkpoint.async_save else None
        self.batches = Batches(task, self.clock, background_saves)
        self.watchdog = Watchdog(
            config.health.watchdog_factor,
            config.health.watchdog_min_seconds,
            config.checkpoint.save,
        )
        self.health = Health(
            config.health, config.checkpoint.save, self._good_steps(), self.progress
        )

        # Callbacks; checkpointing is last, so that a checkpoint includes the work of the others.
        self.checkpointing = self._build_checkpointing()
        self.callbacks = [*self._build_callbacks(self.data), self.checkpointing]

    def train(self, request: StopRequest | None = None) -> None:
        """Train until train_iters or a request to stop; save the last iteration.

        A signal in ``request`` on any rank, or the end of exit_duration_in_mins, ends all ranks
        before their next step.
        """
        config = self.config
        progress = self.progress
        stop = self.batches.stop
        stop.request = request or stop.request
        stop.request.works = True
        if not self.peak_flops:
            self.peak_flops = peak_flops(self.mesh.device, config.train.dtype)

        available = None if self.valid_data is None else len(self.valid_data)
        note = shortage_note(
            progress.iteration, config.train, available, self.task.validation_samples
        )
        if note:
            say(note)

        with self.saves.finished(), self.watchdog:
            for callback in self.callbacks:
                callback.on_train_begin(progress.iteration)
            while self._train_until_rollback():
                self.checkpointing.roll_back()
            for callback in self.callbacks:
                callback.on_train_end(progress.iteration)

        if config.checkpoint.save is not None and is_first():
            say(describe_folder(Path(config.checkpoint.save)))
        if stop.agreed:
            say(
                f"ended early after iteration {progress.iteration}: {stop.why()}; "
                "resume with --load"
            )

    def _train_until_rollback(self) -> bool:
        """Take steps until the run ends or has to roll back; return True for a rollback."""
        progress = self.progress
        train_iters = self.config.train.train_iters
        remaining = max(0, train_iters - progress.iteration)
        global_batches = batches(self.train_data, self.batches.batching, progress.consumed_samples)

        with self.batches.prefetched(islice(global_batches, remaining)) as prefetched:
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
        """Take one optimizer step; return None if no batch is left or the run rolls back.

        A bad step (a loss or gradient norm that is not finite, or a spike) consumes its samples
        but leaves weights and optimizer untouched: Health decides that before the update, and
        identically on all ranks.
        """
        task = self.task
        progress = self.progress
        start = time.perf_counter()
        batch = self.batches.take(prefetched)
        if batch is None:
            return None
        progress.iteration += 1

        lr = self.schedule.rate(progress.iteration)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)

        local_loss = self.runner.forward_backward(batch.micro_batches, max(batch.valid, 1))
        mean_loss = sum_over_ranks(local_loss, self.mesh)
        loss, grad_norm = reduce_and_clip(
            self.runner, self.mesh.dp_cp, self.config.optimizer.clip_grad, mean_loss
        )

        is_bad = self.health.judge(loss, grad_norm)
        with self.clock.part(UPDATE):
            if not is_bad:
                self.optimizer.step()
                if self.ema is not None:
                    self.ema.update()
            self.optimizer.zero_grad(set_to_none=True)
        progress.consumed_samples += task.batch_samples
        progress.consumed_tokens += task.batch_tokens
        if self.health.rolls_back:
            return None

        record = self._record(batch, loss, grad_norm, lr, time.perf_counter() - start)
        return Step(
            batch.micro_batches, batch.valid, loss, record, prefetched.wait, self._ends_here()
        )

    def _record(
        self, batch: StepBatch, loss: float, grad_norm: float, lr: float, seconds: float
    ) -> dict[str, Any]:
        """Return the record of a step for metrics.jsonl."""
        task = self.task
        flops_per_second = batch.flops / (seconds * dist.get_world_size())  # per process
        return {
            **asdict(self.progress),
            task.objective.loss_name: loss,
            "grad_norm": grad_norm,
            "learning_rate": lr,
            "iteration_time_ms": 1e3 * seconds,
            "tokens_per_second": task.batch_tokens / seconds,
            "samples_per_second": task.batch_samples / seconds,
            "tflops_per_gpu": flops_per_second / 1e12,
            "mfu": flops_per_second / self.peak_flops,
            "memory_gb": memory_gb(self.mesh.device),
        }

    def _ends_here(self) -> bool:
        train = self.config.train
        iteration = self.progress.iteration
        if iteration == train.train_iters:
            return True
        return train.exit_interval is not None and iteration % train.exit_interval == 0

    def _good_steps(self) -> list[tuple[Any, Any]]:
        """Return loss and gradient norm of the good steps so far; only the first rank has them."""
        records = self.log.records if self.log is not None else []
        loss_name = self.task.objective.loss_name
        return [
            (record[loss_name], record["grad_norm"])
            for record in records
            if not record.get("skipped_in_a_row")
        ]

    def _build_callbacks(self, data: Data) -> Iterator[Callback]:
        """Yield all callbacks but checkpointing, in the order in which they are called."""
        config = self.config
        device = self.mesh.device
        if config.profiling.profile:
            yield Profiler(config.profiling, config.checkpoint.save, device)
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
                after_validation=self.task.after_validation(self.parts),
            )
        if data.curve is not None:
            yield Ruler(data.curve, self.runner, self.watchdog)
        if dist.get_world_size() > 1:
            yield Stragglers(self.parts, device, config.logging.log_interval, self.clock.seconds)
        yield ProgressReport(
            self.log,
            self.task.objective,
            config.train.train_iters,
            config.logging.log_interval,
            device.type,
        )

    def _build_checkpointing(self) -> Checkpointing:
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


def describe_folder(folder: Path) -> str:
    """Return a line that lists a run's files, for people who look for its loss curve."""
    meanings = {"loss.png": "the curve", METRICS: "every iteration", "config.toml": "every setting"}
    files = [
        f"{name} ({meaning})" for name, meaning in meanings.items() if (folder / name).exists()
    ]
    saved = saved_iterations(folder)
    if saved:
        files.append(f"{counted(len(saved), 'checkpoint')}, the newest of iteration {saved[0]}")
    return f"{folder} holds {', '.join(files) or 'nothing'}"


def memory_gb(device: torch.device) -> float:
    """Return the peak memory in GB (10^9 bytes): of the GPU's tensors, or of a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
