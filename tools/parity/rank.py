"""Run one process of a comparison: its samples, its training, and its results."""

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
    """A data set of samples that are in memory."""

    fill = 1.0


def samples_of(requested: Any, small: Any, number: int) -> tuple[list[Sample], str]:
    """Return ``number`` samples for the shrunken run, and their origin.

    From a text, every k-th token is taken, with its label and loss mask; a taken token begins a
    document if it or one of the tokens skipped after it did. From latents, a corner is taken. Token
    ids and classes are taken modulo the small vocabulary and number of classes. Some tokens carry
    no loss, so that ranks have different numbers of tokens with loss.

    Args:
        requested: the run before it was shrunk.
        small: the shrunken run.

    Raises DataError if the data cannot be read.
    """
    run_samples: Any = _run_samples(requested)
    samples = []
    with torch.random.fork_rng():
        torch.manual_seed(requested.train.seed)
        for index in range(number):
            whole = None if run_samples is None else run_samples[index]
            samples.append(_shrunk_sample(small, whole, index))

    if run_samples is None:
        return samples, "made-up samples, since there are no data yet"

    return samples, " ".join(requested.data.data_path)


@singledispatch
def _run_samples(requested: Any) -> Any:
    """Return the samples of the run's own data, or None if there are no data yet."""


@_run_samples.register
def _(requested: Config) -> Any:
    data = requested.data
    train = requested.train
    if not (data.tokenizer_model and data.data_path):
        return None
    if not all(Path(f"{path}.idx").exists() for path in blend(data.data_path)[0]):
        return None
    tokenizer = load_tokenizer(data.tokenizer_model)
    return build_datasets(data, train.seq_length, train.seed, tokenizer)[0]


@_run_samples.register
def _(requested: DiTRunConfig) -> Any:
    shape = requested.model.latent_shape
    for path in requested.data.data_path:
        is_digits = shape == (1, 8, 8) and path == DIGITS
        if not is_digits and not Path(path).is_dir():
            return None
    seed = requested.train.seed
    return build_latent_datasets(requested.data, shape, requested.model.num_classes, seed)[0]


@singledispatch
def _shrunk_sample(small: Any, whole: Sample | None, number: int) -> Sample:
    """Return a sample for the shrunken run, cut from ``whole`` or made up.

    The sample has a number, or a number for each token, by which outputs of ranks are matched with
    those of one process.
    """
    raise TypeError(f"_shrunk_sample does not support {type(small)}; register a function for it")


