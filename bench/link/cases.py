"""Models and context-parallel configurations to compare, and the commands that train them."""

import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np

from data.latents.writing import write_latents
from data.text.prepare import Request, prepare
from runtime.machine import ROOT
from tools.common.cases import Case, case_of

VOCAB_SIZE = 512  # small, since the embedding's gradient also crosses the link
RANKS = 8
_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CASES: dict[str, str] = _FILE["softmax"]
LINEAR_CASES: dict[str, str] = _FILE["linear"]
_FLAGS = {
    name: flags.replace("configs/", f"{ROOT}/configs/").split()
    for name, flags in _FILE["models"].items()
}
CLUSTERS = Path(__file__).with_name("clusters")
"""Folder with the planner's cluster files, one for each kind of link."""
MODELS = [name for name in _FLAGS if name != "dit"]
"""Names of the language models."""
FRAME = (32, 32)
"""Height and width of a frame of latents in the videos for the model ``dit``: a frame has 256
patches of 2 x 2."""


def cases_of(model: str) -> dict[str, Case]:
    """Return a model's configurations, keyed by name."""
    lines = LINEAR_CASES if model == "transnormer" else CASES
    return {name: case_of(line) for name, line in lines.items()}


def reference_of(model: str) -> str:
    """Return the name of the configuration with which a model's others are compared."""
    return "lasp" if model == "transnormer" else "ring"


def command_line(
    model: str, case: Case, data: Path, *, seq_length: int, batch: int, iterations: int
) -> list[str]:
    """Return the flags of pretrain_gpt.py or, for the model ``dit``, of pretrain_dit.py.

    ``data`` is the result of ``data_of``; for ``dit``, ``seq_length`` is the number of patches of a
    video. Every node has a copy of the weights, and gradients cross the link once, to be summed.
    With tensor parallelism, each rank has its own part of the weights, and no gradient of a matrix
    crosses the link.
    """
    if model == "dit":
        flags = [
            *_FLAGS[model],
            "--data-path",
            str(data),
            "--latent-shape",
            *map(str, latent_shape(seq_length)),
        ]
    else:
        flags = [*_FLAGS[model], "--data-path", str(data), "--tokenizer-model", f"{data}.model"]
        flags += ["--seq-length", str(seq_length)]
        if model == "gpt":
            flags += ["--max-position-embeddings", str(seq_length)]
    flags += case.flags
    if case.cp > 1:
        flags += ["--num-distributed-optimizer-instances", "2"]
    flags += ["--micro-batch-size", str(batch), "--global-batch-size", str(batch)]
    flags += ["--train-iters", str(iterations), "--lr-warmup-iters", "1", "--eval-iters", "0"]
    flags += ["--save", "none", "--save-interval", "none"]
    return flags


@contextmanager
def corpus() -> Iterator[Path]:
    """Yield the path prefix of the text that all runs read, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="longmesh-link-") as folder:
        text = Path(folder) / "stdlib"
        prepare(Request(vocab_size=VOCAB_SIZE, max_bytes=4 << 20), text, progress=False)
        yield text


def latent_shape(patches: int) -> tuple[int, ...]:
    """Return the shape of a video's latents: channels, frames, height and width."""
    return 4, 4 * patches // prod(FRAME), *FRAME


def data_of(model: str, text: Path, seq_length: int) -> Path:
    """Return the path of a model's data: the prefix ``text``, or for ``dit`` a folder of noise.

    The folder is next to the text, and written if it does not exist.
    """
    if model != "dit":
        return text
    folder = text.parent / f"latents_{seq_length}"
    if not folder.exists():
        rng = np.random.default_rng(0)
        latents = rng.standard_normal((16, *latent_shape(seq_length)), np.float32)
        labels = np.arange(16) % 10
        write_latents(folder, [(latents, labels)])
    return folder
