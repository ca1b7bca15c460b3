"""A run's state in its checkpoints, and what a resumed run loads, keeps and changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.hf.api import open_hf
from model.parts.lora import is_adapter
from model.registry import architecture_of
from parallel.data import copy_whole
from runtime.errors import printable
from runtime.together import from_first, is_first, raise_together
from train.callbacks.health import Progress
from train.checkpoint.api import CheckpointConfig, compare_architecture, load_checkpoint, load_model
from train.checkpoint.manifest import MANIFEST, CheckpointError, is_count, read_manifest
from train.checkpoint.saving import newest_checkpoint
from train.config.common import CommonConfig
from train.config.flags import spelled
from train.ema import Ema
from train.optimizers.config import OptimizerConfig
from train.schedule import Schedule, schedule_of

ADAPTED = "lora_"
REFITTED = ("rotary_base", "rope_scaling_", "window_", ADAPTED)
"""Beginnings of the names of an architecture's settings that finetuning may change."""
MICRO = "micro_batch_size"
AVERAGED = "ema_decay"
"""Key of the averages' decay in a checkpoint with averages of the weights."""


@dataclass(frozen=True)
class Start:
    """The start of a run: resumed, finetuned from weights, or from scratch. Found before anything
    is built.
    """

    checkpoint: CheckpointConfig
    """The settings that led there."""
    optimizer: OptimizerConfig
    """With the schedule that the run takes."""
    architecture: dict[str, Any]
    contents: dict[str, str]
    """Digests of the training files, ``config.contents()``."""
    progress: Progress
    path: Path | None = None
    """The checkpoint, or the folder of weights from Hugging Face."""
    notes: Sequence[str] = ()
    averaged: float | None = None
    """The decay of the averages in the checkpoint; None if it has none."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """Records beside the training files, ``config.recorded()``."""

    def load(
        self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ema: Ema | None = None
    ) -> None:
        """Load what ``path`` has, and print the run's state and changed settings; collective.

        Raises UserError: broken, of another architecture, or a model that we do not have.
        """
        notes = list(self.notes)
        if self.path is not None and self.checkpoint.hugging_face is not None:
            passed: list[str] = []
            with raise_together():
                theirs, _, read = open_hf(self.path, passed.append)
                fitting, changed = _refitted(
                    self.path, there := architecture_of(theirs), self.architecture
                )
                try:
                    compare_architecture(self.path, there, fitting)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{error}. hf:FOLDER is for models that have a configuration (--config, those under configs/); "
                        f"python -m tools.convert_hf import {self.path} RUN writes one for any other"
                    ) from error
                for name, parameter in (
                    named for part in parts for named in part.named_parameters()
                ):
                    if not is_adapter(name):
                        copy_whole(
                            parameter, read(name)
                        )  # every rank reads each weight whole, one by one
            notes[1:1] = passed + changed
        elif self.path is not None and self.checkpoint.finetune:
            fitting, notes[1:1] = _refitted(
                self.path, read_manifest(self.path).architecture, self.architecture
            )
            load_model(self.path, parts, fitting, fresh=is_adapter)
        elif self.path is not None:
            more = {"ema": ema.weights} if ema is not None and self.averaged is not None else None
            load_checkpoint(self.path, parts, optimizer, self.architecture, sections=more)
            notes[1:1] = _averages(self.averaged, ema)
        if (
            ema is not None
            and self.path is not None
            and (self.averaged is None or self.checkpoint.finetune)
        ):
            ema.restart()
        if is_first() and notes:
            print("\n".join(map(printable, notes)), flush=True)


def find_start(
    config: CommonConfig,
    architecture: dict[str, Any],
    contents: dict[str, str],
    checkpoint: CheckpointConfig | None = None,
) -> Start:
    """Find the checkpoint of ``--load``, and check that the run can go on from it; collective.

    ``checkpoint`` says what to load, by default as the configuration does.

    Without a checkpoint the run starts afresh. With ``--finetune`` only the weights are loaded, and
    rope and windows may be others than they were trained with: no weight's shape depends on them.
    Adapters begin there, where the checkpoint has none. The weights of ``hf:FOLDER`` are read from
    there, without a checkpoint between. Raises UserError: broken, of another objective, or missing
    where required.
    """
    checkpoint, optimizer = checkpoint or config.checkpoint, config.optimizer
    path, notes = checkpoint.hugging_face, list[str]()
    if path is None and checkpoint.load is not None:
        path = newest_checkpoint(checkpoint)
        notes += [] if path is not None else [_without_checkpoint(checkpoint, architecture)]
    recorded = from_first(config.recorded)
    if path is None or checkpoint.finetune:
        notes += [] if path is None else [f"weights from {path}; all else begins afresh"]
        notes += shortened(optimizer, config.train.train_iters)
        return Start(
            checkpoint,
            optimizer,
            architecture,
            contents,
            Progress(),
            path,
            notes,
            recorded=recorded,
        )
    manifest = read_manifest(path)
    _check_adapters(path, manifest.architecture, architecture, begin=False)
    progress = progress_of(path, manifest.extra)
    _check_optimizer(path, manifest.extra, config.optimizer.optimizer)
    for name, now in config.named(config.OBJECTIVE).items():
        if (before := manifest.extra.get("trained_for", {}).get(name, now)) != now:
            raise CheckpointError(
                f"{path} is trained with {name} {before}, and {name} is {now}; set {name} to {before}, or begin a run "
                "of its own with another --save and without --load"
            )
    changed = changes(config, manifest.extra, contents)
    _check_allowed(path, changed, checkpoint.allow_changed)
    train_iters = config.train.train_iters
    optimizer, scheduled = continued(
        optimizer, train_iters, path, manifest.extra, progress.iteration
    )
    notes = [f"resumed from {path}, {progress.consumed_samples} samples consumed"]
    notes += [] if scheduled is None else [scheduled]
    notes += [f"note: {line}" for line in changed.values()]
    averaged = manifest.extra.get(AVERAGED)
    return Start(
        checkpoint, optimizer, architecture, contents, progress, path, notes, averaged, recorded
    )


def _without_checkpoint(checkpoint: CheckpointConfig, architecture: dict[str, Any]) -> str:
    """Say that the run starts afresh. Raises CheckpointError if it is asked for what only a
    checkpoint gives.
    """
    needs = {"finetune": checkpoint.finetune, "lora_rank": "lora_rank" in architecture}
    needs["exit_on_missing_checkpoint"] = checkpoint.exit_on_missing_checkpoint
    if (needed := next((name for name, needed in needs.items() if needed), None)) is not None:
        raise CheckpointError(
            f"load is {checkpoint.load}, which holds no checkpoint, and {needed} is set; name a run's folder, or leave "
            "the flag out to start afresh"
        )
    return f"no checkpoint in {checkpoint.load}: starting afresh"


def _refitted(
    path: Path, there: dict[str, Any], here: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the architecture with the rope and windows of ``there``, and a note for each that
    changes.
    """
    _check_adapters(path, there, here, begin=True)
    names = [name for name in there | here if name.startswith(REFITTED)]
    changed = [n for n in names if there.get(n) != here.get(n) and not n.startswith(ADAPTED)]
    notes = [f"note: {n} was {there.get(n)} and is {here.get(n)}" for n in changed]
    own = {name: value for name, value in here.items() if name not in names}
    return own | {name: there[name] for name in names if name in there}, notes


