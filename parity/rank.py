"""One process that is compared with others: train as an entry script does, and return the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import pretrain_dit
import pretrain_gpt
from checkpoint import saving
from data.loader import Samples
from model.dit import initial_dit_weight
from model.language import initial_weight
from parity.modules import Notes, Piece
from parity.samples import feed
from runtime.files import sha256
from runtime.tensors import Part, generator_of
from tools.common.training import Records, trainer_of
from train import optim
from train.loop import Trainer


@dataclass
class Found:
    """A rank's results: its records, and whole tensors by name and moment of the run.

    The first rank of each pipeline stage sends the tensors, every rank their digests, which must be equal.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    memory_mb: float = 0.0
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Pieces of each module in the first step, if a run's own samples are trained on."""

    def keep(self, moment: str, values: dict[str, Tensor], send: bool) -> None:
        """Store tensors, gathering DTensors whole: collective over their meshes."""
        gathered = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in values.items()}
        whole = {name: value.detach().to("cpu", copy=True) for name, value in gathered.items()}
        flat = {name: value.reshape(-1).view(torch.uint8).numpy() for name, value in whole.items()}
        self.digests[moment] = {name: sha256(value.tobytes()) for name, value in flat.items()}
        self.tensors[moment] = whole if send else {}


def train(
    rank: int,
    world_size: int,
    flags: Sequence[str],
    sabotage: Callable[[], None] | None = None,
    diffusion: bool = False,
    samples: Path | None = None,
    wrap: Callable[[Samples], Samples] = lambda data: data,
) -> Found:
    """Train on the joined processes; ``sabotage`` breaks something first.

    On ``samples`` (``parity.samples``) in the place of the data, if given, with a note of what modules return;
    otherwise on the data as ``wrap`` returns them.
    """
    pretrain_dit.initial_dit_weight = _alive(initial_dit_weight)
    if samples is not None:  # adapters and biases begin at zero too
        pretrain_gpt.initial_weight = _alive(initial_weight)
    if sabotage is not None:
        sabotage()
    log, notes = Records(), Notes()
    found = Found(log.records, pieces=notes.pieces)
    if samples is not None:
        feed(samples, notes)
    with trainer_of(pretrain_dit if diffusion else pretrain_gpt, flags, log) as trainer:
        mesh = trainer.run.mesh
        if samples is None:
            trainer.train_data = wrap(trainer.train_data)
        else:
            notes.watch(trainer.runner.parts, (mesh.tp.get_local_rank(), mesh.tp.size()))
        send = mesh.dp_cp.get_local_rank() == mesh.tp.get_local_rank() == 0
        found.keep("loaded" if trainer.progress.iteration else "initial", state(trainer), send)
        _watch(trainer, found, send, notes)
        trainer.train()
        found.keep("final", weights(trainer), send)
    return found


def _alive(initial: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what gives a parameter's initial value, or small random numbers where it is zero."""

    def value_of(config: Any, name: str, shape: Sequence[int], seed: int, part: Part = ()) -> Tensor:
        value = initial(config, name, shape, seed)
        return (value if value.any() else value.normal_(0.0, 0.02, generator=generator_of(seed, name)))[part]

    return value_of


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's parameters by name, both copies of a tied one if it holds both stages."""
    return {name: p.detach() for part in trainer.runner.parts for name, p in part.named_parameters()}


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Return the weights and their optimizer state by name."""
    found = weights(trainer)
    for part in trainer.runner.parts:
        for name, parameter in part.named_parameters():
            found |= {f"{name}/{key}": value for key, value in trainer.optimizer.state.get(parameter, {}).items()}
    return found


def _watch(trainer: Trainer, found: Found, send: bool, notes: Notes) -> None:
    """Store the first step's gradients before clipping, which ends the notes, and what the first checkpoint saves."""
    clip, save = optim.clip_gradients, saving.save_checkpoint

    def noting_clip(parameters: Any, norm: float, largest: float) -> None:
        notes.on = False
        if "gradients" not in found.tensors:
            parts = trainer.runner.parts
            gradients = {name: p.grad for part in parts for name, p in part.named_parameters() if p.grad is not None}
            found.keep("gradients", gradients, send)
        clip(parameters, norm, largest)

    def noting_save(*args: Any, **more: Any) -> Any:
        if "saved" not in found.tensors:
            found.keep("saved", state(trainer), send)
        return save(*args, **more)

    optim.clip_gradients, saving.save_checkpoint = noting_clip, noting_save
