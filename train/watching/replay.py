"""--replay-step: a step done twice from one checkpoint. What differs to the bit is a device's fault, or not defined."""

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from checkpoint.search import saved_iterations
from parallel.data import reshard, to_local
from runtime.errors import UserError
from runtime.together import gather_results, is_first, raise_together
from train.config.common import CommonConfig
from train.loop import Trainer
from train.resume import resume
from train.watching.metrics import METRICS, LoggingConfig, read_metrics

Run = TypeVar("Run", bound=CommonConfig)
Place = tuple[int, int, str]
"""Iteration, index into LOOKED_AT, and name."""
LOOKED_AT = ("its share of the loss", "the gradient of ", "the weight ")
NOT_SAVED: dict[str, Any] = dict.fromkeys(("save", "save_interval", "keep_last", "keep_every")) | {"async_save": False}
NOT_SAVED |= dict.fromkeys(("non_persistent_save_interval", "non_persistent_local_ckpt_dir"))


class ReplayError(UserError):
    """The two replays differ."""

    status = 3


def replaying(config: Run) -> Run:
    """Return the configuration that ``--replay-step`` replays with, which writes nothing; without the flag, the same.

    Raises:
        UserError: no checkpoint is before that step, or the run has no such step.
    """
    step, given = config.health.replay_step, config.checkpoint
    if step is None:
        return config
    saved = saved_iterations(Path(given.load)) if given.load and Path(given.load).is_dir() else []
    before = next((iteration for iteration in saved if iteration < step), None)
    if before is None or step > config.train.train_iters or given.finetune:
        raise UserError(
            f"replay_step is {step}, load is {given.load} with checkpoints of {', '.join(map(str, saved)) or 'none'} "
            f"and train_iters is {config.train.train_iters}; name a step after a checkpoint, without --finetune"
        )
    return replace(
        config,
        checkpoint=replace(given, ckpt_step=before, **NOT_SAVED),
        train=replace(config.train, exit_interval=step, exit_duration_in_mins=None),
        logging=LoggingConfig(log_interval=config.logging.log_interval),
        health=replace(config.health, bad_step_policy="skip"),
        profiling=replace(config.profiling, profile=False),
    )


def replay(trainer: Trainer) -> None:
    """Go from the checkpoint to the step twice, and say whether all was the same to the bit; collective.

    Raises:
        ReplayError: it was not; names the ranks, hosts and tensors where it differed first.
        UserError: training ended before the step.
    """
    trainer.valid_data, metrics, past = None, Path(str(trainer.config.checkpoint.load)) / METRICS, []
    with raise_together():
        if trainer.log is not None and metrics.exists():
            past = read_metrics(metrics)
            # Spikes are judged by the steps before, as in the run.
            trainer.log.records.extend(old for old in past if old["iteration"] <= trainer.progress.iteration)
    first = _followed(trainer)
    for part in trainer.runner.parts:
        reshard(part)
    run = (trainer.runner.parts, trainer.optimizer, trainer.architecture, trainer.contents, trainer.ema)
    trainer.progress = resume(trainer.config, *run)[1]
    record = trainer.log.records[-1] if trainer.log is not None else {}
    if trainer.log is not None:
        trainer.log.rewind(trainer.progress.iteration)
    second = _followed(trainer)
    apart = [place for place in first.keys() | second.keys() if first.get(place) != second.get(place)]
    ranks = gather_results(lambda: (socket.gethostname(), sorted(apart)))
    step = trainer.config.health.replay_step
    if said := verdict(ranks):
        raise ReplayError(f"iteration {step} is not the same twice: {said}")
    if is_first():
        before = _before(metrics, past, record)
        print(f"iteration {step} is the same twice, to the bit, on all {len(ranks)} ranks{before}", flush=True)


def _before(path: Path, past: Sequence[dict[str, Any]], now: dict[str, Any]) -> str:
    """Compare a replay's record with the run's, which ``path`` has."""
    found = {record["iteration"]: record for record in past}
    if (then := found.get(now["iteration"])) is None:
        return f"; {path} has no record of it to compare"
    for name in now:
        if (name.endswith("_loss") or name == "grad_norm") and now[name] != then.get(name):
            was = f"; the run recorded {name} {then.get(name)}, and now it is {now[name]}"
            return f"{was}: it had other devices, another mesh, other software or a rollback in between, or a fault"
    return " and as the run recorded it: if it is bad, no device is to blame"


def _followed(trainer: Trainer) -> dict[Place, str]:
    """Train to the step, and return the bits of this rank's losses, and digests of its gradients and weights."""
    seen: dict[Place, str] = {}
    plain, progress = trainer.runner.forward_backward, trainer.progress

    def own_share(*args: Any) -> Tensor:
        share = plain(*args)
        seen[progress.iteration, 0, ""] = float(share).hex()
        return share

    def gradients(*_: Any) -> None:
        for name, parameter in trainer.runner.parameters().items():
            if parameter.grad is not None:
                seen[progress.iteration, 1, name] = digest(parameter.grad)

    trainer.runner.forward_backward = own_share  # type: ignore[method-assign,assignment]
    hook = trainer.optimizer.register_step_pre_hook(gradients)
    try:
        trainer.run()
    finally:
        hook.remove()
        trainer.runner.forward_backward = plain  # type: ignore[method-assign]
    if progress.iteration != (step := trainer.config.health.replay_step):
        raise UserError(f"replay_step is {step}, and training ended after iteration {progress.iteration}; replay again")
    weights = trainer.runner.parameters().items()
    return seen | {(progress.iteration, 2, name): digest(weight) for name, weight in weights}


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bits; of a DTensor, of this rank's."""
    return hashlib.sha256(to_local(tensor).detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()


def verdict(ranks: Sequence[tuple[str, Sequence[Place]]]) -> str:
    """Name ranks with their hosts, and what differed first there; empty if nothing did.

    Args:
        ranks: of each its host, and all that differed, in the order of time.
    """
    first = min((place[:2] for _, apart in ranks for place in apart), default=None)
    if first is None:
        return ""
    words = []
    for rank, (host, apart) in enumerate(ranks):
        if names := [name for *where, name in apart if tuple(where) == first]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            words.append(f"rank {rank} on {host} in {LOOKED_AT[first[1]]}{', '.join(names[:3])}{more}")
    more = f"; and {len(words) - 4} other ranks" if len(words) > 4 else ""
    return (
        f"in iteration {first[0]}, where it differs first, {'; '.join(words[:4])}{more}; test that device, and leave "
        "its node out (kernels that sum in no fixed order differ on all ranks)"
    )