def _check_adapters(
    path: Path, there: dict[str, Any], here: dict[str, Any], *, begin: bool
) -> None:
    """Raise CheckpointError if a checkpoint has other adapters than the run, or none although they
    do not begin.
    """
    before, now = ({n: v for n, v in of.items() if n.startswith(ADAPTED)} for of in (there, here))
    if now and not before and not begin:
        raise CheckpointError(
            f"{path} has no adapters, and lora_rank is {now['lora_rank']}; begin them there with --finetune"
        )
    if before and before != now:
        said = [
            ", ".join(f"{name} {value}" for name, value in of.items()) or "none"
            for of in (before, now)
        ]
        raise CheckpointError(
            f"{path} has adapters of {said[0]}, and this run's are {said[1]}; give the same, or export it with them "
            "merged and import that (tools.convert_hf)"
        )


def _check_optimizer(path: Path, extra: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if a checkpoint has the state of another optimizer than the run's.

    Imported weights have none, and runs before there was a choice have that of adam.
    """
    if "settings" not in extra:
        return
    saved = extra["settings"].get("optimizer", "adam")
    if saved != name:
        raise CheckpointError(
            f"{path} has the state of optimizer {saved}, and optimizer is {name}, which cannot go on from "
            f"it; give --optimizer {saved}, or take the weights alone with --finetune"
        )


def progress_of(path: Path, extra: dict[str, Any]) -> Progress:
    """Read a checkpoint's progress. Raises CheckpointError if its manifest has values that no run
    writes.
    """
    progress: Any = extra.get("progress")
    known = {field.name for field in fields(Progress)}
    problem = "" if isinstance(progress, dict) and progress else f"progress is {progress!r:.40}"
    for name, value in progress.items() if not problem else ():
        if name not in known or not is_count(value):
            problem = f"progress has {name!r:.40} {value!r:.40}"
    for name in ("sample_order", "trained_for", "settings", "schedule", "contents"):
        if not isinstance(extra.get(name, {}), dict):
            problem = f"{name} is {extra[name]!r:.40}"
    decay = extra.get(AVERAGED)
    if decay is not None and (type(decay) is not float or not 0 < decay < 1):
        problem = f"{AVERAGED} is {decay!r:.40}"
    iteration = int(path.name.removeprefix("iter_"))
    if not problem and progress.get("iteration") != iteration:
        problem = f"progress has iteration {progress.get('iteration')}"
    if problem:
        raise CheckpointError(
            f"{path / MANIFEST} does not say where its run stands ({problem}); load another checkpoint"
        )
    return Progress(**progress)


def _averages(before: float | None, ema: Ema | None) -> list[str]:
    """Return notes on the averages of the weights."""
    if before is None and ema is not None:
        return ["note: it has no averages of the weights: they begin as the weights are"]
    if before is not None and ema is None:
        return [
            f"note: its averages of the weights are left behind: ema_decay was {before} and is not set; give "
            f"--ema-decay {before} to go on with them"
        ]
    if ema is not None and before != ema.decay:
        return [
            f"note: ema_decay was {before} and is {ema.decay}; {spelled('ema_decay', before)} keeps it"
        ]
    return []


def checkpoint_extra(config: CommonConfig, contents: dict[str, str]) -> dict[str, Any]:
    """Return the run's configuration and files for its checkpoints, read by ``find_start``;
    JSON-able.

    ``contents`` is the value of ``config.contents()`` when the run began.
    """
    return {
        "sample_order": config.named(config.SAMPLE_ORDER),
        "trained_for": config.named(config.OBJECTIVE),
        "settings": settings(config),
        "schedule": asdict(schedule_of(config.optimizer, config.train.train_iters)),
        "contents": contents,
    }


def settings(config: CommonConfig) -> dict[str, object]:
    """Return, by field, the settings that change training, except objective, sample order and
    learning rate.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return {
        **config.named(
            (*config.optimizer.spec.compared_settings, "bf16", "fp8_format", "fp8_recipe", MICRO)
        ),
        "global_batch_size": config.train.batch_size(config.mesh.data_parallel_size(world_size)),
        **config.named(config.NOTED),
    }


def changes(
    config: CommonConfig, extra: dict[str, Any], contents: dict[str, str]
) -> dict[str, str]:
    """Describe, by name, each setting and file that changed, with the flag that keeps the old
    value.
    """

    def changed(kind: str, here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        before = extra.get(kind, {})
        return (
            (name, was, now) for name, now in here.items() if (was := before.get(name, now)) != now
        )

    lines = {}
    for name, was, now in changed("settings", settings(config)):
        joined = name == MICRO and config.mesh.balance_over == "dp_cp"
        keeps = (
            ", of all data-parallel processes together"
            if joined
            else f"; {spelled(name, was)} keeps it"
        )
        if name != MICRO or not config.mesh.allow_resize:
            lines[name] = f"{name} was {was} and is {now}{keeps}"
    for name, was, now in changed("sample_order", config.named(config.SAMPLE_ORDER)):
        repeats = f"the samples to come may repeat consumed ones; {spelled(name, was)} keeps it"
        lines[name] = f"{name} was {was} and is {now}: {repeats}"
    for name, was, now in changed("contents", contents):
        held = (
            f"{name} holds something else than when the run began (digest {was!s:.8}, now {now:.8})"
        )
        lines[name] = f"{held}; put the old file in its place to keep it"
    return lines


def _check_allowed(path: Path, changed: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raise CheckpointError if a setting changed that is not named; a micro-batch changes sums
    alone, and may.
    """
    by_setting = {name: name.split()[0] for name in changed}  # a file's name follows its setting
    free = {*allowed, MICRO}
    refused = [
        name for name, setting in by_setting.items() if "all" not in free and setting not in free
    ]
    if refused:
        raise CheckpointError(
            f"{path} was trained otherwise: {'. '.join(changed[name] for name in refused)}. Keep it, or give "
            f"--allow-changed {' '.join(dict.fromkeys(by_setting[name] for name in refused))}"
        )


def shortened(config: OptimizerConfig, train_iters: int) -> list[str]:
    """Return a note for each setting that a short run reduces."""
    schedule = schedule_of(config, train_iters)
    wanted: dict[str, int | None] = {
        "lr_warmup_iters": config.lr_warmup_iters if config.lr_warmup_fraction is None else None
    }
    if schedule.lr_wsd_decay_iters is not None:
        wanted["lr_wsd_decay_iters"] = config.lr_wsd_decay_iters
    return [
        f"note: {name} is {value}, too many for train_iters {train_iters}: it is {taken} in this run; "
        f"--{name.replace('_', '-')} N chooses another"
        for name, value in wanted.items()
        if value is not None and (taken := getattr(schedule, name)) < value
    ]


def continued(
    optimizer: OptimizerConfig, train_iters: int, path: Path, extra: dict[str, Any], iteration: int
) -> tuple[OptimizerConfig, str | None]:
    """Choose the schedule of a run from ``iteration`` of a checkpoint on; return it and a note on
    the choice.

    The checkpoint's, if only train_iters changed, so that a longer run has no jump, unless its
    learning rate reaches 0 before the run ends; the configuration's, if anything else of it
    changed. The flags of OptimizerConfig override. Raises CheckpointError: the checkpoint's
    schedule is not valid.
    """
    own = schedule_of(optimizer, train_iters)
    before = _saved_schedule(optimizer, own, path, extra)
    if before is None:
        wanted = optimizer.use_checkpoint_opt_param_scheduler
        return (
            optimizer,
            f"note: {path} keeps no schedule: this configuration's is taken" if wanted else None,
        )
    ahead = range(iteration + 1, train_iters + 1)[
        :: max(1, (train_iters - iteration) // 100_000)
    ]  # each, or some
    differs = (
        next((n for n in ahead if before.rate(n) != own.rate(n)), None) if before != own else None
    )
    if differs is None:
        return optimizer, None
    longer = schedule_of(optimizer, before.lr_decay_iters or train_iters) == before
    keep = longer and before.rate(train_iters) > 0 and not optimizer.override_opt_param_scheduler
    keep |= optimizer.use_checkpoint_opt_param_scheduler
    other = asdict(own)
    differing = [
        f"{name} was {was} and is {other[name]}"
        for name, was in asdict(before).items()
        if was != other[name]
    ]
    end = before.lr_decay_iters
    later = f" ({before.rate(end + 1):.6E} after iteration {end})" if end is not None else ""
    choice = (
        "it goes on with the checkpoint's; --override-opt-param-scheduler takes the other"
        if keep
        else "it goes on with this configuration's; --use-checkpoint-opt-param-scheduler keeps the checkpoint's"
    )
    rates = before.rate(differs), own.rate(differs)
    there, here = (f"{rate:.6E}" for rate in rates)
    there, here = (there, here) if there != here else map(str, rates)
    note = (
        f"note: lr at iteration {differs} is {there} by the checkpoint's schedule{later} and {here} by this "
        f"configuration's ({', '.join(differing)}): {choice}"
    )
    return before.taken_by(optimizer) if keep else optimizer, note


def _saved_schedule(
    optimizer: OptimizerConfig, own: Schedule, path: Path, extra: dict[str, Any]
) -> Schedule | None:
    """Return the saved schedule; None in a checkpoint of imported weights."""
    if "schedule" not in extra:
        return None
    try:
        known = {field.name: extra["schedule"][field.name] for field in fields(Schedule)}
        for field in fields(Schedule):
            value: Any = known[field.name]
            fits = isinstance(value, field.type) and not isinstance(value, bool)  # type: ignore[arg-type]
            if not fits or (isinstance(value, (int, float)) and not 0 <= value < 1 << 53):
                raise ValueError(f"{field.name} is {value!r:.40}")
        before = replace(own, **known)
        before.taken_by(optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} keeps a schedule that makes no sense ({type(error).__name__}: {error}); load another one"
        ) from error
    return before
