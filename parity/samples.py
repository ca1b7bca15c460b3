"""A few samples of a run's own data, shrunk with it; made up where there are no data. Ranks train on these alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pretrain_dit
import pretrain_gpt
from data.latents.dataset import DIGITS, build_latent_datasets
from data.loader import Batch
from data.text.config import blend
from data.text.megatron import build_datasets
from data.tokenizer import load_tokenizer
from parity.modules import Notes
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.objectives import language
from train.objectives.diffusion import Denoising
from train.objectives.language import NextToken

Sample = dict[str, Tensor]


class Samples(list[Sample]):
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
    train = Samples(torch.load(path))
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
