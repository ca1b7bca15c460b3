"""The meshes of `make parity`, in lines of words, and the tiny models that train on them."""

from pathlib import Path

from parallel.context import METHODS
from tools.common.cases import Case, cases_of

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
"""Models of linear attention."""
HYBRID = ("--softmax-every", "2", "--linear-num-key-heads", "4", "--linear-key-head-dim", "12")
DELTA_KINDS: dict[str, tuple[str, ...]] = {
    "qwen3_5": (
        *("--model-type", "qwen3_5", "--num-query-groups", "2", "--kv-channels", "24", "--rotary-percent", "0.5"),
        *("--linear-num-value-heads", "8", *HYBRID),
    ),
    "olmo_hybrid": ("--model-type", "olmo_hybrid", "--linear-value-head-dim", "20", *HYBRID),
    "kda": ("--model-type", "qwen3_5", "--linear-gate", "per_channel", *HYBRID),
}
"""Hybrids of a gated delta rule and softmax attention. kda: gates per channel."""
BRANCH_NORMS = (
    "--num-query-groups 2 --kv-channels 24 --window-size 40,0 --window-attn-skip-freq 3 --rotary-base-local 500"
)
BRANCH_KINDS = {
    "gemma3": tuple(
        f"--model-type gemma3 {BRANCH_NORMS} --query-pre-attn-scalar 20 --rope-scaling-type linear "
        "--rope-scaling-factor 4 --no-untie-embeddings-and-output-weights".split()
    ),
    "olmo3": tuple(
        f"--model-type olmo3 {BRANCH_NORMS} --rope-scaling-type yarn --rope-scaling-factor 4 "
        "--rope-scaling-original-max-position-embeddings 32".split()
    ),
}
"""Norms after a branch, windows in all layers but the third, each kind with rope of its own."""
MOST = 8
ALL_MODES = "ddp|legacy_ddp|zero1|zero2|zero3"
TEAMS = "tp=1|tp=2|pp=2 cp=4"
"""WallFacer's teams and double rings on 4 ranks, also with tensor or pipeline parallelism."""
SOFTMAX = f"""
    pp=2|4
    dp=2|4
    tp=2|4
    cp=2|4 {"|".join(METHODS)}
    cp=8 wallfacer team=1|2
    cp=8 wallfacer team=2 p2p_intra
    cp=8 wallfacer team=2 degree=2
    cp=8 double_ring per_node=2|4
    cp=8 double_ring per_node=4 degree=2
    {TEAMS} wallfacer team=1|2
    {TEAMS} wallfacer degree=2
    {TEAMS} double_ring per_node=2 degree=1|2
    tp=2 cp=2 ulysses
    cp=2 ulysses chunks=2
    cp=4 pp=2 ulysses
    cp=4 pp=2 zigzag degree=2 chunks=2
    pp=2|4 dp=2|4
    pp=2|4 cp=2|4
    pp=2|4 tp=2|4
    dp=2|4 cp=2|4
    dp=2|4 tp=2|4
    cp=2|4 tp=2|4
    pp=2 dp=2 cp=2|tp=2
    cp=2 tp=2 pp=2|dp=2
    pp=2 cp=2 tp=2|dp=2 striped|zigzag zero3|zero1
    dp=2 {ALL_MODES} cp=2|tp=2|pp=2
    dp=4 copies=2 zero1|zero2|zero3
    dp=2 cp=2 copies=2 tp=1|tp=2|pp=2
    pp=2 tp=1|2 GPipe
    pp=2 cp=1|2 virtual=2 Interleaved1F1B
    pp=2 cp=2 tp=2 virtual=2 Interleaved1F1B
    pp=2 dp=2 cp=2 virtual=2 Interleaved1F1B zero2
    pp=2 dp=2 virtual=2 Interleaved1F1B legacy_ddp
    pp=2 dp=2 cp=2 virtual=2 InterleavedZeroBubble zero1
    pp=2 layers=1+3
    pp=2 tp=2 layers=3+1
    tp=2 cp=2|pp=2 loss_chunk=50
"""
DIFFUSED = f"""
    ring tp=2|pp=2|pp=4|dp=2|cp=3
    cp=2|4 ring|allgather|ulysses
    cp=4 wallfacer team=2 pp=1|2
    cp=8 wallfacer team=2 degree=2
    cp=4 double_ring per_node=2 tp=1|2
    cp=4 dp=2 ring degree=2
    cp=2 tp=2 ring
    cp=2 tp=2 dp=2 ulysses
    pp=2 cp=2 ring tp=2|dp=2
    pp=2 cp=2 dp=2 ring copies=2
    pp=2 cp=2 ring virtual=2 Interleaved1F1B
    pp=2 dp=2 ring virtual=2 Interleaved1F1B zero1
    pp=2 tp=2 ring GPipe layers=1+3
    ring joined=2
    cp=2 ring joined=4
    tp=2 cp=2 pp=1|2 ring joined=2
    cp=3|4 exchange joined=4
    cp=2 dp=2 ulysses joined=2
    cp=4 allgather joined=2
    dp=2 cp=2 ring {ALL_MODES}
"""
LINEAR = f"""
    pp=2|dp=2|tp=2
    tp=4
    tp=2 pp=2
    tp=2 loss_chunk=50
    cp=2|4 ulysses
    cp=2|4|8 lasp|lasp2 {ALL_MODES}|fsdp
    cp=2|4 lasp|lasp2 --context-parallel-layout zigzag
    cp=2 lasp|lasp2|ulysses pp=2|dp=2|tp=2
    dp=2 tp=2 {ALL_MODES}
    pp=2 cp=2 tp=2 lasp|lasp2|ulysses
    pp=2 tp=2 virtual=2 Interleaved1F1B
"""
DELTA = f"""
    pp=2|dp=2|tp=2
    tp=4
    cp=2|3|4 zigzag|ring|exchange
    cp=4 allgather|ulysses|double_ring per_node=2
    cp=4 wallfacer team=2
    tp=2 pp=2|dp=2
    tp=2 loss_chunk=50
    cp=2 zigzag pp=2|dp=2|tp=2
    pp=2 cp=2 tp=2 zigzag
    dp=2 {ALL_MODES} cp=1|2 zigzag
    pp=2 cp=2 virtual=2 Interleaved1F1B zigzag
"""
BRANCH = """
    pp=2|dp=2|tp=2
    cp=2|3 zigzag|exchange
    tp=2 cp=2 zigzag|exchange
    dp=2 zero1|zero2|zero3
    dp=2 cp=2 zero3 exchange
    pp=2 cp=2 tp=2 zigzag|exchange
    pp=2 dp=2 virtual=2 Interleaved1F1B
"""
REFERENCE = Case(method="none")
LINEAR_REFERENCE = Case()


