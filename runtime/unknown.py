"""A name that nothing has, on a command line or in a file, and the one that was meant."""

import difflib
from collections.abc import Callable, Collection, Mapping

OTHERS_WORDS = {
    "--gpus": "--world-size",
    "--num-gpus": "--world-size",
    "--tp": "--tensor-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--learning-rate": "--lr",
    "--context-length": "--seq-length",
    "--max-steps": "--train-iters",
}
"""Other programs' words for our flags."""


def did_you_mean(name: str, known: Collection[str], answers: Mapping[str, str] | None = None) -> str | None:
    """Ask for the nearest of the known names, or of others, to which there are answers; None if none is near."""
    if (ours := OTHERS_WORDS.get(name)) in known:
        return f"did you mean {ours}?"
    answers = answers or {}
    close = difflib.get_close_matches(name, [*known, *answers], n=1, cutoff=0.7)
    return " ".join([f"did you mean {close[0]}?", *filter(None, [answers.get(close[0])])]) if close else None


def unknown_argument(word: str, hint: Callable[[str], str | None]) -> str:
    """Say that nothing takes a word of a command line; ``hint`` says what a flag may mean."""
    flag = word.partition("=")[0]
    told = hint(flag) if flag.startswith("-") else "a value follows the flag it belongs to"
    return f"unknown argument {word}; {told or '--help lists them all'}"
