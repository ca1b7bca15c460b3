"""The tiny models of `make parity` and their meshes, which lie in lines of words in cases.toml."""

import tomllib
from pathlib import Path

from parallel.context import METHODS
from tools.common.cases import Case, cases_of

SHARED = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --device cpu
    --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --clip-grad 0.5 --eval-iters 0
    --log-interval 1000
""".split()
LANGUAGE = ("--vocab-size", "4099", "--seq-length", "128")
DIFFUSION, WINDOWS = "dit", "windows"
_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MESHES: dict[str, str] = {
    name: text.replace("METHODS", "|".join(METHODS)) for name, text in _FILE["meshes"].items()
}
"""Lines of meshes, which kinds of models share."""
KINDS: dict[str, dict[str, str]] = _FILE["kinds"]
"""Flags and meshes of each kind of model."""
LINEAR = tuple(kind for kind, settings in KINDS.items() if settings["meshes"] == "linear")
MOST = 8
REFERENCE = Case(method="none")
LINEAR_REFERENCE = Case()


def reference_of(kind: str) -> Case:
    """Return the reference of a kind of model: one process, plain SDPA for softmax attention."""
    return LINEAR_REFERENCE if kind in LINEAR else REFERENCE


def chosen_cases(kind: str, only: str = "") -> list[Case]:
    """Return the meshes of a kind of model whose title contains ``only``.

    Learned sinks refuse split backwards.
    """
    cases = [
        case
        for case in cases_of(MESHES[KINDS[kind]["meshes"]])
        if case.ranks <= MOST and only in case.title
    ]
    return [case for case in cases if kind != WINDOWS or case.schedule != "InterleavedZeroBubble"]


def flags_of(kind: str, case: Case, data: Path, iterations: int = 3) -> list[str]:
    """Return the command line that trains a kind of model on a mesh."""
    flags = [*SHARED, *KINDS[kind]["flags"].split(), "--train-iters", str(iterations)]
    if kind != DIFFUSION:
        flags += [*LANGUAGE, "--data-path", str(data), "--tokenizer-model", f"{data}.model"]
    return [*flags, *case.flags]
