"""Configurations in a line of words, as "llama cp=4 zigzag zero3": what meshes, benches and stubs
call their cases.

A word is the name of a method, a sharding strategy, a pipeline's schedule or what is recomputed, or
NAME=VALUE for a field of ``Case``. Flags may follow, from the first that begins with "--".
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
    """Return a field of a case with its flag, and the configuration whose choices for it are words
    of a line.
    """
    return field(default=default, metadata={"flag": flag, "words": words})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh, how each of its dimensions is used, and what it spares of memory."""

    dp: int = 1
    """Data parallelism has no flag: it is what is left of the processes."""
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
    """Flags that have no word."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def title(self) -> str:
        """The mesh in a few words, with its data-parallel mode if dp x cp > 1."""
        sizes = [f"{name} {getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        parts = [" x ".join(sizes) or "one process"]
        if self.cp > 1 or self.method == "none":
            shaped = (
                ("in teams of", self.team, self.team > 1),
                ("on nodes of", self.per_node, self.per_node),
                ("with rings as neighbours", "", self.placement == "p2p_intra"),
                ("with heads among", self.degree, self.degree > 1),
                ("heads in stages:", self.chunks, self.chunks > 1),
            )
            words = [
                self.method,
                *(f"{words} {value}".rstrip() for words, value, there in shaped if there),
            ]
            parts.append("plain SDPA" if self.method == "none" else " ".join(words))
        if self.dp * self.cp > 1:
            parts.append(self.mode + (f", {self.copies} copies" if self.copies > 1 else ""))
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

    @property
    def flags(self) -> list[str]:
        """Return its command line: the mesh, the method of a shared sequence, and what is not the
        default.
        """
        found = ["--pack-samples"] if self.joined else []
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if (
                name in DIMENSIONS
                or value != getattr(Case, name)
                or (name == "method" and self.cp > 1)
            ):
                found += [
                    f"--{flag}",
                    *(map(str, value) if isinstance(value, tuple) else [str(value)]),
                ]
        return [*found, *self.more]


FLAGS: dict[str, str] = {one.name: one.metadata["flag"] for one in fields(Case) if one.metadata}
CHOICES: dict[str, type] = {
    one.name: one.metadata["words"] for one in fields(Case) if one.metadata.get("words")
}


def _literals(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    return [
        word for part in parts for word in ([part] if isinstance(part, str) else _literals(part))
    ]


WORDS = {
    word: name
    for name, config in reversed(CHOICES.items())
    for word in _literals(get_type_hints(config)[FLAGS[name].replace("-", "_")])
}
"""Field of each word that has no value; ``none`` is the method's."""


def case_of(line: str) -> Case:
    """Read a case. Raises UserError: a word that is none, with those that are."""
    fields: dict[str, Any] = {}
    words, mark, more = line.partition("--")
    for word in words.split():
        name, equals, value = word.partition("=")
        if not equals and word in WORDS:
            fields[WORDS[word]] = word
        elif equals and name == "layers":
            fields[name] = tuple(map(int, value.split("+")))
        elif equals and name in {*FLAGS, "dp"} - {*CHOICES} and value.isdigit():
            fields[name] = int(value)
        else:
            known = [
                *(f"{name}=N" for name in (*DIMENSIONS, *FLAGS) if name not in CHOICES),
                *WORDS,
            ]
            raise UserError(
                f"{line!r} has the word {word!r}; use {', '.join(dict.fromkeys(known))}"
            )
    return Case(**fields, more=tuple((mark + more).split()))


def cases_of(lines: str) -> list[Case]:
    """Read a case from each line, each once; ``A|B`` in a word stands for two lines, and so does
    ``cp=2|4``.
    """
    one_each = (
        words
        for line in lines.splitlines()
        if line.strip()
        for words in product(*map(_choices, line.split()))
    )
    return list(dict.fromkeys(case_of(" ".join(words)) for words in one_each))


def _choices(word: str) -> list[str]:
    first, *others = word.split("|")
    name, equals, _ = first.partition("=")
    return [first, *(one if "=" in one or not equals else f"{name}={one}" for one in others)]
