"""One process that is compared with others: its samples, a training as by an entry script, and the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import pretrain_dit
import pretrain_gpt
from data.latents.dataset import DIGITS, build_latent_datasets
from data.loader import Batch, Samples
from data.text.config import blend
from data.text.megatron import build_datasets
from data.tokenizer import load_tokenizer
from model.dit import initial_dit_weight
from model.language import initial_weight
from runtime.files import sha256
from runtime.tensors import Part, generator_of
from tools.common.training import Records, trainer_of
from tools.parity.modules import Notes, Piece
from train import gradients
from train.checkpoint import saving
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.loop import Trainer
from train.objectives import language
from train.objectives.diffusion import Denoising
from train.objectives.language import NextToken

Sample = dict[str, Tensor]


class OwnSamples(list[Sample]):
    """Samples in memory, as a data set."""

    fill = 1.0


def samples_of(asked: Any, small: Any, number: int) -> tuple[list[Sample], str]:
    """Return ``number`` samples for the shrunken run, and where they are from.

    Of a text every k-th token is taken, with its label, its loss and the beginnings of documents since the one before;
    of latents a corner. Token ids and classes are taken modulo the small numbers of them. Some carry no loss, so that
    ranks hold unequal numbers of valid tokens.

    Raises DataError: data that are there and cannot be read.
    """
    own: Any = None
    data, seed = asked.data, asked.train.seed
    dit, paths = isinstance(asked, DiTRunConfig), data.data_path
    digits = dit and asked.model.latent_shape == (1, 8, 8)
    if dit and all(Path(path).is_dir() or (digits and path == DIGITS) for path in paths):
        own = build_latent_datasets(data, asked.model.latent_shape, asked.model.num_classes, seed)[0]
    if not dit and data.tokenizer_model and paths and all(Path(f"{path}.idx").exists() for path in blend(paths)[0]):
        own = build_datasets(data, asked.train.seq_length, seed, load_tokenizer(data.tokenizer_model))[0]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cut: Any = _latents if dit else _text
        found = [cut(None if own is None else own[n], small, n) for n in range(number)]
    return found, "made-up samples, as there are no data yet" if own is None else " ".join(data.data_path)


def _text(whole: Sample | None, small: Config, number: int) -> Sample:
    """Return a sample of seq_length tokens, with the numbers of its places."""
    length, entries = small.train.seq_length, small.model.vocabulary
    if whole is None:
        drawn = torch.randint(entries, (length + 1,))
        whole = {"tokens": drawn[:-1], "labels": drawn[1:], "loss_mask": torch.ones(length)}
        whole |= {"starts": torch.rand(length) < 8 / length} if small.data.tells_documents else {}
    step = len(whole["tokens"]) // length
    found = {name: rows[: step * length].view(length, step) for name, rows in whole.items()}
    found = {name: rows.any(1) if name == "starts" else rows[:, 0].clone() for name, rows in found.items()}
    if "starts" in found:
        found["starts"][0] = True
    found |= {name: found[name] % entries for name in ("tokens", "labels")}
    found["loss_mask"][(slice(40, 47), slice(length // 2), slice(length // 4, length), slice(0))[number % 4]] = 0
    return found | {"place": number * length + torch.arange(length)}


def _latents(whole: Sample | None, small: DiTRunConfig, number: int) -> Sample:
    """Return a sample of latent_shape, with its number."""
    shape, classes = small.model.latent_shape, small.model.num_classes
    if whole is None:
        whole = {"latents": torch.randn(shape), "labels": torch.tensor(number)}
    corner = whole["latents"][tuple(map(slice, shape))].clone()
    return {
        "latents": corner,
        "labels": whole["labels"] % classes,
        "sample": torch.tensor(-1 if number % 4 == 3 else number),
    }


def feed(path: Path, notes: Notes) -> None:
    """Make this process's entries train on the samples of a file, tell where tokens are, and note what modules return.

    The last third is for validation.
    """
    train = OwnSamples(torch.load(path))
    valid = train[len(train) * 2 // 3 :]
    gpt: Any = pretrain_gpt
    dit: Any = pretrain_dit
    gpt.build_datasets, dit.build_latent_datasets = lambda *_: (train, valid, None), lambda *_: (train, valid)
    gpt.tokenizer_of, gpt.corpus_entropy = lambda _: SimpleNamespace(vocab_size=1), lambda _: {}
    gpt.validate = dit.validate = lambda *_: None  # done as it was shrunk
    Config.contents = DiTRunConfig.contents = CommonConfig.contents  # type: ignore[method-assign]
    language.PADDING["place"] = -1
    local = Denoising.local

    def placed(self: Denoising, batch: Batch) -> Batch:
        """Add the places of patches; those of joined samples count on through the micro-batch."""
        patches, joined = self._model.num_patches, self._sample is not None
        places = batch["sample"][:, None] * patches + torch.arange(patches)
        places[batch["sample"] < 0] = -1
        return local(self, batch) | {"place": self._cp.shard(places.view(1, -1) if joined else places, 1, pad_value=-1)}

    Denoising.local = placed  # type: ignore[method-assign]
    for objective in (NextToken, Denoising):
        objective.loss_sum = notes.noted(objective.loss_sum)  # type: ignore[method-assign]


@dataclass
class RankResult:
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
) -> RankResult:
    """Train on the joined processes; ``sabotage`` breaks something first.

    On ``samples`` (a file of ``samples_of``) in the place of the data, if given, with a note of what modules return;
    otherwise on the data as ``wrap`` returns them.
    """
    pretrain_dit.initial_dit_weight = _alive(initial_dit_weight)
    if samples is not None:  # adapters and biases begin at zero too
        pretrain_gpt.initial_weight = _alive(initial_weight)
    if sabotage is not None:
        sabotage()
    log, notes = Records(), Notes()
    found = RankResult(log.records, pieces=notes.pieces)
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


def _watch(trainer: Trainer, found: RankResult, send: bool, notes: Notes) -> None:
    """Store the first step's gradients before clipping, which ends the notes, and what the first checkpoint saves."""
    clip, save = gradients.clip_gradients, saving.save_checkpoint

    def noting_clip(parameters: Any, norm: float, largest: float) -> None:
        notes.on = False
        if "gradients" not in found.tensors:
            parts = trainer.runner.parts
            named = [pair for part in parts for pair in part.named_parameters()]
            by_name = {name: p.grad for name, p in named if p.grad is not None}
            found.keep("gradients", by_name, send)
        clip(parameters, norm, largest)

    def noting_save(*args: Any, **more: Any) -> Any:
        if "saved" not in found.tensors:
            found.keep("saved", state(trainer), send)
        return save(*args, **more)

    gradients.clip_gradients, saving.save_checkpoint = noting_clip, noting_save
