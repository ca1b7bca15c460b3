"""The meshes of `make parity`, enumerated from their dimensions, and the tiny models that train on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from parallel.context import METHODS

SHARED = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --device cpu
    --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --clip-grad 0.5 --eval-iters 0 --log-interval 1000
""".split()  # noqa: SIM905
LANGUAGE = ("--vocab-size", "4099", "--seq-length", "128")
DIFFUSION, WINDOWS = "dit", "windows"
_FLAGS = {
    "llama": "--num-query-groups 2",
    "gpt": "--model-type gpt --max-position-embeddings 128 --no-untie-embeddings-and-output-weights",
    WINDOWS: "--num-query-groups 2 --window-size 40,0 --window-attn-skip-freq 3 --softmax-type learnable",
    "qwen": "--num-query-groups 2 --kv-channels 24 --add-qkv-bias --qk-layernorm --rope-scaling-type yarn "
    "--rope-scaling-factor 4 --rope-scaling-original-max-position-embeddings 32",
    DIFFUSION: "--latent-shape 1 8 8 --patch-size 2 --num-classes 10 --data-path digits",
}
KINDS = {kind: tuple(flags.split()) for kind, flags in _FLAGS.items()}
"""llama: two query heads per KV head, untied. gpt: learned positions, biases, tied. The vocabulary is odd in both.
windows: the llama with windows in all layers but the third, and sinks. qwen: the llama with all that Qwen2 and Qwen3
have besides, and scaled rope. dit: handwritten digits in 16 patches."""
LINEAR_KINDS: dict[str, tuple[str, ...]] = {
    "transnormer": ("--model-type", "transnormer", "--no-untie-embeddings-and-output-weights"),
    "linear_transformer": ("--model-type", "linear_transformer"),
}
"""Models of linear attention; `linear_cases` has their meshes."""
DIMENSIONS = ("pp", "dp", "cp", "tp")
MOST = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh, and how each of its dimensions is used."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    method: str = "striped"
    team: int = 1
    degree: int = 1
    chunks: int = 1
    per_node: int | None = None
    placement: str = "collect_intra"
    mode: str = "zero3"
    copies: int = 1
    schedule: str = "1F1B"
    virtual: int = 1
    layers: tuple[int, ...] = ()
    loss_chunk: int = 0
    joined: int = 0

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
            parts.append("plain SDPA" if self.method == "none" else self._method)
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
        return ", ".join(parts)

    @property
    def _method(self) -> str:
        shaped = (
            ("in teams of", self.team, self.team > 1),
            ("on nodes of", self.per_node, self.per_node),
            ("with rings as neighbours", "", self.placement == "p2p_intra"),
            ("with heads among", self.degree, self.degree > 1),
            ("heads in stages:", self.chunks, self.chunks > 1),
        )
        return " ".join([self.method, *(f"{words} {value}".rstrip() for words, value, there in shaped if there)])

    def flags(self, kind: str, data: Path, iterations: int = 3) -> list[str]:
        """Return the command line that trains a kind of model on this mesh."""
        values = {
            "train-iters": iterations,
            "pipeline-model-parallel-size": self.pp,
            "context-parallel-size": self.cp,
            "tensor-model-parallel-size": self.tp,
            "context-parallel-method": self.method,
            "context-parallel-team-size": self.team,
            "context-parallel-placement": self.placement,
            "ulysses-degree": self.degree,
            "ulysses-head-chunks": self.chunks,
            "data-parallel-sharding-strategy": self.mode,
            "num-distributed-optimizer-instances": self.copies,
            "pipeline-schedule": self.schedule,
            "num-virtual-stages-per-pipeline-rank": self.virtual,
            "loss-chunk-size": self.loss_chunk,
        }
        if self.per_node is not None:
            values["context-parallel-ranks-per-node"] = self.per_node
        found = [*SHARED, *(KINDS | LINEAR_KINDS)[kind]]
        if kind != DIFFUSION:
            found += [*LANGUAGE, "--data-path", str(data), "--tokenizer-model", f"{data}.model"]
        for name, value in values.items():
            found += [f"--{name}", str(value)]
        if self.joined:
            found += ["--pack-samples", "--micro-batch-size", str(self.joined)]
        return [*found, "--pipeline-layers", *map(str, self.layers)] if self.layers else found