def reference_of(kind: str) -> Case:
    """Return the reference of a kind of model: one process, with plain SDPA for softmax attention."""
    return LINEAR_REFERENCE if kind in LINEAR_KINDS else REFERENCE


def chosen_cases(kind: str, only: str = "") -> list[Case]:
    """Return the meshes of a kind of model whose title contains ``only``; learned sinks refuse split backwards."""
    tables = ((KINDS, SOFTMAX), (LINEAR_KINDS, LINEAR), (BRANCH_KINDS, BRANCH), (DELTA_KINDS, DELTA))
    lines = DIFFUSED if kind == DIFFUSION else next(lines for kinds, lines in tables if kind in kinds)
    found = [case for case in cases_of(lines) if case.ranks <= MOST and only in case.title]
    return [case for case in found if kind != WINDOWS or case.schedule != "InterleavedZeroBubble"]


def flags_of(kind: str, case: Case, data: Path, iterations: int = 3) -> list[str]:
    """Return the command line that trains a kind of model on a mesh."""
    found = [*SHARED, *(KINDS | LINEAR_KINDS | BRANCH_KINDS | DELTA_KINDS)[kind], "--train-iters", str(iterations)]
    if kind != DIFFUSION:
        found += [*LANGUAGE, "--data-path", str(data), "--tokenizer-model", f"{data}.model"]
    return [*found, *case.flags]
