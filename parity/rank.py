"""What one process of `make parity` does: train as an entry would, and tell what came out."""

import hashlib
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import parallel.data
import pretrain_dit
import pretrain_gpt
from data.loader import Batch, Batching, Samples
from model.base import generator_of
from model.dit import initial_dit_weight
from model.dit_config import DiTConfig
from parallel.pipeline.schedule import PipelineRunner
from testing.training import Records, prepared_by
from train import loop
from train.loop import Trainer
from train.objectives.diffusion import Denoising


@dataclass
class Found:
    """What a rank tells: its records, and whole tensors by name and moment of the run.

    The first rank of each pipeline stage sends the tensors; the others digests of them, which must be equal.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    memory_mb: float = 0.0

    def keep(self, moment: str, values: dict[str, Tensor], send: bool) -> None:
        """Note tensors, of which DTensors are made whole: collective over their meshes."""
        whole = {name: _whole(value) for name, value in values.items()}
        self.digests[moment] = {name: _digest(value) for name, value in whole.items()}
        self.tensors[moment] = whole if send else {}


class Masked:
    """Samples with some labels masked, as a function of the sample alone: ranks get unequal numbers of valid tokens.

    Of eight samples one has none, two end early and two start late; a range in the middle goes from the rest.
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
    """Samples of latents of which every fourth, and the sixth of eight, carry no loss."""

    def __init__(self, data: Samples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        return self._data[None if index is not None and index % 8 in (0, 4, 6) else index]


def train(
    rank: int, world_size: int, flags: Sequence[str], sabotage: str | None = None, diffusion: bool = False
) -> Found:
    """Train on the processes that have joined; with ``sabotage``, after breaking what that names."""
    if diffusion:
        pretrain_dit.initial_dit_weight = _alive
    before = _peak_mb()
    if sabotage is not None:
        SABOTAGE[sabotage]()
    log = Records()
    found = Found(log.records)
    with prepared_by(pretrain_dit if diffusion else pretrain_gpt, flags, log) as trainer:
        mesh = trainer.mesh
        trainer.train_data = Left(trainer.train_data) if diffusion else Masked(trainer.train_data)
        send = mesh.both.get_local_rank() == mesh.tp.get_local_rank() == 0
        found.keep("loaded" if trainer.progress.iteration else "initial", state(trainer), send)
        _watch(trainer, found, send)
        trainer.run()
        found.keep("final", weights(trainer), send)
    found.memory_mb = _peak_mb() - before
    return found


def _alive(config: DiTConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value of a DiT's parameter, or small numbers where that is nought."""
    value = initial_dit_weight(config, name, shape, seed)
    return value if value.any() else value.normal_(0.0, 0.02, generator=generator_of(seed, name))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's parameters by name, both copies of a tied one where it holds both stages."""
    return {name: p.detach() for part in trainer.runner.parts for name, p in part.named_parameters()}


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and what the optimizer keeps of each, by name."""
    found = weights(trainer)
    for part in trainer.runner.parts:
        for name, parameter in part.named_parameters():
            found |= {f"{name}/{key}": value for key, value in trainer.optimizer.state.get(parameter, {}).items()}
    return found


def _watch(trainer: Trainer, found: Found, send: bool) -> None:
    """Note the first step's gradients before they are clipped, and what the first checkpoint saves."""
    clip, save = loop.clip_gradients, loop.save_checkpoint

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

    loop.clip_gradients, loop.save_checkpoint = noting_clip, noting_save


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def _peak_mb() -> float:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


def _layer_not_reduced() -> None:
    """legacy_ddp forgets the second layer's gradients."""
    finish = loop.finish_gradients

    def some(model: nn.Module, mesh: DeviceMesh, strategy: parallel.data.Strategy) -> None:
        reduced = [p for name, p in model.named_parameters() if not name.startswith("layers.1.")]
        finish(nn.ParameterList(reduced), mesh, strategy)

    loop.finish_gradients = some


def _local_mean() -> None:
    """Each rank divides by its own number of valid tokens, and the means are averaged."""
    next_step = Trainer._next_step

    def local(self: Trainer, steps: Any) -> Any:
        micro_batches, _ = next_step(self, steps)
        return micro_batches, sum(map(self.objective.count, micro_batches)) * self.mesh.both.size()

    Trainer._next_step = local  # type: ignore[method-assign]


def _alike_shards() -> None:
    """Every rank's shard starts as the first one."""

    def first(whole: Tensor, like: DTensor) -> Tensor:
        local = like.to_local()
        return whole.flatten()[: local.numel()].view(local.shape)

    parallel.data.own_shard = first


def _stage_without_norm() -> None:
    """All but the first stage leave most of their parameters out of the gradient norm."""
    parameters = PipelineRunner.parameters

    def some(self: PipelineRunner) -> dict[str, nn.Parameter]:
        return {name: p for name, p in parameters(self).items() if 0 in self.own or name == "norm.weight"}

    PipelineRunner.parameters = some  # type: ignore[method-assign]


def _noise_of_ranks() -> None:
    """The noise depends on the rank that draws it."""
    drawn = Denoising._drawn
    Denoising._drawn = lambda self, sample: drawn(self, 1000 * dist.get_rank() + sample)  # type: ignore[method-assign]


def _copies_left_alone() -> None:
    """The gradients of what several pipeline stages hold are not summed."""
    PipelineRunner._sum_copies = lambda *_: None  # type: ignore[method-assign]


def _samples_skipped() -> None:
    """A run begins two samples too late; one might be the wholly masked one, for which another such one comes."""
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
