"""One process that is compared with others: its samples, a training as by an entry script, and the
results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.latents.dataset import DIGITS, build_latent_datasets
from data.loader import Batch, Samples
from data.text.config import blend
from data.text.megatron import build_datasets
from data.tokenizer import load_tokenizer
from model.registry import initial_weight
from runtime.files import sha256
from runtime.tensors import Part, generator_of
from tools.common.training import Records, trainer_of
from tools.parity.modules import Notes, Piece
from train import gradients, tasks
from train.checkpoint import saving
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.objectives import language
from train.objectives.diffusion import Denoising
from train.objectives.language import NextToken
from train.tasks.diffusion import DiffusionTask
from train.tasks.language import LanguageTask
from train.tasks.task import Data, Task
from train.trainer import Trainer

Sample = dict[str, Tensor]


class OwnSamples(list[Sample]):
    """Samples in memory, as a data set."""

    fill = 1.0


def samples_of(asked: Any, small: Any, number: int) -> tuple[list[Sample], str]:
    """Return ``number`` samples for the shrunken run, and where they are from.

    Of a text every k-th token is taken, with its label, its loss and the beginnings of documents
    since the one before; of latents a corner. Token ids and classes are taken modulo the small
    numbers of them. Some carry no loss, so that ranks hold unequal numbers of valid tokens.

    Raises DataError: data that are there and cannot be read.
    """
    own: Any = _own_samples(asked)
    with torch.random.fork_rng():
        torch.manual_seed(asked.train.seed)
        found = [_shrunk_sample(small, None if own is None else own[n], n) for n in range(number)]
    return found, "made-up samples, as there are no data yet" if own is None else " ".join(
        asked.data.data_path
    )


@singledispatch
def _own_samples(asked: Any) -> Any:
    """Return the samples of the run's own data; None if these are not there."""


@_own_samples.register
def _(asked: Config) -> Any:
    data, train = asked.data, asked.train
    if not (data.tokenizer_model and data.data_path):
        return None
    if not all(Path(f"{path}.idx").exists() for path in blend(data.data_path)[0]):
        return None
    return build_datasets(data, train.seq_length, train.seed, load_tokenizer(data.tokenizer_model))[
        0
    ]


@_own_samples.register
def _(asked: DiTRunConfig) -> Any:
    shape = asked.model.latent_shape
    if not all(
        Path(path).is_dir() or (shape == (1, 8, 8) and path == DIGITS)
        for path in asked.data.data_path
    ):
        return None
    return build_latent_datasets(asked.data, shape, asked.model.num_classes, asked.train.seed)[0]


@singledispatch
def _shrunk_sample(small: Any, whole: Sample | None, number: int) -> Sample:
    """Return a sample for the shrunken run, of the whole one or made up, that tells its places."""
    raise TypeError(f"no samples of {type(small)}")


