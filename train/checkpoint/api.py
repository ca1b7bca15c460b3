"""Save and load atomic, verified, reshardable checkpoints.

Modules that import DCP (torch.distributed.checkpoint) are imported inside functions: the import
takes half a second, and a command line that is refused should not wait for it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
from train.checkpoint.local import fetch_missing
from train.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    Manifest,
    checkpoint_folder,
    read_manifest,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from train.checkpoint.shards import Read
    from train.checkpoint.tensors import Model

HUGGING_FACE = "hf:"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The folders that a run saves to and starts from."""

    save: str | None = None
    """Folder of the run: config.toml, metrics.jsonl, loss.png and checkpoints."""
    save_interval: int | None = None
    """Number of iterations between checkpoints; the run always writes one at its end."""
    async_save: bool = False
    """Write checkpoints in the background: training only waits for a copy in memory."""
    keep_last: int | None = None
    """Keep this many of the newest whole checkpoints and remove older ones. By default all are
    kept, or only the newest if --keep-every is given."""
    keep_every: int | None = None
    """Keep every checkpoint whose iteration is a multiple of this number."""
    non_persistent_save_interval: int | None = None
    """Number of iterations between checkpoints in --non-persistent-local-ckpt-dir, which keeps only
    the newest."""
    non_persistent_local_ckpt_dir: str | None = None
    """Folder on each node, such as /dev/shm/longmesh, for the checkpoints of
    --non-persistent-save-interval."""
    load: str | None = None
    """Folder of a run to resume from its newest whole checkpoint. With --finetune it may also be
    hf:FOLDER, a Hugging Face model of the same shape as the configuration (--config)."""
    ckpt_step: int | None = None
    """Load exactly this iteration from --load, and fail if it is broken."""
    finetune: bool = False
    """Take only the weights from --load, for a new run: optimizer, schedule, counters and data
    start from the beginning."""
    allow_changed: tuple[str, ...] = ()
    """Settings and files that may differ from those that the checkpoint was trained with; `all`
    allows any."""
    exit_on_missing_checkpoint: bool = False
    """Fail if --load has no checkpoint, instead of starting from scratch."""

    def __post_init__(self) -> None:
        for name in ("save_interval", "keep_last", "keep_every", "non_persistent_save_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more, or left out")
        for name in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
            value = getattr(self, name)
            if self.load is None and value not in (None, False):
                raise UserError(
                    f"{name} is {value}, but load is not set; name a run's folder with --load"
                )

        if self.hugging_face is not None and (not self.finetune or self.ckpt_step is not None):
            problem = "finetune is not set"
            if self.finetune:
                problem = f"ckpt_step is {self.ckpt_step}"
            raise UserError(
                f"load is {self.load}, a folder with only weights, but {problem}; give --finetune "
                "without --ckpt-step, or name a run's folder with --load"
            )

    @property
    def hugging_face(self) -> Path | None:
        """The folder of ``hf:FOLDER``; None if ``load`` does not name one."""
        if self.load is None or not self.load.startswith(HUGGING_FACE):
            return None
        return Path(self.load.removeprefix(HUGGING_FACE))


class Conversion(Protocol):
    """Reads the optimizer's tensors of a checkpoint in their format, and converts them."""

    def to_read(self, tensors: dict[str, torch.Tensor], metadata: Any) -> dict[str, torch.Tensor]:
        """Return the tensors to read into, keyed by name; ``tensors`` are the optimizer's.

        ``metadata`` is DCP's table of the checkpoint's tensors.
        """

    def convert(self) -> None:
        """Convert what was read into the optimizer's tensors."""

    def notes(self) -> list[str]:
        """Return notes on what was converted."""


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    model: "Model | Mapping[str, torch.Tensor]",
    optimizer: torch.optim.Optimizer | None,
    *,
    architecture: dict[str, Any],
    extra: dict[str, Any],
    sections: Mapping[str, dict[str, torch.Tensor]] | None = None,
    read: "Read | None" = None,
    background: Background | None = None,
    local: bool = False,
) -> Path:
    """Write the checkpoint ``iter_N`` into a run's folder atomically; return its path. Collective.

    Every rank writes its shards into a draft (a folder of this save alone), and hashes them. The
    first rank, or one of each node, writes the manifest, renames the draft to ``iter_N`` and points
    ``latest_checkpointed_iteration.txt`` at it. Tensors have the plain model's parameter names,
    whatever wraps or shards it. The optimizer's tensors (moments, step) are saved; its
    hyperparameters are not, since they follow from the configuration and the iteration.

    Args:
        directory: the run's folder, on a file system that all ranks share unless ``local``.
        architecture: JSON-serialisable description of the model, compared at load.
        extra: JSON-serialisable rest of the run's state, returned by ``load_checkpoint``.
        sections: further sections of tensors, keyed by section, such as the EMA of the weights.
        read: reads a weight from another file when it is written, so that only one is in memory;
            ``model`` then maps names to meta tensors, and there is no optimizer.
        background: writes the checkpoint from a copy in memory while the caller goes on.
        local: each node's ranks write into a folder of their own, which then has only this
            checkpoint.

    Raises CheckpointError on every rank if the iteration already has a whole checkpoint (a broken
    one is moved aside), or if the disk cannot be written to. No unfinished files remain.
    """
    from train.checkpoint.shards import Shards
    from train.checkpoint.tensors import tensors_of

    folder = checkpoint_folder(directory, iteration)
    manifest = Manifest(iteration=iteration, architecture=architecture, extra=extra, files={})
    shards = Shards(read)

    def plan() -> "SavePlan":
        json.dumps([architecture, extra])  # an error here comes before anything is written
        if isinstance(model, Mapping):
            state = {"model": dict(model)}
        else:
            state = tensors_of(model, optimizer)
        return shards.plan(state | dict(sections or {}))

    draft, rooms = start_draft(folder, manifest, local=local)
    with removed_on_error(draft.owned):
        check_room(rooms, shards.agree(gather_results(plan)))
        if background is None:
            run_steps(save_steps(draft, shards))
        else:
            gather_results(lambda: shards.copy(draft.path, background.memory))
            background.begin(draft, save_steps(draft, shards, background.keeper))
    return folder


