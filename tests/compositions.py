"""Every method of context parallelism with its options and numbers of ranks.

This is the one table that tests take cases from.

Lines of words, as tools/common/cases.py reads them; ``METHODS`` stands for every method of softmax
attention.
"""

from typing import Any, NamedTuple

from parallel.context import METHODS
from tools.common.cases import Case, cases_of

_ON_RANKS = """
    cp=1|2|4|8 METHODS
    cp=3 ring|striped|zigzag|allgather
    cp=2|4|8 zigzag degree=2
    cp=2 exchange --context-parallel-layout striped
    cp=4|8 wallfacer team=2
    cp=4 double_ring per_node=2
    cp=4 ring|striped|allgather degree=2
    cp=4 zigzag degree=4
    cp=4 allgather --context-parallel-layout striped|balanced
    cp=4 wallfacer --context-parallel-layout zigzag
    cp=4 exchange per_node=2 --context-parallel-layout zigzag
    cp=4 exchange degree=2 --context-parallel-layout contiguous
    cp=8 wallfacer team=2 --context-parallel-layout striped
    cp=8 wallfacer team=2 degree=1|2 p2p_intra
    cp=8 striped degree=4
    cp=8 allgather degree=2
    cp=8 double_ring per_node=4
    cp=8 double_ring per_node=4 degree=2 --context-parallel-layout striped
    cp=8 exchange per_node=4 degree=1|2
    cp=8 exchange per_node=2 --context-parallel-layout contiguous
    cp=9 wallfacer team=1|3
"""
_IN_PLANS = """
    cp=16|64 wallfacer team=4
    cp=32|64 wallfacer team=4 p2p_intra
    cp=36 wallfacer team=3
    cp=16 wallfacer team=2 degree=2 p2p_intra
    cp=16 wallfacer team=2 degree=4
    cp=32 wallfacer team=2 degree=4 --context-parallel-layout striped
    cp=6 zigzag degree=3
    cp=6 allgather --context-parallel-layout striped
    cp=12 double_ring per_node=3
    cp=6 double_ring per_node=1
    cp=16 double_ring per_node=8 degree=2
    cp=4|9|16 wallfacer --context-parallel-layout zigzag|striped
    cp=4|16 wallfacer team=2 --context-parallel-layout zigzag|striped
    cp=8 wallfacer team=2 --context-parallel-layout contiguous
    cp=9 wallfacer team=3 p2p_intra --context-parallel-layout zigzag|striped
    cp=16 wallfacer team=4 p2p_intra --context-parallel-layout zigzag|striped
"""
_CONSECUTIVE = """
    ring --context-parallel-layout contiguous
    zigzag
    exchange --context-parallel-layout balanced
"""
_STATES = """
    lasp|lasp2|ulysses --context-parallel-layout contiguous
    lasp|lasp2 --context-parallel-layout zigzag
"""
_OPTIONS = {
    "team": "team_size",
    "placement": "placement",
    "per_node": "ranks_per_node",
    "degree": "ulysses_degree",
    "chunks": "ulysses_head_chunks",
}
SLOW_RANKS = (8, 9)
"""Numbers of processes that the nightly tests start."""


class Composition(NamedTuple):
    """A method on a number of ranks, with its options.

    They are those that ``make_plan`` and ``context_parallel`` take.
    """

    method: str
    size: int
    options: dict[str, Any]

    @property
    def named(self) -> tuple[str, dict[str, Any]]:
        """The method and its options."""
        return self.method, self.options


def _composition(case: Case) -> Composition:
    options = {
        option: getattr(case, field)
        for field, option in _OPTIONS.items()
        if getattr(case, field) != getattr(Case, field)
    }
    if case.more:
        options["layout"] = case.more[-1]
    return Composition(case.method, case.cp, options)


def _spelled_out(lines: str) -> str:
    return lines.replace("METHODS", "|".join(METHODS))


def _read(lines: str) -> list[Composition]:
    return [_composition(case) for case in cases_of(_spelled_out(lines))]


ON_RANKS = _read(_ON_RANKS)
"""The compositions that processes run."""
EVERY = ON_RANKS + _read(_IN_PLANS)
"""The same and those of plans alone, which need no process."""
CONSECUTIVE = [composition.named for composition in _read(_CONSECUTIVE)]
"""Methods in layouts of consecutive tokens, which a delta rule and a convolution need."""
STATES = [(composition.method, composition.options["layout"]) for composition in _read(_STATES)]
"""Methods of linear attention, in every layout that they take."""


def compositions(size: int) -> list[tuple[str, dict[str, Any]]]:
    """Return method and options of each composition that this number of processes runs."""
    return [composition.named for composition in ON_RANKS if composition.size == size]


def with_options(size: int) -> list[tuple[str, dict[str, Any]]]:
    """Return those that have options."""
    return [(method, options) for method, options in compositions(size) if options]


class Trained(NamedTuple):
    """A kind of model that trains on a mesh, and True if only the nightly tests train it."""

    kind: str
    case: Case
    slow: bool


