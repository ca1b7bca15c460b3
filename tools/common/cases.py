"""Parse lines of words that describe a mesh and its settings, such as "cp=4 zigzag zero3".

A word is a context-parallel method, a sharding strategy, a pipeline schedule or a recomputation
policy, or NAME=VALUE for a field of ``Case``. Flags may follow, from the first "--" on.
"""

from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, get_args, get_type_hints

from parallel.context import ContextConfig
from parallel.data import DataParallelConfig
from parallel.pipeline.stages import PipelineConfig
from parallel.recompute import RecomputeConfig
from runtime.errors import UserError

DIMENSIONS = ("pp", "dp", "cp", "tp")


def _flag(flag: str, default: Any, words: type | None = None) -> Any:
    """Return a field of ``Case`` that stands for a training flag.

    ``words`` is the flag's configuration class if a line may have the flag's choices as bare words,
    such as zigzag.
    """
    return field(default=default, metadata={"flag": flag, "words": words})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh, the method of each dimension, and the settings that save memory."""

    dp: int = 1
    """Data-parallel size; it has no flag, since it follows from the number of processes."""
    pp: int = _flag("pipeline-model-parallel-size", 1)
    cp: int = _flag("context-parallel-size", 1)
    tp: int = _flag("tensor-model-parallel-size", 1)
    method: str = _flag("context-parallel-method", "striped", ContextConfig)
    team: int = _flag("context-parallel-team-size", 1)
    placement: str = _flag("context-parallel-placement", "collect_intra", ContextConfig)
    per_node: int | None = _flag("context-parallel-ranks-per-node", None)
    degree: int = _flag("ulysses-degree", 1)
    chunks: int = _flag("ulysses-head-chunks", 1)
    mode: str = _flag("data-parallel-sharding-strategy", "zero3", DataParallelConfig)
    copies: int = _flag("num-distributed-optimizer-instances", 1)
    schedule: str = _flag("pipeline-schedule", "1F1B", PipelineConfig)
    virtual: int = _flag("num-virtual-stages-per-pipeline-rank", 1)
    layers: tuple[int, ...] = _flag("pipeline-layers", ())
    loss_chunk: int = _flag("loss-chunk-size", 0)
    ffn_chunk: int = _flag("ffn-chunk-size", 0)
    recompute: str = _flag("recompute-granularity", "", RecomputeConfig)
    joined: int = _flag("micro-batch-size", 0)
    batch: int | None = _flag("global-batch-size", None)
    more: tuple[str, ...] = ()
    """Further training flags, as on a command line, for settings that have no field here."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def title(self) -> str:
        """Short description of the mesh and its settings, to tell cases apart in tables."""
        sizes = []
        for name in DIMENSIONS:
            if getattr(self, name) > 1:
                sizes.append(f"{name} {getattr(self, name)}")

        parts = [" x ".join(sizes) or "one process"]
        if self.method == "none":
            parts.append("plain SDPA")
        elif self.cp > 1:
            parts.append(self._method_words())
        if self.dp * self.cp > 1:
            parts.append(self.mode)
            if self.copies > 1:
                parts.append(f"{self.copies} copies")
        if self.schedule != "1F1B":
            parts.append(self.schedule)
        if self.layers:
            parts.append("layers " + " + ".join(map(str, self.layers)))
        if self.loss_chunk:
            parts.append(f"loss by {self.loss_chunk} tokens")
        if self.joined:
            parts.append(f"{self.joined} samples joined")
        if self.more:
            parts.append(" ".join(self.more))
        return ", ".join(parts)

    def _method_words(self) -> str:
        """Return the context-parallel method and its settings that are not the default."""
        words = [self.method]
        if self.team > 1:
            words.append(f"in teams of {self.team}")
        if self.per_node:
            words.append(f"on nodes of {self.per_node}")
        if self.placement == "p2p_intra":
            words.append("with rings as neighbours")
        if self.degree > 1:
            words.append(f"with heads among {self.degree}")
        if self.chunks > 1:
            words.append(f"heads in stages: {self.chunks}")
        return " ".join(words)

    @property
    def flags(self) -> list[str]:
        """Return the case as training flags: mesh, method if cp > 1, and non-default settings."""
        flags = []
        if self.joined:
            flags.append("--pack-samples")
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            is_used = name in DIMENSIONS or (name == "method" and self.cp > 1)
            if not is_used and value == getattr(Case, name):
                continue
            values = value if isinstance(value, tuple) else (value,)
            flags += [f"--{flag}", *map(str, values)]

        return [*flags, *self.more]


SPELLED = [entry for entry in fields(Case) if entry.metadata]
FLAGS: dict[str, str] = {entry.name: entry.metadata["flag"] for entry in SPELLED}
"""Training flag, without dashes, of each field of ``Case``."""
CHOICES: dict[str, type] = {
    entry.name: entry.metadata["words"] for entry in SPELLED if entry.metadata["words"]
}
"""Configuration class of each field whose values may be bare words; it defines these values."""


def _literals(annotation: Any) -> list[str]:
    """Return the strings of a Literal, also inside a union."""
    literals = []
    for part in get_args(annotation):
        if isinstance(part, str):
            literals.append(part)
        else:
            literals += _literals(part)
    return literals


def _words() -> dict[str, str]:
    """Return the field that each bare word sets, keyed by word; "none" sets the method."""
    words = {}
    for name, config in reversed(CHOICES.items()):
        annotation = get_type_hints(config)[FLAGS[name].replace("-", "_")]
        for literal in _literals(annotation):
            words[literal] = name
    return words


WORDS = _words()
"""Field that each bare word sets, keyed by word; ``none`` is a context-parallel method."""


def case_of(line: str) -> Case:
    """Parse a line into a case.

    Raises UserError for an unknown word; the message lists the known words.
    """
    values: dict[str, Any] = {}
    words, mark, flags = line.partition("--")
    for word in words.split():
        name, equals, value = word.partition("=")
        if not equals and word in WORDS:
            values[WORDS[word]] = word
        elif equals and name == "layers":
            values[name] = tuple(map(int, value.split("+")))
        elif equals and name in {*FLAGS, "dp"} - {*CHOICES} and value.isdigit():
            values[name] = int(value)
        else:
            numbers = [f"{name}=N" for name in (*DIMENSIONS, *FLAGS) if name not in CHOICES]
            accepted = dict.fromkeys([*numbers, *WORDS])
            raise UserError(f"{line!r} has the unknown word {word!r}; use {', '.join(accepted)}")

    return Case(**values, more=tuple((mark + flags).split()))


def cases_of(lines: str) -> list[Case]:
    """Parse lines into cases, without duplicates.

    A word ``A|B`` stands for two lines, one with A and one with B; so does ``cp=2|4``.
    """
    cases: dict[Case, None] = {}
    for line in lines.splitlines():
        if not line.strip():
            continue
        for words in product(*map(_choices, line.split())):
            cases[case_of(" ".join(words))] = None

    return list(cases)


def _choices(word: str) -> list[str]:
    """Return the words that a word with ``|`` stands for."""
    first, *others = word.split("|")
    name, equals, _ = first.partition("=")
    choices = [first]
    for other in others:
        if equals and "=" not in other:
            other = f"{name}={other}"
        choices.append(other)

    return choices