def load_checkpoint(
    path: str | Path,
    model: "Model",
    optimizer: torch.optim.Optimizer,
    architecture: dict[str, Any],
    *,
    sections: Mapping[str, dict[str, torch.Tensor]] | None = None,
    conversion: Conversion | None = None,
) -> dict[str, Any]:
    """Load a verified checkpoint into the model and optimizer, bit for bit; return its ``extra``.

    Collective. Works with any number of ranks and any sharding, even if nodes have different files.
    Gradients are dropped; the optimizer keeps its hyperparameters.

    Args:
        path: a folder that ``find_checkpoint`` returned.
        sections: further sections of tensors to load into, as in ``save_checkpoint``.
        conversion: converts the optimizer's tensors if the checkpoint has them in another format.

    Raises CheckpointError if the architecture or a tensor's name, shape or dtype differs, or if a
    file is damaged. A difference raises before any weight changes.
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
        # ``tensors_of`` creates the state again, unless the checkpoint is from before the first
        # step: at step 1 an empty state acts differently from a state of zeros.
        optimizer.state.clear()
        state = tensors_of(model, optimizer, create=stepped) | dict(sections or {})
        if conversion is not None:
            state["optimizer"] = conversion.to_read(state["optimizer"], metadata)
    compare_tensors(folder, state, metadata, exact_dtype=True)
    fetch_missing(folder, files_read(state, metadata))
    read_shards(folder, state, metadata)
    if conversion is not None:
        conversion.convert()
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
    """Load only the weights, cast to the dtypes of ``model``, and return the manifest.

    Needs no process group; several parts of a model load collectively, as in ``load_checkpoint``.

    Args:
        section: section of the checkpoint to read; an EMA of the weights has its own.
        fresh: returns True for a weight that keeps its value if the checkpoint lacks it.

    Raises CheckpointError under the same conditions as ``load_checkpoint``.
    """
    from train.checkpoint.tensors import compare_tensors, read_shards, spread_copies, tensors_of

    folder = Path(path)
    with raise_together():
        manifest, metadata = _described(folder, architecture)
        weights = {}
        for name, weight in tensors_of(model, None)["model"].items():
            if f"{section}.{name}" in metadata.state_dict_metadata or not fresh(name):
                weights[name] = weight
        state = {section: weights}
    compare_tensors(folder, state, metadata, exact_dtype=False)
    read_shards(folder, state, metadata)
    spread_copies(model, None)
    return manifest


def stored_weights(
    path: str | Path, architecture: dict[str, Any], section: str = "model"
) -> tuple[dict[str, torch.Tensor], "Read"]:
    """Return a checkpoint's weights as meta tensors, keyed by name, and a function that reads one.

    Needs no process group; ``section`` is as in ``load_model``. Raises CheckpointError under the
    same conditions as ``load_checkpoint``.
    """
    from train.checkpoint.tensors import read_shards

    _, metadata = _described(Path(path), architecture)
    prefix = f"{section}."
    weights = {}
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith(prefix):
            weights[name.removeprefix(prefix)] = torch.empty(
                entry.size, dtype=entry.properties.dtype, device="meta"
            )

    def read(name: str) -> torch.Tensor:
        weight = torch.empty_like(weights[name], device="cpu")
        read_shards(Path(path), {section: {name: weight}}, metadata)
        return weight

    return weights, read


def _described(folder: Path, architecture: dict[str, Any]) -> tuple[Manifest, Any]:
    """Read a checkpoint's manifest and DCP's table of tensors, and compare the architecture."""
    from train.checkpoint.metadata import read_metadata

    manifest = read_manifest(folder)
    compare_architecture(folder, manifest.architecture, architecture)
    return manifest, read_metadata(folder, manifest)


def compare_architecture(folder: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise CheckpointError naming all differences between a checkpoint's model and this run's."""
    expected = json.loads(json.dumps(expected))
    family = saved.get("model_type")
    expected_family = expected.get("model_type")
    if family != expected_family:
        raise CheckpointError(
            f"{folder} has a model of model_type {family}, but this run's is {expected_family}; "
            "choose another folder for --save and --load (make: RUN=), or set model_type to "
            f"{family}"
        )

    differences = []
    for field in sorted(saved.keys() | expected.keys()):
        saved_value = repr(saved[field]) if field in saved else "absent"
        expected_value = repr(expected[field]) if field in expected else "absent"
        if saved_value != expected_value:
            differences.append(
                f"{field} is {saved_value} in the checkpoint and {expected_value} in this run"
            )
    if differences:
        raise CheckpointError(
            f"{folder} has a different architecture: {'; '.join(differences)}. Change the "
            "configuration, or load another checkpoint"
        )