REFERENCE = Case(method="none")
LINEAR_REFERENCE = Case()


def cases() -> list[Case]:
    """Return the meshes of the softmax language models, each once."""
    found = (*_alone(), *_teams(), *_together(), *_four_dimensions(), *_modes(), *_pipelines())
    return [case for case in dict.fromkeys(found) if case.ranks <= MOST]


def diffusion_cases() -> list[Case]:
    """Return the diffusion transformer's meshes: every method of full attention, each dimension, and combinations."""
    ring = partial(Case, method="ring")
    found = [ring(tp=2), ring(pp=2), ring(pp=4), ring(dp=2), ring(cp=3)]
    for size in (2, 4):
        found += [Case(cp=size, method=method) for method in ("ring", "allgather", "ulysses")]
    found += [
        Case(cp=4, method="wallfacer", team=2),
        Case(cp=4, method="double_ring", per_node=2),
        Case(cp=8, method="wallfacer", team=2, degree=2),
        Case(cp=4, method="ring", degree=2, dp=2),
        Case(cp=4, method="double_ring", per_node=2, tp=2),
        ring(cp=2, tp=2),
        Case(cp=2, tp=2, dp=2, method="ulysses"),
        ring(pp=2, tp=2, cp=2),
        ring(pp=2, dp=2, cp=2),
        ring(pp=2, dp=2, cp=2, copies=2),
        Case(pp=2, cp=4, method="wallfacer", team=2),
        ring(pp=2, cp=2, schedule="Interleaved1F1B", virtual=2),
        ring(pp=2, dp=2, schedule="Interleaved1F1B", virtual=2, mode="zero1"),
        ring(pp=2, tp=2, schedule="GPipe", layers=(1, 3)),
        ring(joined=2),
        ring(cp=2, joined=4),
        ring(tp=2, cp=2, joined=2),
        ring(pp=2, tp=2, cp=2, joined=2),
        Case(cp=4, method="exchange", joined=4),
        Case(cp=3, method="exchange", joined=4),
        Case(cp=2, dp=2, method="ulysses", joined=2),
        Case(cp=4, method="allgather", joined=2),
    ]
    found += [ring(dp=2, cp=2, mode=mode) for mode in ("ddp", "legacy_ddp", "zero1", "zero2", "zero3")]
    return found


def _alone() -> Iterator[Case]:
    """Yield each dimension alone, of 2 and of 4 ranks, context parallelism by each method."""
    for size in (2, 4):
        for name in DIMENSIONS:
            if name != "cp":
                yield Case(**{name: size})  # type: ignore[arg-type]
        yield from (Case(cp=size, method=method) for method in METHODS)


def _teams() -> Iterator[Case]:
    """Yield WallFacer teams of every size and double rings, some with Ulysses: cp 8; cp 4, also with tp 2 or pp 2."""
    on_eight: tuple[dict[str, Any], ...] = (
        *({"method": "wallfacer", "team": team} for team in (1, 2)),
        {"method": "wallfacer", "team": 2, "placement": "p2p_intra"},
        {"method": "wallfacer", "team": 2, "degree": 2},
        *({"method": "double_ring", "per_node": node} for node in (2, 4)),
        {"method": "double_ring", "per_node": 4, "degree": 2},
    )
    on_four: tuple[dict[str, Any], ...] = (
        *({"method": "wallfacer", "team": team} for team in (1, 2)),
        {"method": "wallfacer", "degree": 2},  # leaves room only for teams of one
        {"method": "double_ring", "per_node": 2},
        {"method": "double_ring", "per_node": 2, "degree": 2},
    )
    yield from (Case(cp=8, **shape) for shape in on_eight)
    others: tuple[dict[str, Any], ...] = ({}, {"tp": 2}, {"pp": 2})
    yield from (Case(cp=4, **other, **shape) for other in others for shape in on_four)
    yield Case(cp=4, method="ulysses", pp=2)
    yield Case(cp=2, method="ulysses", tp=2)
    yield Case(cp=2, method="ulysses", chunks=2)
    yield Case(cp=4, method="zigzag", degree=2, chunks=2, pp=2)


