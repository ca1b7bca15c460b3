"""Find the checkpoint or weights that a run starts from, and check that they fit the run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.hf.api import open_hf
from model.parts.lora import is_adapter
from model.registry import architecture_of
from parallel.data import copy_whole
from runtime.errors import printable
from runtime.together import from_first, gather_results, is_first, raise_together
from train.callbacks.health import RunProgress
from train.checkpoint.api import CheckpointConfig, compare_architecture, load_checkpoint, load_model
from train.checkpoint.manifest import MANIFEST, CheckpointError, is_count, read_manifest
from train.checkpoint.saving import newest_checkpoint
from train.config.common import CommonConfig
from train.config.flags import spelled
from train.ema import Ema
from train.optimizers.config import OptimizerConfig
from train.resume.architecture import check_adapters, refit
from train.resume.schedule import choose_schedule, shortened
from train.resume.settings import AVERAGED, changes, check_allowed


@dataclass(frozen=True)
class Start:
    """Start of a run: resumed, finetuned from weights, or from scratch.

    `find_start` needs only the configuration and a manifest to choose it, so contradictions are
    refused before data, model and optimizer are built, which takes time and memory. `load` is
    called once they exist.
    """

    checkpoint: CheckpointConfig
    """The settings with which the checkpoint was chosen."""
    optimizer: OptimizerConfig
    """The optimizer's settings, with the schedule that the run follows."""
    architecture: dict[str, Any]
    contents: dict[str, str]
    """Digests of the training files, ``config.contents()``."""
    progress: RunProgress
    path: Path | None = None
    """The checkpoint, or the folder of weights from Hugging Face; None from scratch."""
    notes: Sequence[str] = ()
    averaged: float | None = None
    """Decay of the EMA in the checkpoint; None if the checkpoint has no EMA."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """JSON records next to the training files, ``config.recorded()``."""

    def load(
        self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ema: Ema | None = None
    ) -> None:
        """Load the weights or state from ``path``, and print notes on changed settings; collective.

        Raises UserError if the files are broken, or are of another architecture or an unsupported
        model.
        """
        notes = list(self.notes)
        if self.path is not None:
            # After the first note, which says where the run starts.
            notes[1:1] = self._load_from(self.path, parts, optimizer, ema)
            if ema is not None and (self.averaged is None or self.checkpoint.finetune):
                ema.restart()
        if is_first() and notes:
            print("\n".join(map(printable, notes)), flush=True)

    def _load_from(
        self,
        path: Path,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
    ) -> list[str]:
        """Load from a path; return notes on changes of the architecture and the EMA."""
        if self.checkpoint.hugging_face is not None:
            return self._load_hugging_face(path, parts)
        if self.checkpoint.finetune:
            saved = read_manifest(path).architecture
            architecture, notes = refit(path, saved, self.architecture)
            load_model(path, parts, architecture, fresh=is_adapter)
            return notes
        more_tensors = None
        if ema is not None and self.averaged is not None:
            more_tensors = {"ema": ema.weights}
        conversion = self.optimizer.spec.conversion(self.optimizer)
        load_checkpoint(
            path,
            parts,
            optimizer,
            self.architecture,
            sections=more_tensors,
            conversion=conversion,
        )
        notes = [] if conversion is None else notes_of_ranks(conversion.notes())
        return notes + _notes_on_averages(self.averaged, ema)

    def _load_hugging_face(self, path: Path, parts: Sequence[nn.Module]) -> list[str]:
        """Load the weights of a Hugging Face folder; each rank reads one whole tensor at a time."""
        notes: list[str] = []
        with raise_together():
            model, _, read = open_hf(path, notes.append)
            saved = architecture_of(model)
            architecture, changed = refit(path, saved, self.architecture)
            try:
                compare_architecture(path, saved, architecture)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}. hf:FOLDER needs the configuration of the same model; give it with "
                    "--config (configs/ has some, and "
                    f"python -m tools.convert_hf import {path} RUN writes it)"
                ) from error
            for part in parts:
                for name, parameter in part.named_parameters():
                    if not is_adapter(name):
                        copy_whole(parameter, read(name))
        return notes + changed


def find_start(
    config: CommonConfig,
    architecture: dict[str, Any],
    contents: dict[str, str],
    checkpoint: CheckpointConfig | None = None,
) -> Start:
    """Find the checkpoint of ``--load``, and check that the run can start from it; collective.

    Without a checkpoint the run starts from scratch. With ``--finetune`` only the weights are
    loaded, and rope and windows may differ from those of the checkpoint, because no weight's shape
    depends on them. Such a run may also add adapters to a checkpoint without any. The weights of
    ``hf:FOLDER`` are read directly, without a checkpoint in between.

    Args:
        checkpoint: settings of the checkpoint to load; by default the configuration's.

    Raises UserError if the checkpoint is broken, was trained for another objective, or is missing
    but required.
    """
    checkpoint = checkpoint or config.checkpoint
    path = checkpoint.hugging_face
    notes: list[str] = []
    if path is None and checkpoint.load is not None:
        path = newest_checkpoint(checkpoint)
        if path is None:
            notes.append(_note_without_checkpoint(checkpoint, architecture))

    recorded = from_first(config.recorded)
    if path is not None and not checkpoint.finetune:
        return _resumed(config, architecture, contents, checkpoint, path, recorded)

    if path is not None:
        notes.append(f"weights from {path}; everything else starts from scratch")
    notes += shortened(config.optimizer, config.train.train_iters)
    return Start(
        checkpoint,
        config.optimizer,
        architecture,
        contents,
        RunProgress(),
        path,
        notes,
        recorded=recorded,
    )


def _resumed(
    config: CommonConfig,
    architecture: dict[str, Any],
    contents: dict[str, str],
    checkpoint: CheckpointConfig,
    path: Path,
    recorded: Mapping[str, Any],
) -> Start:
    """Return the start of a resumed run, after checking the checkpoint's manifest."""
    manifest = read_manifest(path)
    check_adapters(path, manifest.architecture, architecture, may_begin=False)
    progress = progress_of(path, manifest.extra)
    _check_optimizer(path, manifest.extra, config.optimizer.optimizer)
    _check_objective(path, manifest.extra, config)
    changed = changes(config, manifest.extra, contents)
    check_allowed(path, changed, checkpoint.allow_changed)
    optimizer, schedule_note = choose_schedule(
        config.optimizer, config.train.train_iters, path, manifest.extra, progress.iteration
    )

    notes = [f"resumed from {path}, {progress.consumed_samples} samples consumed"]
    if schedule_note is not None:
        notes.append(schedule_note)
    notes += [f"note: {line}" for line in changed.values()]
    averaged = manifest.extra.get(AVERAGED)
    return Start(
        checkpoint, optimizer, architecture, contents, progress, path, notes, averaged, recorded
    )