@_shrunk_sample.register
def _text(small: Config, whole: Sample | None, number: int) -> Sample:
    """Return a sample of seq_length tokens, with their numbers."""
    length = small.train.seq_length
    entries = small.model.vocabulary
    if whole is None:
        tokens = torch.randint(entries, (length + 1,))
        whole = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(length)}
        if small.data.tells_documents:
            whole["starts"] = torch.rand(length) < 8 / length

    step = len(whole["tokens"]) // length
    sample = {}
    for name, values in whole.items():
        rows = values[: step * length].view(length, step)
        sample[name] = rows.any(1) if name == "starts" else rows[:, 0].clone()

    if "starts" in sample:
        sample["starts"][0] = True
    for name in ("tokens", "labels"):
        sample[name] = sample[name] % entries

    without_loss = (slice(40, 47), slice(length // 2), slice(length // 4, length), slice(0))
    sample["loss_mask"][without_loss[number % 4]] = 0
    sample["place"] = number * length + torch.arange(length)
    return sample


@_shrunk_sample.register
def _latents(small: DiTRunConfig, whole: Sample | None, number: int) -> Sample:
    """Return a sample of latent_shape, with its number, which is -1 for every fourth (padding)."""
    shape = small.model.latent_shape
    if whole is None:
        whole = {"latents": torch.randn(shape), "labels": torch.tensor(number)}
    corner = whole["latents"][tuple(map(slice, shape))].clone()
    return {
        "latents": corner,
        "labels": whole["labels"] % small.model.num_classes,
        "sample": torch.tensor(-1 if number % 4 == 3 else number),
    }


def feed(path: Path, notes: Notes) -> None:
    """Patch this process to train on the samples of a file and to record modules' outputs.

    The last third of the samples is for validation. The patches of the tasks and objectives stay,
    since the process does nothing else afterwards.
    """
    train: Any = OwnSamples(torch.load(path))
    valid = train[len(train) * 2 // 3 :]

    def load_data(*_: Any) -> Data:
        return Data(train, valid)

    text: Any = LanguageTask
    latents: Any = DiffusionTask
    text.load_tokenizer = staticmethod(lambda _: SimpleNamespace(vocab_size=1))
    for task in (text, latents):
        task.load_data = load_data
        task.validate = staticmethod(lambda *_: None)  # the run was validated when it was shrunk

    Config.contents = DiTRunConfig.contents = CommonConfig.contents  # type: ignore[method-assign]

    language.PADDING["place"] = -1
    _number_patches()
    for objective in (NextToken, Denoising):
        objective.loss_sum = notes.noted(objective.loss_sum)  # type: ignore[method-assign]


def _number_patches() -> None:
    """Let the denoising objective number the patches of a micro-batch like tokens of text."""
    local = Denoising.local

    def numbered(self: Denoising, batch: Batch) -> Batch:
        """Add the numbers of patches; for samples packed into one sequence, in one row."""
        patches = self._model.num_patches
        joined = self._sample_index is not None
        numbers = batch["sample"][:, None] * patches + torch.arange(patches)
        numbers[batch["sample"] < 0] = -1
        if joined:
            numbers = numbers.view(1, -1)
        return local(self, batch) | {"place": self._cp.shard(numbers, 1, pad_value=-1)}

    Denoising.local = numbered  # type: ignore[method-assign]


@dataclass
class RankResult:
    """A rank's results: records, and whole tensors keyed by moment of the run and then by name.

    The first rank of each pipeline stage sends the tensors. Every rank sends their digests, which
    must be equal on all ranks that have a copy.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    memory_mb: float = 0.0
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Outputs and gradients of the first step, keyed by module; empty without a file of samples."""

    def keep(self, moment: str, values: dict[str, Tensor], send: bool) -> None:
        """Store a moment's digests and, with ``send``, its tensors.

        DTensors are gathered whole, so this is collective over their meshes.
        """
        whole = {}
        for name, value in values.items():
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            whole[name] = tensor.detach().to("cpu", copy=True)

        self.digests[moment] = {}
        for name, tensor in whole.items():
            content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            self.digests[moment][name] = sha256(content)

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
    """Train on this rank and all others, and return this rank's results. Collective.

    Args:
        sabotage: called first to break something, to show that the comparison finds it.
        samples: a file with samples of ``samples_of`` to train on in place of the run's data;
            outputs of modules are then recorded.
        wrap: returns the data set to train on, given the run's; not called with ``samples``.
    """
    if task is DiffusionTask or samples is not None:
        # Modulations, adapters and biases begin at zero, which would hide many wrong gradients.
        module: Any = tasks.task
        module.initial_weight = _nonzero(initial_weight)
    if sabotage is not None:
        sabotage()

    log = Records()
    notes = Notes()
    result = RankResult(log.records, pieces=notes.pieces)
    if samples is not None:
        feed(samples, notes)
    with trainer_of(task, flags, log) as trainer:
        mesh = trainer.mesh
        if samples is None:
            trainer.train_data = wrap(trainer.train_data)
        else:
            notes.watch(trainer.runner.parts, (mesh.tp.get_local_rank(), mesh.tp.size()))

        send = mesh.dp_cp.get_local_rank() == mesh.tp.get_local_rank() == 0
        moment = "loaded" if trainer.progress.iteration else "initial"
        result.keep(moment, state(trainer), send)
        _watch(trainer, result, send, notes)
        trainer.train()
        result.keep("final", weights(trainer), send)

    return result


def _nonzero(initial: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an initializer: parameters that begin at zero get small random numbers instead."""

    def value_of(
        config: Any, name: str, shape: Sequence[int], seed: int, part: Part = ()
    ) -> Tensor:
        value = initial(config, name, shape, seed)
        if not value.any():
            value.normal_(0.0, 0.02, generator=generator_of(seed, name))
        return value[part]

    return value_of


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's parameters, keyed by name; of two tied copies, the last part's."""
    parameters = {}
    for part in trainer.runner.parts:
        for name, parameter in part.named_parameters():
            parameters[name] = parameter.detach()
    return parameters


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's weights, keyed by name, and their optimizer state (``name/key``)."""
    tensors = weights(trainer)
    for part in trainer.runner.parts:
        for name, parameter in part.named_parameters():
            for key, value in trainer.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
    return tensors


def _watch(trainer: Trainer, result: RankResult, send: bool, notes: Notes) -> None:
    """Patch training to store the first step's gradients and the first checkpoint's tensors.

    Gradients are stored before they are clipped; from then on no module is recorded.
    """
    clip = gradients.clip_gradients
    save = saving.save_checkpoint

    def noting_clip(parameters: Any, norm: float, max_norm: float) -> None:
        notes.on = False
        if "gradients" not in result.tensors:
            by_name = {}
            for part in trainer.runner.parts:
                for name, parameter in part.named_parameters():
                    if parameter.grad is not None:
                        by_name[name] = parameter.grad
            result.keep("gradients", by_name, send)

        clip(parameters, norm, max_norm)

    def noting_save(*args: Any, **kwargs: Any) -> Any:
        if "saved" not in result.tensors:
            result.keep("saved", state(trainer), send)
        return save(*args, **kwargs)

    gradients.clip_gradients = noting_clip
    saving.save_checkpoint = noting_save
