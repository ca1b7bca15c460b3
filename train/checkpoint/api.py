"""Save and load atomic, verified, reshardable checkpoints."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.errors import UserError
from runtime.together import gather_results, raise_together
from train.checkpoint.drafts import (
    Background,
    check_room,
    removed_on_error,
    run_steps,
    save_steps,
    start_draft,
)
from train.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    Manifest,
    checkpoint_folder,
    fetch_missing,
    read_manifest,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from train.checkpoint.tensors import Model, Read

HUGGING_FACE = "hf:"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Folders that a run is kept in and starts from."""

    save: str | None = None
    """Folder of the run: config.toml, metrics.jsonl, loss.png and checkpoints."""
    save_interval: int | None = None
    """Iterations between checkpoints; one is written at the end in any case."""
    async_save: bool = False
    """Write checkpoints while training goes on: it waits for a copy in memory alone."""
    keep_last: int | None = None
    """Remove older checkpoints than this many newest whole ones; by default none, with --keep-every
    all but one.
    """
    keep_every: int | None = None
    """Never remove the checkpoints of iterations that this divides."""
    non_persistent_save_interval: int | None = None
    """Iterations between checkpoints in --non-persistent-local-ckpt-dir, of which the newest is
    kept.
    """
    non_persistent_local_ckpt_dir: str | None = None
    """Folder of each node, such as /dev/shm/longmesh, for the checkpoints of
    --non-persistent-save-interval.
    """
    load: str | None = None
    """Folder to resume from: its newest whole checkpoint. With --finetune also hf:FOLDER, a Hugging
    Face model whose shape the configuration has (--config)."""
    ckpt_step: int | None = None
    """Load exactly this iteration from --load, and fail if it is broken."""
    finetune: bool = False
    """Take only the weights from --load, for a new run: optimizer, schedule, counters and data
    begin afresh.
    """
    allow_changed: tuple[str, ...] = ()
    """Settings and files that may be others than those that the checkpoint was trained with; all
    allows any.
    """
    exit_on_missing_checkpoint: bool = False
    """Fail where --load holds no checkpoint, rather than start afresh."""

    def __post_init__(self) -> None:
        for name in ("save_interval", "keep_last", "keep_every", "non_persistent_save_interval"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more, or left out")
        for name in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
            if self.load is None and (value := getattr(self, name)) not in (None, False):
                raise UserError(
                    f"{name} is {value} and load is not set; name a run's folder with --load"
                )
        if self.hugging_face is not None and (not self.finetune or self.ckpt_step is not None):
            wrong = "finetune is not set" if not self.finetune else f"ckpt_step is {self.ckpt_step}"
            raise UserError(
                f"load is {self.load}, which holds weights alone, and {wrong}; give --finetune and no --ckpt-step, or "
                "name a run's folder with --load"
            )

    @property
    def hugging_face(self) -> Path | None:
        """Return the folder of ``hf:FOLDER``; None if ``load`` is a run's."""
        found = None if self.load is None else self.load.removeprefix(HUGGING_FACE)
        return None if found is None or found == self.load else Path(found)


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    model: "Model | Mapping[str, torch.Tensor]",
    optimizer: torch.optim.Optimizer | None,
    *,
    architecture: dict[str, Any],
    extra: dict[str, Any],
    more: Mapping[str, dict[str, torch.Tensor]] | None = None,
    read: "Read | None" = None,
    beside: Background | None = None,
    local: bool = False,
) -> Path:
    """Write ``iter_N`` into a run's folder atomically and return its path.

    Every rank writes its shards into a draft that no other save writes to, and hashes them; the
    first rank, or one of each node, writes the manifest, renames the draft to ``iter_N`` and points
    ``latest_checkpointed_iteration.txt`` at it. Collective. Tensors keep the plain model's
    parameter names, whatever wraps or shards it. The optimizer's tensors (moments, step) are saved;
    its hyperparameters are not, since they follow from the configuration and the iteration.

    Args:
        directory: the run's folder, on a file system that all ranks share unless ``local``.
        architecture: JSON-serialisable description of the model, compared at load.
        extra: JSON-serialisable rest of the run's state, returned by ``load_checkpoint``.
        more: further sections of tensors by name, such as averages of the weights.
        read: of weights from elsewhere, without an optimizer: ``model`` has meta tensors by name,
            and this returns one of them when it is written, so that one at a time is in memory.
        beside: copy into memory, and have this write the checkpoint from there while the caller
            goes on.
        local: each node's ranks write into a folder of their own, where this checkpoint, once it is
            whole, is alone.

    Raises CheckpointError: the iteration has a whole checkpoint (a broken one is moved aside), or
    the disk refuses; raised on every rank, and nothing half-written stays.
    """
    from train.checkpoint.tensors import (
        Shards,
        tensors_of,
    )  # imports DCP, which takes half a second

    folder = checkpoint_folder(directory, iteration)
    manifest = Manifest(iteration=iteration, architecture=architecture, extra=extra, files={})
    shards = Shards(read)

    def planned() -> "SavePlan":
        json.dumps([architecture, extra])
        of_run = (
            {"model": dict(model)} if isinstance(model, Mapping) else tensors_of(model, optimizer)
        )
        return shards.plan(of_run | dict(more or {}))

    draft, rooms = start_draft(folder, manifest, local=local)
    with removed_on_error(draft.made):
        check_room(rooms, shards.agree(gather_results(planned)))
        if beside is None:
            run_steps(save_steps(draft, shards))
        else:
            gather_results(lambda: shards.copy(draft.path, beside.memory))
            beside.begin(draft, save_steps(draft, shards, beside.keeper))
    return folder