def _note_without_checkpoint(checkpoint: CheckpointConfig, architecture: dict[str, Any]) -> str:
    """Return the note that the run starts from scratch.

    Raises CheckpointError if a setting requires a checkpoint.
    """
    requires_checkpoint = {
        "finetune": checkpoint.finetune,
        "lora_rank": "lora_rank" in architecture,
        "exit_on_missing_checkpoint": checkpoint.exit_on_missing_checkpoint,
    }
    for name, is_set in requires_checkpoint.items():
        if is_set:
            raise CheckpointError(
                f"{name} is set, but load is {checkpoint.load}, which has no checkpoint; "
                f"name a run's folder, or leave out {name} to start from scratch"
            )
    return f"no checkpoint in {checkpoint.load}: starting from scratch"


def _check_objective(path: Path, extra: Mapping[str, Any], config: CommonConfig) -> None:
    """Raise CheckpointError if a checkpoint was trained for another objective."""
    trained_for = extra.get("trained_for", {})
    for name, value in config.named(config.OBJECTIVE).items():
        before = trained_for.get(name, value)
        if before != value:
            raise CheckpointError(
                f"{path} was trained with {name} {before}, but {name} is {value}; set {name} to "
                f"{before}, or start a new run with another --save and without --load"
            )


def _check_optimizer(path: Path, extra: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if a checkpoint has the state of a different optimizer.

    Imported weights have no state. Checkpoints from before the optimizer could be chosen do not
    name it; they were trained with adam.
    """
    if "settings" not in extra:
        return
    saved = extra["settings"].get("optimizer", "adam")
    if saved != name:
        raise CheckpointError(
            f"{path} has the state of optimizer {saved}, but optimizer is {name}, which cannot "
            f"use it; give --optimizer {saved}, or load only the weights with --finetune"
        )


def progress_of(path: Path, extra: dict[str, Any]) -> RunProgress:
    """Read a checkpoint's progress.

    Raises CheckpointError if its manifest has values that no run writes.
    """
    problem = _problem_of(extra, int(path.name.removeprefix("iter_")))
    if problem:
        raise CheckpointError(
            f"{path / MANIFEST} has no valid state of its run ({problem}); load another checkpoint"
        )
    return RunProgress(**extra["progress"])


def _problem_of(extra: dict[str, Any], iteration: int) -> str:
    """Return what is wrong with the values of a run in its manifest; empty if nothing is."""
    progress: Any = extra.get("progress")
    problem = ""
    if not isinstance(progress, dict) or not progress:
        problem = f"progress is {progress!r:.40}"
    else:
        names = {field.name for field in fields(RunProgress)}
        for name, value in progress.items():
            if name not in names or not is_count(value):
                problem = f"progress has {name!r:.40} {value!r:.40}"

    for name in ("sample_order", "trained_for", "settings", "schedule", "contents"):
        if not isinstance(extra.get(name, {}), dict):
            problem = f"{name} is {extra[name]!r:.40}"
    decay = extra.get(AVERAGED)
    if decay is not None and (type(decay) is not float or not 0 < decay < 1):
        problem = f"{AVERAGED} is {decay!r:.40}"
    if not problem and progress.get("iteration") != iteration:
        problem = f"progress has iteration {progress.get('iteration')}"
    return problem


def notes_of_ranks(notes: list[str]) -> list[str]:
    """Return the notes of all ranks, each once; collective.

    Pipeline stages hold different parameters, so a note may concern only some of the ranks. It then
    ends with their number.
    """
    by_rank = gather_results(lambda: notes)
    counts = Counter[str]()
    for local_notes in by_rank:
        counts.update(local_notes)
    lines = []
    for note, count in counts.items():
        is_shared = count == len(by_rank)
        lines.append(note if is_shared else f"{note} (on {count} of {len(by_rank)} ranks)")
    return lines


def _notes_on_averages(before: float | None, ema: Ema | None) -> list[str]:
    """Return notes on the EMA of the weights, given its decay in the checkpoint."""
    if before is None and ema is not None:
        return [
            "note: the checkpoint has no averages of the weights, so they start from its weights"
        ]
    if before is not None and ema is None:
        return [
            "note: the checkpoint's averages of the weights are dropped, because ema_decay was "
            f"{before} and is not set now; give --ema-decay {before} to keep them"
        ]
    if ema is not None and before != ema.decay:
        keeps = spelled("ema_decay", before)
        return [f"note: ema_decay was {before} and is {ema.decay}; {keeps} keeps it"]
    return []