_TRAINED = """
    llama cp=2 striped|allgather
    llama cp=4 wallfacer team=2 p2p_intra
    llama tp=2 cp=2 full
    llama pp=2 dp=2 legacy_ddp --eval-interval 2
    transnormer cp=2 lasp
    linear_transformer cp=2 lasp2 zero2
    qwen3_5 cp=2 exchange zero2
    smollm3 cp=2 zigzag
    granite tp=2
    nightly llama cp=1|4 METHODS
    nightly llama cp=2 tp=2 zigzag degree=2 attention_boundary
    nightly llama cp=4 double_ring per_node=2 degree=2 --context-parallel-layout striped
    nightly llama tp=4
    nightly llama pp=2 tp=2 GPipe --eval-interval 2
    nightly llama dp=2 cp=2 ulysses ddp|zero1|zero2 --eval-interval 2
    nightly llama dp=2 tp=2 legacy_ddp
    nightly llama dp=2 cp=2 fsdp copies=2
    nightly gpt dp=2 cp=1|2 zigzag
    nightly transnormer|linear_transformer dp=4 zero1 none
    nightly transnormer cp=2 dp=2 lasp2 ddp
    nightly linear_transformer cp=2 dp=2 lasp2 zero2
    nightly qwen3_5 cp=2 dp=2 exchange zero2
    nightly qwen3_5 cp=3 zigzag
    nightly smollm3|granite cp=2 tp=2 zigzag
    nightly smollm3|granite cp=2 exchange|ulysses
    nightly smollm3|granite cp=3 striped
    nightly smollm3|granite tp=2 pp=2
    nightly qwen3_5 cp=2 tp=2 ring
    nightly qwen3_5 tp=2 pp=2 none
"""
_MASKED = """
    gpt pp=2 cp=2 virtual=2 Interleaved1F1B ddp
    transnormer pp=2 tp=2
    nightly llama pp=2 cp=2 tp=2
    nightly llama pp=2 dp=2 cp=2 virtual=2 InterleavedZeroBubble zero1
    nightly gpt pp=2 dp=2 cp=2 copies=2
    nightly linear_transformer pp=2 tp=2 loss_chunk=50
    nightly qwen dp=2 cp=2 tp=2 zigzag
    nightly qwen pp=2 tp=2 virtual=2 Interleaved1F1B
"""
_PACKED = """
    llama|windows|gemma3|olmo3|gpt|transnormer|hybrid|linear|delta|kda cp=1
    smollm3|granite cp=1
    smollm3 cp=2 exchange
    granite tp=2
    llama cp=2 zigzag|striped|ulysses|exchange
    windows cp=2 exchange
    windows|gemma3 pp=2 --micro-batch-size 1
    olmo3|gpt tp=2
    transnormer cp=2 lasp attention_boundary
    linear cp=2 lasp2
    hybrid_windows cp=2 lasp --context-parallel-layout zigzag
    delta cp=2 zigzag
    olmo cp=2 exchange attention_boundary
    olmo cp=3 zigzag
    kda cp=3 ring
    nightly hybrid_windows|olmo cp=1
    nightly smollm3|granite cp=3 zigzag
    nightly smollm3|granite cp=2 tp=2 exchange selective
    nightly windows cp=2|4 ring|zigzag|ulysses
    nightly gemma3|gpt cp=2 exchange
    nightly hybrid_windows cp=2 lasp --hybrid-softmax-layout zigzag
    nightly llama cp=4 wallfacer team=2
    nightly llama cp=4 double_ring per_node=2
    nightly llama cp=4 exchange degree=2
    nightly llama cp=4 exchange per_node=2
    nightly llama cp=4 allgather ddp
    nightly llama cp=2 dp=2 striped zero1 --micro-batch-size 1
    nightly llama cp=2 pp=2 exchange --micro-batch-size 1
    nightly deep cp=2 pp=2 zigzag Interleaved1F1B virtual=2 --micro-batch-size 1
    nightly gpt cp=2 tp=2 ring loss_chunk=10 ffn_chunk=10
    nightly transnormer cp=4 lasp zero2
    nightly linear cp=2 pp=2 ulysses --micro-batch-size 1
    nightly hybrid cp=4 lasp --hybrid-softmax-method allgather
    nightly hybrid cp=4 lasp2 --context-parallel-layout zigzag
    nightly llama|windows|delta|gemma3|olmo3|olmo cp=2 tp=2 exchange selective
    nightly llama cp=2 tp=2 pp=2 exchange attention_boundary --micro-batch-size 1
    nightly llama|windows cp=4 dp=2 exchange full --balance-over dp_cp --micro-batch-size 1
    nightly hybrid cp=2 tp=2 pp=2 lasp --micro-batch-size 1
    nightly olmo cp=4 ring|ulysses|allgather
    nightly delta cp=2 dp=2 exchange --balance-over dp_cp --micro-batch-size 1
    nightly kda cp=2 pp=2 zigzag selective --micro-batch-size 1
    nightly hybrid_windows cp=2 tp=2 lasp2
"""


def _trained(lines: str) -> list[Trained]:
    rows = dict[tuple[str, Case], Trained]()
    for line in filter(None, map(str.strip, lines.splitlines())):
        slow = line.startswith("nightly ")
        kinds, _, words = line.removeprefix("nightly ").partition(" ")
        for kind in kinds.split("|"):
            for case in cases_of(_spelled_out(words)):
                rows.setdefault((kind, case), Trained(kind, case, slow))
    return [*rows.values()]


TRAINED = _trained(_TRAINED)
"""Meshes of training, from which tests take theirs.

The nightly ones have each part in another too: a method, a strategy, a split of the model.
"""
MASKED = _trained(_MASKED)
"""Meshes with labels masked, whose gradients are compared element by element."""
PACKED = _trained(_PACKED)
"""Meshes with packed documents, whose first step is that of each document alone."""