@_shrunk_sample.register
def _text(small: Config, whole: Sample | None, number: int) -> Sample:
    """Return a sample of seq_length tokens, with the numbers of its places."""
    length, entries = small.train.seq_length, small.model.vocabulary
    if whole is None:
        drawn = torch.randint(entries, (length + 1,))
        whole = {"tokens": drawn[:-1], "labels": drawn[1:], "loss_mask": torch.ones(length)}
        whole |= {"starts": torch.rand(length) < 8 / length} if small.data.tells_documents else {}
    step = len(whole["tokens"]) // length
    found = {name: rows[: step * length].view(length, step) for name, rows in whole.items()}
    found = {
        name: rows.any(1) if name == "starts" else rows[:, 0].clone()
        for name, rows in found.items()
    }
    if "starts" in found:
        found["starts"][0] = True
    found |= {name: found[name] % entries for name in ("tokens", "labels")}
    found["loss_mask"][
        (slice(40, 47), slice(length // 2), slice(length // 4, length), slice(0))[number % 4]
    ] = 0
    return found | {"place": number * length + torch.arange(length)}


@_shrunk_sample.register
def _latents(small: DiTRunConfig, whole: Sample | None, number: int) -> Sample:
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
    """Make this process's entries train on the samples of a file, tell where tokens are, and note
    what modules return.

    The last third is for validation.
    """
    train: Any = OwnSamples(torch.load(path))
    valid = train[len(train) * 2 // 3 :]
    text: Any = LanguageTask
    latents: Any = DiffusionTask
    text.load_data, latents.load_data = (lambda *_: Data(train, valid),) * 2
    text.load_tokenizer = staticmethod(lambda _: SimpleNamespace(vocab_size=1))
    text.validate = latents.validate = staticmethod(lambda *_: None)  # done as it was shrunk
    Config.contents = DiTRunConfig.contents = CommonConfig.contents  # type: ignore[method-assign]
    language.PADDING["place"] = -1
    local = Denoising.local

    def placed(self: Denoising, batch: Batch) -> Batch:
        """Add the places of patches; those of joined samples count on through the micro-batch."""
        patches, joined = self._model.num_patches, self._sample is not None
        places = batch["sample"][:, None] * patches + torch.arange(patches)
        places[batch["sample"] < 0] = -1
        return local(self, batch) | {
            "place": self._cp.shard(places.view(1, -1) if joined else places, 1, pad_value=-1)
        }

    Denoising.local = placed  # type: ignore[method-assign]
    for objective in (NextToken, Denoising):
        objective.loss_sum = notes.noted(objective.loss_sum)  # type: ignore[method-assign]


@dataclass
class RankResult:
    """A rank's results: its records, and whole tensors by name and moment of the run.

    The first rank of each pipeline stage sends the tensors, every rank their digests, which must be
    equal.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    memory_mb: float = 0.0
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Pieces of each module in the first step, if a run's own samples are trained on."""

    def keep(self, moment: str, values: dict[str, Tensor], send: bool) -> None:
        """Store tensors, gathering DTensors whole: collective over their meshes."""
        gathered = {
            name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in values.items()
        }
        whole = {name: value.detach().to("cpu", copy=True) for name, value in gathered.items()}
        flat = {name: value.reshape(-1).view(torch.uint8).numpy() for name, value in whole.items()}
        self.digests[moment] = {name: sha256(value.tobytes()) for name, value in flat.items()}
        self.tensors[moment] = whole if send else {}


def train(
    rank: int,
    world_size: int,
    flags: Sequence[str],
    sabotage: Callable[[], None] | None = None,
    task: type[Task[Any]] = LanguageTask,
    samples: Path | None = None,
    wrap: Callable[[Samples], Samples] = lambda data: data,
) -> RankResult:
    """Train on the joined processes; ``sabotage`` breaks something first.

    On ``samples`` (a file of ``samples_of``) in the place of the data, if given, with a note of
    what modules return; otherwise on the data as ``wrap`` returns them.
    """
    if (
        task is DiffusionTask or samples is not None
    ):  # modulations, adapters and biases begin at zero
        module: Any = tasks.task
        module.initial_weight = _alive(initial_weight)
    if sabotage is not None:
        sabotage()
    log, notes = Records(), Notes()
    found = RankResult(log.records, pieces=notes.pieces)
    if samples is not None:
        feed(samples, notes)
    with trainer_of(task, flags, log) as trainer:
        mesh = trainer.mesh
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

    def value_of(
        config: Any, name: str, shape: Sequence[int], seed: int, part: Part = ()
    ) -> Tensor:
        value = initial(config, name, shape, seed)
        return (
            value if value.any() else value.normal_(0.0, 0.02, generator=generator_of(seed, name))
        )[part]

    return value_of


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's parameters by name, both copies of a tied one if it holds both stages."""
    return {
        name: p.detach() for part in trainer.runner.parts for name, p in part.named_parameters()
    }


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Return the weights and their optimizer state by name."""
    found = weights(trainer)
    for part in trainer.runner.parts:
        for name, parameter in part.named_parameters():
            found |= {
                f"{name}/{key}": value
                for key, value in trainer.optimizer.state.get(parameter, {}).items()
            }
    return found


def _watch(trainer: Trainer, found: RankResult, send: bool, notes: Notes) -> None:
    """Store the first step's gradients before clipping, which ends the notes, and what the first
    checkpoint saves.
    """
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