def _together() -> Iterator[Case]:
    """Yield all pairs of dimensions, 2 x 2 and 2 x 4, and all triples."""
    for one, other in combinations(DIMENSIONS, 2):
        yield Case(**{one: 2, other: 2})  # type: ignore[arg-type]
    for one, other in permutations(DIMENSIONS, 2):
        yield Case(**{one: 2, other: 4})  # type: ignore[arg-type]
    for three in combinations(DIMENSIONS, 3):
        yield Case(**dict.fromkeys(three, 2))  # type: ignore[arg-type]


def _four_dimensions() -> Iterator[Case]:
    """Yield pp x cp with tp or dp, by two methods and two data-parallel modes each."""
    for third in ("tp", "dp"):
        for method in ("striped", "zigzag"):
            for mode in ("zero3", "zero1"):
                yield Case(pp=2, cp=2, method=method, mode=mode, **{third: 2})  # type: ignore[arg-type]


def _modes() -> Iterator[Case]:
    """Yield every data-parallel mode with each other dimension."""
    for mode in ("ddp", "legacy_ddp", "zero1", "zero2", "zero3"):
        for other in ("cp", "tp", "pp"):
            yield Case(dp=2, mode=mode, **{other: 2})  # type: ignore[arg-type]
    for mode in ("zero1", "zero2", "zero3"):
        yield Case(dp=4, mode=mode, copies=2)
    yield Case(dp=2, cp=2, copies=2)
    yield Case(dp=2, cp=2, tp=2, copies=2)


def _pipelines() -> Iterator[Case]:
    """Yield every schedule, uneven stages, and losses in chunks, which a pipeline's last stage computes too."""
    yield Case(pp=2, schedule="GPipe")
    yield Case(pp=2, tp=2, schedule="GPipe")
    yield Case(pp=2, schedule="Interleaved1F1B", virtual=2)
    yield Case(pp=2, cp=2, tp=2, schedule="Interleaved1F1B", virtual=2)
    yield Case(pp=2, dp=2, cp=2, schedule="Interleaved1F1B", virtual=2, mode="zero2")
    yield Case(pp=2, dp=2, schedule="Interleaved1F1B", virtual=2, mode="legacy_ddp")
    yield Case(pp=2, dp=2, cp=2, copies=2)
    yield Case(pp=2, dp=2, cp=2, schedule="InterleavedZeroBubble", virtual=2, mode="zero1")
    yield Case(pp=2, layers=(1, 3))
    yield Case(pp=2, tp=2, layers=(3, 1))
    yield Case(pp=2, cp=2, schedule="Interleaved1F1B", virtual=2)
    yield Case(tp=2, cp=2, loss_chunk=50)
    yield Case(pp=2, tp=2, loss_chunk=50)


def linear_cases() -> list[Case]:
    """Return the meshes of linear attention: each method and tensor parallelism, alone and with other dimensions."""
    methods = ("lasp", "lasp2", "ulysses")
    found = [Case(**{name: 2}) for name in ("pp", "dp", "tp")]  # type: ignore[arg-type]
    found += [Case(tp=4), Case(tp=2, pp=2), Case(tp=2, loss_chunk=50)]
    found += [Case(cp=size, method="ulysses") for size in (2, 4)]
    modes = ("ddp", "legacy_ddp", "fsdp", "zero1", "zero2", "zero3")
    found += [Case(cp=size, method=method, mode=mode) for size in (2, 4, 8) for method in methods[:2] for mode in modes]
    found += [Case(cp=2, method=method, **{other: 2}) for method in methods for other in ("pp", "dp", "tp")]  # type: ignore[arg-type]
    found += [Case(dp=2, tp=2, mode=mode) for mode in ("ddp", "legacy_ddp", "zero1", "zero2", "zero3")]
    found += [Case(pp=2, cp=2, tp=2, method=method) for method in methods]
    return [*found, Case(pp=2, tp=2, schedule="Interleaved1F1B", virtual=2)]
