"""Ring Attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): the tables of the paper.

Minimal blocks, activations, FLOPs, longest contexts, and learning from trajectories.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from model.families.llama import LlamaConfig
from papers import rows
from papers.table import TableRow
from parallel.context import make_plan
from parallel.context.traffic import sizes
from planner.cluster import CLUSTERS, Cluster, load_cluster
from planner.search import predicted, workload_of
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from tools.common.arguments import run_command
from train.config.language import load_config, parse_args

K = 1024
CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "models"


@lru_cache
def step_of(config: str) -> StepShape:
    """Return the work of a step of one sequence, for a model of configs/models."""
    return workload_of(load_config(CONFIGS / f"{config}.toml"), 1, "cuda")


@lru_cache
def device(name: str) -> Cluster:
    """Return a cluster of one of the devices in table 2.

    The rate, the memory and the link are the device's; all other values are an A100's.
    """
    devices = {row["device"]: row for row in rows.published("ring_minimal_block")}
    row = devices[name]
    return replace(
        load_cluster(CLUSTERS / "a100_pod.toml"),
        name=name,
        gpus_per_node=1024,
        peak_tflops=float(row["flops_tf"]),
        memory_gb=float(row["hbm_gb"]),
        inside_gb_per_s=float(row["interconnect_gb_per_s"]),
    )


def minimal_blocks() -> Iterator[TableRow]:
    """Yield the smallest block and sequence that hide transfers, in thousands of tokens.

    Computing on a block takes as long as its transfer if it has (FLOP rate / bandwidth) tokens; the
    sequence has 6 blocks.
    """
    for row in rows.published("ring_minimal_block"):
        block = float(row["flops_tf"]) / float(row["interconnect_gb_per_s"])
        published = {name: float(row[f"minimal_{name}_ktokens"]) for name in ("block", "sequence")}
        predictions = {"block": round(block, 1), "sequence": round(6 * block, 1)}
        yield TableRow({"device": row["device"]}, published, predictions, row["device"])


def activations() -> list[TableRow]:
    """Return the bytes of a layer's activations by the paper's formulas and by Longmesh's plan."""
    s = 64 * K  # tokens
    h = 4096  # channels
    n = 32  # heads
    ranks = 8
    c = s // ranks  # tokens of a rank
    plan = make_plan("ring", seq_len=s, size=ranks)
    traffic = sizes(plan.geometry, 1, n, n, h // n, 2)
    plan_bytes = 2 * traffic.payload("kv") + 2 * c * h * 2
    published = {
        "vanilla": ("2bns^2", 2 * n * s**2),
        "memory-efficient attention": ("8bsh", 8 * s * h),
        "memory-efficient attention and feed-forward": ("2bsh", 2 * s * h),
        "Ring Attention": ("6bch", 6 * c * h),
    }

    shape = "b = 1, s = 65,536, h = 4,096, n = 32, c = s / 8"
    table = []
    for layer, (formula, size) in published.items():
        labels = {"layer": layer, "formula": formula}
        predicted_bytes = plan_bytes if layer == "Ring Attention" else None
        table.append(TableRow(labels, {"bytes": size}, {"bytes": predicted_bytes}, shape))
    return table


RATIOS = {"7B": 4096, "13B": 5140, "33B": 7168, "65B": 8192, "175B": 12288, "1TB": 36864}
"""Hidden size of each model in appendix C, keyed by model (5140 is printed there)."""
SHORT = 4 * K
PRINTED = {("175B", 3072): 162.6}
"""The only ratio that the paper's text states, keyed by model and by the context's multiple of 4K.
"""
KINDS = {"ratio": 1.0, "causal": 0.5}
"""Share of the attention scores that is counted, keyed by column."""


def flops_ratio(hidden: int, long: int, share: float = 1.0) -> float:
    """Return the ratio of FLOPs per token at a length s2 to those at s1 = 4K.

    With all scores it is (6h + s2) / (6h + s1), with h channels.

    Args:
        share: share of the attention scores that is counted.
    """
    return (6 * hidden + share * long) / (6 * hidden + share * SHORT)


def flops() -> list[TableRow]:
    """Return the FLOPs of training on a data set, relative to those at 4K (figure 5).

    There is a row for each model and length.
    """
    table = []
    for model, hidden in RATIOS.items():
        for multiple in (8, 32, 256, 3072, 25600):
            length = multiple * SHORT
            predictions = {}
            for name, share in KINDS.items():
                predictions[name] = round(flops_ratio(hidden, length, share), 1)
            published = {"ratio": PRINTED.get((model, multiple))}
            labels: dict[str, str | int] = {"model": model, "context": length}
            table.append(TableRow(labels, published, predictions, "any"))
    return table


DEVICES = {
    "8x A100 NVLink": ("A100 NVLink", 8),
    "32x A100 InfiniBand": ("A100 InfiniBand", 32),
    "TPUv3-512": ("TPU v3", 256),
    "TPUv4-1024": ("TPU v4", 512),
    "TPUv5e-256": ("TPU v5e", 128),
}
"""Device and number of devices, keyed by the table's hardware. For TPUs, the number is the ratio of
the paper's last two columns, since a chip has two cores."""
MODELS = {"3B": "striped_3b", "7B": "llama2_7b", "13B": "llama2_13b", "30B": "llama2_13b"}
COLUMNS = ("vanilla", "memory_efficient_attention", "blockwise_attention_and_ffn", "ring_attention")


@lru_cache
def model(size: str) -> StepShape:
    """Return the work of a step of a LLaMA in float32, batch 1; the 30B one has LLaMA 1's shape."""
    config = load_config(CONFIGS / f"{MODELS[size]}.toml")
    if size == "30B":
        shape = LlamaConfig(
            num_layers=60,
            hidden_size=6656,
            ffn_hidden_size=17920,
            num_attention_heads=52,
            vocab_size=32000,
        )
        config = replace(config, model=shape)
    return workload_of(config.updated(bf16=False), 1, "cuda")


def needed(work: StepShape, way: str, devices: int, tokens: int) -> float:
    """Return a device's peak memory in training, in bytes.

    Ring Attention has one sequence on all devices; the other ways have one on each. All weights are
    sharded over all devices, and every layer is recomputed from its input (FSDP and full
    checkpointing, section 4). Vanilla attention holds its scores twice, before and after the
    softmax.

    Args:
        way: a column of table 3.
    """
    ring = way == "ring_attention"
    chunk = 2048 if way in COLUMNS[2:] else 0
    plan = make_plan("ring", seq_len=tokens, size=devices if ring else 1)
    arranged = Arrangement(
        dp=1 if ring else devices, recompute="full", loss_chunk=chunk, ffn_chunk=chunk
    )
    scores = 0
    if way == "vanilla":
        scores = 2 * work.heads * tokens**2 * work.element_size
    return sum(memory_of(work, plan, arranged).values()) + scores


def longest(size: str, way: str, devices: int, memory_gb: float) -> int:
    """Return the largest number of tokens that fits: a power of two from 1,024 on, or 0."""
    tokens = 0
    while needed(model(size), way, devices, max(K, 2 * tokens)) <= memory_gb * 1e9:
        tokens = max(K, 2 * tokens)
    return tokens


def max_context() -> Iterator[TableRow]:
    """Yield the longest contexts of table 3, in 1,024 tokens."""
    for row in rows.published("ring_max_context"):
        name, devices = DEVICES[row["hardware"]]
        memory = device(name).memory_gb
        published = {}
        predictions = {}
        for column in COLUMNS:
            published[column] = int(row[f"{column}_ktokens"])
            predictions[column] = longest(row["model"], column, devices, memory) // K
        labels: dict[str, str | int] = {
            "hardware": row["hardware"],
            "model": row["model"],
            "devices": devices,
        }
        yield TableRow(labels, published, predictions, row["hardware"])


STEP = 1000 * 4
"""Number of tokens of a trajectory: 1,000 steps of a return, a state, an action and a reward."""
AGENTS = {
    "AT + ME 32": COLUMNS[1],
    "AT + BPT 32": COLUMNS[2],
    "AT + BPT 128": COLUMNS[2],
    "AT + RA 128": COLUMNS[3],
}
"""Columns of table 5 whose model reads several trajectories, each with the column of table 3 that
has its kind of attention."""
AGENT_FLAGS = """
    --model-type gpt --position-embedding-type rope --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --vocab-size 512 --mock-data --device cpu --no-bf16
    --context-parallel-method ring --micro-batch-size 1 --recompute-granularity full
"""
"""GPT-2 medium's shape without its vocabulary, for the paper's 350M parameters."""
AGENT_DEVICES = 8
GPUS_GB = (16, 24, 40, 80)
"""Memory sizes of common GPUs in 10^9 bytes, among which to find the smallest that fits."""


def agent(column: str) -> tuple[float, float]:
    """Return seconds per step and GB (10^9 bytes) per device, predicted for a column of table 5."""
    tokens = int(column.split()[-1]) * STEP
    ring = AGENTS[column] == COLUMNS[3]
    context_size = AGENT_DEVICES if ring else 1
    batch_size = 1 if ring else AGENT_DEVICES
    flags = (
        f"{AGENT_FLAGS} --seq-length {tokens} --context-parallel-size {context_size} "
        f"--global-batch-size {batch_size}"
    )
    config = parse_args(flags.split())
    seconds = predicted(config, AGENT_DEVICES, device("A100 NVLink")).time
    work = workload_of(config, 1, "cuda")
    return seconds, needed(work, AGENTS[column], AGENT_DEVICES, tokens) / 1e9


def reinforcement() -> Iterator[TableRow]:
    """Yield table 5's returns, then the planner's predictions for its models."""
    for row in rows.published("ring_rl"):
        returns: dict[str, str | float] = {}
        for name, value in row.items():
            if name != "task":
                returns[name] = value if value == "oom" else float(value)
        yield TableRow({"row": row["task"]}, returns, {}, "not stated")

    seconds = {}
    gigabytes = {}
    smallest = {}
    for column in AGENTS:
        seconds_of_step, size = agent(column)
        seconds[column] = round(seconds_of_step, 1)
        gigabytes[column] = round(size, 1)
        smallest[column] = min(memory for memory in GPUS_GB if size <= memory)
    hardware = "8 A100 of 80 GB"
    yield TableRow({"row": "seconds of a step"}, {}, seconds, hardware)
    yield TableRow({"row": "10^9 bytes of a GPU"}, {}, gigabytes, hardware)
    yield TableRow({"row": "smallest GPU that fits, GB"}, {}, smallest, "any")


TABLES: rows.TableFunctions = {
    "minimal_block": minimal_blocks,
    "activations": activations,
    "flops": flops,
    "max_context": max_context,
    "rl": reinforcement,
}
main = partial(rows.main, "ring", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