def load_checkpoint(
    path: str | Path,
    model: "Model",
    optimizer: torch.optim.Optimizer,
    architecture: dict[str, Any],
    *,
    more: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> dict[str, Any]:
    """Load a folder that ``find_checkpoint`` verified into the model and optimizer, bit for bit;
    collective.

    Works with any number of ranks and any sharding, and where each node has other files. Gradients
    are dropped; the optimizer keeps its hyperparameters. ``more`` has further sections of tensors,
    as saved; returns the saved ``extra``. Raises CheckpointError: the architecture or a tensor's
    name, shape or dtype differs, or a file is damaged. A difference raises before any weight
    changes.
    """
    from train.checkpoint.tensors import (
        compare_tensors,
        files_read,
        read_shards,
        spread_copies,
        tensors_of,
    )

    folder = Path(path)
    fetch_missing(folder, [METADATA])
    with raise_together():
        manifest, metadata = _described(folder, architecture)
        optimizer.zero_grad(set_to_none=True)
        stepped = any(name.startswith("optimizer.") for name in metadata.state_dict_metadata)
        # Recreated below unless saved before the first step: an empty state differs from zeros with
        # step 1.
        optimizer.state.clear()
        state = tensors_of(model, optimizer, create=stepped) | dict(more or {})
    compare_tensors(folder, state, metadata, exact_dtype=True)
    fetch_missing(folder, files_read(state, metadata))
    read_shards(folder, state, metadata)
    spread_copies(model, optimizer)
    return manifest.extra


def load_model(
    path: str | Path,
    model: "Model",
    architecture: dict[str, Any],
    *,
    section: str = "model",
    fresh: Callable[[str], bool] = lambda name: False,
) -> Manifest:
    """Load only the weights, cast to the dtypes of ``model``, and return the manifest. Needs no
    process group.

    Several parts of a model load collectively, as in ``load_checkpoint``.

    Args:
        section: section of the checkpoint to read; weight averages have their own.
        fresh: whether a weight of this name stays as it is where the checkpoint lacks it.

    Raises CheckpointError as ``load_checkpoint`` does.
    """
    from train.checkpoint.tensors import compare_tensors, read_shards, spread_copies, tensors_of

    folder = Path(path)
    with raise_together():
        manifest, metadata = _described(folder, architecture)
        held, wanted = metadata.state_dict_metadata, tensors_of(model, None)["model"]
        state = {
            section: {n: w for n, w in wanted.items() if f"{section}.{n}" in held or not fresh(n)}
        }
    compare_tensors(folder, state, metadata, exact_dtype=False)
    read_shards(folder, state, metadata)
    spread_copies(model, None)
    return manifest


def stored_weights(
    path: str | Path, architecture: dict[str, Any], section: str = "model"
) -> tuple[dict[str, torch.Tensor], "Read"]:
    """Return meta tensors of a checkpoint's weights by name, and what reads one of them; needs no
    process group.

    ``section`` is as of ``load_model``. Raises CheckpointError as ``load_checkpoint`` does.
    """
    from train.checkpoint.tensors import read_shards

    _, metadata = _described(Path(path), architecture)
    weights = {
        name.removeprefix(f"{section}."): torch.empty(
            entry.size, dtype=entry.properties.dtype, device="meta"
        )
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(f"{section}.")
    }

    def read(name: str) -> torch.Tensor:
        weight = torch.empty_like(weights[name], device="cpu")
        read_shards(Path(path), {section: {name: weight}}, metadata)
        return weight

    return weights, read


def _described(folder: Path, architecture: dict[str, Any]) -> tuple[Manifest, Any]:
    """Read a checkpoint's manifest and DCP's table of tensors, and check that it is of this
    architecture.
    """
    from train.checkpoint.tensors import read_metadata

    manifest = read_manifest(folder)
    compare_architecture(folder, manifest.architecture, architecture)
    return manifest, read_metadata(folder, manifest)


def compare_architecture(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise CheckpointError, which names all that differs, if what ``folder`` holds is not what is
    ``wanted``.
    """
    wanted = json.loads(json.dumps(wanted))
    differing = []
    for field in sorted(saved.keys() | wanted.keys()):
        there, here = (
            repr(fields[field]) if field in fields else "absent" for fields in (saved, wanted)
        )
        if there != here:
            differing.append(f"{field} is {there} there and {here} here")
    kinds = [fields.get("model_type") for fields in (saved, wanted)]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{folder} holds a model of model_type {kinds[0]}, and this run's is {kinds[1]}; choose another folder for "
            f"--save and --load (make: RUN=), or set model_type to {kinds[0]}"
        )
    if differing:
        raise CheckpointError(
            f"{folder} holds another architecture: {'; '.join(differing)}. Change the configuration or load another one"
        )
