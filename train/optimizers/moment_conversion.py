"""Read moments from a checkpoint in another format than the run's, and convert them.

A checkpoint has moments in the format in which they were stored. If the run has the same format and
the same blocks, they are read as they are. Otherwise they are read into temporary tensors, made
float32, and rounded to nearest.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from parallel.data import local_shard, to_local
from train.optimizers.moment_formats import MOMENTS, SCALE, MomentFormat

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class Pending(NamedTuple):
    """A moment to convert."""

    moment: str
    stored_format: MomentFormat
    stored: Tensor
    """The checkpoint's values, sharded like the parameter."""
    stored_scales: Tensor | None
    """All of the parameter's scales in the checkpoint, ``[rows, blocks per row]``."""
    live: Tensor
    live_scales: Tensor | None


class MomentConversion:
    """Converts the moments of a checkpoint; a ``train.checkpoint.api.Conversion``."""

    def __init__(self, formats: Iterable[MomentFormat], run: Mapping[str, str]) -> None:
        """Take all formats, and the names of the run's, keyed by moment."""
        self._run = run
        self._format_of = {moment_format.dtype: moment_format for moment_format in formats}
        self._pending: list[Pending] = []
        self._changes: set[tuple[str, str, str]] = set()
        """Moments converted on this rank, with the checkpoint's format and the run's."""

    def to_read(self, tensors: dict[str, Tensor], metadata: "Metadata") -> dict[str, Tensor]:
        """Return the optimizer's tensors with temporary ones for moments of another format."""
        to_read = dict(tensors)
        saved = self._saved_formats(metadata)
        for name, live in tensors.items():
            moment = name.rpartition(".")[2]
            if moment not in MOMENTS:
                continue
            stored: Any = metadata.state_dict_metadata.get(f"optimizer.{name}")
            dtype = None if stored is None else stored.properties.dtype
            if dtype not in self._format_of or stored.size != live.shape:
                continue  # ``compare_tensors`` names the difference

            stored_scale = metadata.state_dict_metadata.get(f"optimizer.{name}{SCALE}")
            scale_shape = getattr(stored_scale, "size", None)
            live_scales = tensors.get(name + SCALE)
            live_shape = None if live_scales is None else live_scales.shape
            if dtype == live.dtype and scale_shape == live_shape:
                continue

            to_read[name] = torch.empty_like(live, dtype=dtype, device="cpu")
            to_read.pop(name + SCALE, None)
            if scale_shape is not None:
                to_read[name + SCALE] = torch.zeros(scale_shape)
            pending = Pending(
                moment,
                self._format_of[dtype],
                to_read[name],
                to_read.get(name + SCALE),
                live,
                live_scales,
            )
            self._pending.append(pending)
            self._changes.add((moment, saved[moment], self._run[moment]))
        return to_read

    def _saved_formats(self, metadata: "Metadata") -> dict[str, str]:
        """Return the checkpoint's format of each moment, the same on all ranks.

        With 8 bits some tensors are float32, and this rank may read those alone. So all tensors of
        the checkpoint count, and another format than float32 decides.
        """
        formats = dict.fromkeys(MOMENTS, "fp32")
        for name, stored in metadata.state_dict_metadata.items():
            moment = name.rpartition(".")[2]
            if moment not in MOMENTS or not name.startswith("optimizer."):
                continue
            stored_format = self._format_of.get(stored.properties.dtype)  # type: ignore[union-attr]
            if stored_format is not None and stored_format.name != "fp32":
                formats[moment] = stored_format.name
        return formats

    @torch.no_grad()
    def convert(self) -> None:
        """Round the moments that were read into the optimizer's, and free the former."""
        while self._pending:
            pending = self._pending.pop()
            stored = [to_local(pending.stored)]
            if not stored[0].numel():
                continue
            if pending.stored_scales is not None:
                stored.append(_scale_of_elements(pending.stored, pending.stored_scales))
            live = [to_local(pending.live)]
            stored = [tensor.to(live[0].device) for tensor in stored]
            values = pending.stored_format.unpack(tuple(_flat(stored)), pending.moment)
            if pending.live_scales is not None:
                live.append(to_local(pending.live_scales))
            live_format = self._format_of[pending.live.dtype]
            live_format.pack(values, tuple(_flat(live)), pending.moment)

    def notes(self) -> list[str]:
        """Return notes on the conversions of this rank."""
        changes = []
        flags = []
        reblocked = set()
        for moment, before, after in sorted(self._changes):
            if before == after:
                reblocked.add(after)
                continue
            changes.append(f"{moment}_dtype was {before} and is {after}")
            flags.append(f"--{moment.replace('_', '-')}-dtype {before}")
        notes = []
        if changes:
            notes.append(
                f"note: {', '.join(changes)}; {' '.join(flags)} keeps the moments as they are"
            )
        for name in sorted(reblocked):
            notes.append(
                f"note: this mesh cuts {name} moments into blocks of other lengths than the "
                "checkpoint's, or for some parameters only one of the two has blocks, so they are "
                "converted"
            )
        return notes


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view(-1) for tensor in tensors]


def _scale_of_elements(stored: Tensor, scales: Tensor) -> Tensor:
    """Return the scale of each element of this rank's shard, given those of the whole parameter."""
    local, slices = local_shard(stored)
    block = stored.shape[1:].numel() // scales.shape[1]
    inner = stored.shape[2:].numel()
    columns = torch.arange(slices[1].start * inner, slices[1].stop * inner, device=local.device)
    return scales[slices[0]][:, columns // block].contiguous()
