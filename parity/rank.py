"""One process of `make parity`: train as an entry script does, and return the results."""

import hashlib
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import parallel.data
import pretrain_dit
import pretrain_gpt
from checkpoint import saving
from data.loader import Batch, Batching, Samples
from model.base import generator_of
from model.dit import initial_dit_weight
from model.dit_config import DiTConfig
from parallel.pipeline.schedule import PipelineRunner
from testing.training import Records, trainer_of
from train import loop, optim
from train.loop import Trainer
from train.objectives.diffusion import Denoising


@dataclass
class Found:
    """A rank's results: its records, and whole tensors by name and moment of the run.

    The first rank of each pipeline stage sends the tensors, every rank their digests, which must be equal.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    memory_mb: float = 0.0

    def keep(self, moment: str, values: dict[str, Tensor], send: bool) -> None:
        """Store tensors, gathering DTensors whole: collective over their meshes."""
        whole = {name: _whole(value) for name, value in values.items()}
        self.digests[moment] = {name: _digest(value) for name, value in whole.items()}
        self.tensors[moment] = whole if send else {}


class Masked:
    """Samples with labels masked by the sample's index, so that ranks get unequal numbers of valid tokens.

    Of eight samples, one has none, two end early, two start late, and the rest lack a range in the middle.
    """

    def __init__(self, data: Samples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        sample = dict(self._data[index])
        mask = sample["loss_mask"].clone()
        if index is not None:
            length = len(mask)
            kinds = (0, length), (length // 4, length), (0, length // 2), (40, 47)
            mask[slice(*kinds[(0, 1, 2, 3, 3, 2, 1, 3)[index % 8]])] = 0
        return {**sample, "loss_mask": mask}


class Left:
    """Samples of latents of which three in eight carry no loss."""

    def __init__(self, data: Samples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        return self._data[None if index is not None and index % 8 in (0, 4, 6) else index]


def train(
    rank: int, world_size: int, flags: Sequence[str], sabotage: str | None = None, diffusion: bool = False
) -> Found:
    """Train on the joined processes; with ``sabotage``, break what it names first."""
    if diffusion:
        pretrain_dit.initial_dit_weight = _alive
    before = _peak_mb()
    if sabotage is not None:
        SABOTAGE[sabotage]()
    log = Records()
    found = Found(log.records)
    with trainer_of(pretrain_dit if diffusion else pretrain_gpt, flags, log) as trainer:
        mesh = trainer.mesh
        trainer.train_data = Left(trainer.train_data) if diffusion else Masked(trainer.train_data)
        send = mesh.dp_cp.get_local_rank() == mesh.tp.get_local_rank() == 0
        found.keep("loaded" if trainer.progress.iteration else "initial", state(trainer), send)
        _watch(trainer, found, send)
        trainer.run()
        found.keep("final", weights(trainer), send)
    found.memory_mb = _peak_mb() - before
    return found


def _alive(config: DiTConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return a DiT parameter's initial value, or small random numbers if it is zero."""
    value = initial_dit_weight(config, name, shape, seed)
    return value if value.any() else value.normal_(0.0, 0.02, generator=generator_of(seed, name))


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


def _watch(trainer: Trainer, found: Found, send: bool) -> None:
    """Store the first step's gradients before clipping, and what the first checkpoint saves."""
    clip, save = optim.clip_gradients, saving.save_checkpoint

    def noting_clip(parameters: Any, norm: float, largest: float) -> None:
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


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _peak_mb() -> float:
    """Return this process's largest resident set so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


def _layer_not_reduced() -> None:
    """Make legacy_ddp skip the second layer's gradients."""
    finish = optim.finish_gradients

    def some(model: nn.Module, mesh: DeviceMesh, strategy: parallel.data.Strategy) -> None:
        reduced = [p for name, p in model.named_parameters() if not name.startswith("layers.1.")]
        finish(nn.ParameterList(reduced), mesh, strategy)

    optim.finish_gradients = some


def _local_mean() -> None:
    """Divide by each rank's own number of valid tokens, and average the means."""
    next_step = Trainer._next_step

    def local(self: Trainer, steps: Any) -> Any:
        micro_batches, _, flops = next_step(self, steps)
        return micro_batches, sum(map(self.objective.count, micro_batches)) * self.mesh.dp_cp.size(), flops

    Trainer._next_step = local  # type: ignore[method-assign]


def _alike_shards() -> None:
    """Start every rank's shard with the values of the first."""

    def first(whole: Tensor, like: DTensor) -> Tensor:
        local = like.to_local()
        return whole.flatten()[: local.numel()].view(local.shape)

    parallel.data.own_shard = first


def _stage_without_norm() -> None:
    """Leave most parameters of all but the first stage out of the gradient norm."""
    parameters = PipelineRunner.parameters

    def some(self: PipelineRunner) -> dict[str, nn.Parameter]:
        return {name: p for name, p in parameters(self).items() if 0 in self.own or name == "norm.weight"}

    PipelineRunner.parameters = some  # type: ignore[method-assign]


def _noise_of_ranks() -> None:
    """Make the noise depend on the rank that draws it."""
    drawn = Denoising._drawn
    Denoising._drawn = lambda self, sample: drawn(self, 1000 * dist.get_rank() + sample)  # type: ignore[method-assign]


def _copies_left_alone() -> None:
    """Do not sum the gradients of parameters that several pipeline stages hold."""
    PipelineRunner._sum_copies = lambda *_: None  # type: ignore[method-assign]


def _samples_skipped() -> None:
    """Start two samples too late; one alone might be the fully masked one, replaced by another such one."""
    batches = loop.batches

    def later(dataset: Samples, batching: Batching, consumed_samples: int) -> Iterator[list[Batch]]:
        return batches(dataset, batching, consumed_samples + 2)

    loop.batches = later


SABOTAGE: dict[str, Callable[[], None]] = {
    "a layer's gradients are not reduced": _layer_not_reduced,
    "local means instead of the global one": _local_mean,
    "shards are initialised alike": _alike_shards,
    "a stage's norm is missing": _stage_without_norm,
    "samples are skipped": _samples_skipped,
    "noise is drawn by each rank": _noise_of_ranks,
    "copies of a pipeline's embeddings are left alone": _copies_left_alone,
}
