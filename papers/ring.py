"""Ring Attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): blocks, memory, lengths, FLOPs,
trajectories.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from model.families.llama import LlamaConfig
from papers import rows
from papers.rows import Row
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
    """Return the work of a step of one sequence, by a configuration of configs/."""
    return workload_of(load_config(CONFIGS / f"{config}.toml"), 1, "cuda")


@lru_cache
def device(name: str) -> Cluster:
    """Return one node of a device of table 2, with its rate, memory and link, and in all else an
    A100's.
    """
    row = next(row for row in rows.published("ring_minimal_block") if row["device"] == name)
    return replace(
        load_cluster(CLUSTERS / "a100_pod.toml"),
        name=name,
        gpus_per_node=1024,
        peak_tflops=float(row["flops_tf"]),
        memory_gb=float(row["hbm_gb"]),
        inside_gb_per_s=float(row["interconnect_gb_per_s"]),
    )


def minimal_blocks() -> Iterator[Row]:
    """Yield the block that hides its transfer, the rate over the bandwidth, and 6 of them, in
    thousands of tokens.
    """
    for row in rows.published("ring_minimal_block"):
        block = float(row["flops_tf"]) / float(row["interconnect_gb_per_s"])
        theirs = {name: float(row[f"minimal_{name}_ktokens"]) for name in ("block", "sequence")}
        ours = {"block": round(block, 1), "sequence": round(6 * block, 1)}
        yield Row({"device": row["device"]}, theirs, ours, row["device"])


def activations() -> list[Row]:
    """Return bytes of a layer's activations by the paper's formulas, and what our plan holds of
    them in a forward.
    """
    s, h, n, ranks = 64 * K, 4096, 32, 8
    c = s // ranks
    plan = make_plan("ring", seq_len=s, size=ranks)
    traffic = sizes(plan.geometry, 1, n, n, h // n, 2)
    bytes_held = 2 * traffic.payload("kv") + 2 * c * h * 2
    published = {
        "vanilla": ("2bns^2", 2 * n * s**2),
        "memory-efficient attention": ("8bsh", 8 * s * h),
        "memory-efficient attention and feed-forward": ("2bsh", 2 * s * h),
        "Ring Attention": ("6bch", 6 * c * h),
    }
    shape, ours = "b = 1, s = 65,536, h = 4,096, n = 32, c = s / 8", {"Ring Attention": bytes_held}
    return [
        Row({"layer": name, "formula": formula}, {"bytes": size}, {"bytes": ours.get(name)}, shape)
        for name, (formula, size) in published.items()
    ]


RATIOS = {"7B": 4096, "13B": 5140, "33B": 7168, "65B": 8192, "175B": 12288, "1TB": 36864}
"""Widths in appendix C (5140 as it stands there)."""
SHORT = 4 * K
PRINTED = {("175B", 3072): 162.6}
"""By model and multiple of the context: the one ratio that the text states."""
KINDS = {"ratio": 1.0, "causal": 0.5}
"""Share of the scores that is counted."""


def flops_ratio(hidden: int, long: int, share: float = 1.0) -> float:
    """Return FLOPs per token at a length over those at 4K: (6h + s2) / (6h + s1), with ``share`` of
    the scores.
    """
    return (6 * hidden + share * long) / (6 * hidden + share * SHORT)


def flops() -> list[Row]:
    """Return the FLOPs of a data set over those at 4K, by model and length (figure 5)."""
    return [
        Row(
            {"model": model, "context": times * SHORT},
            {"ratio": PRINTED.get((model, times))},
            {
                name: round(flops_ratio(hidden, times * SHORT, share), 1)
                for name, share in KINDS.items()
            },
            "any",
        )
        for model, hidden in RATIOS.items()
        for times in (8, 32, 256, 3072, 25600)
    ]


DEVICES = {"8x A100 NVLink": ("A100 NVLink", 8), "32x A100 InfiniBand": ("A100 InfiniBand", 32)}
DEVICES |= {
    "TPUv3-512": ("TPU v3", 256),
    "TPUv4-1024": ("TPU v4", 512),
    "TPUv5e-256": ("TPU v5e", 128),
}
"""Device and number of them. Of TPUs it is the factor between the paper's last two columns: chips
have two cores.
"""
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
    """Return the bytes of a device, of one sequence on all of them by Ring Attention and one on
    each by other ways.

    All weights are sharded over all devices and every layer is recomputed from its input (FSDP and
    full checkpointing, section 4). Vanilla attention holds its scores twice, before and after the
    softmax.
    """
    ring, chunk = way == "ring_attention", 2048 if way in COLUMNS[2:] else 0
    plan = make_plan("ring", seq_len=tokens, size=devices if ring else 1)
    arranged = Arrangement(
        dp=1 if ring else devices, recompute="full", loss_chunk=chunk, ffn_chunk=chunk
    )
    scores = 2 * work.heads * tokens**2 * work.element_size if way == "vanilla" else 0
    return sum(memory_of(work, plan, arranged).values()) + scores


def longest(size: str, way: str, devices: int, memory_gb: float) -> int:
    """Return the longest power of two of tokens that fits by ``needed``; 0 if not even 1,024 do."""
    tokens = 0
    while needed(model(size), way, devices, max(K, 2 * tokens)) <= memory_gb * 1e9:
        tokens = max(K, 2 * tokens)
    return tokens


def max_context() -> Iterator[Row]:
    """Yield the longest contexts of table 3, in 1,024 tokens."""
    for row in rows.published("ring_max_context"):
        name, devices = DEVICES[row["hardware"]]
        memory = device(name).memory_gb
        theirs = {column: int(row[f"{column}_ktokens"]) for column in COLUMNS}
        ours = {column: longest(row["model"], column, devices, memory) // K for column in COLUMNS}
        labels: dict[str, str | int] = {
            "hardware": row["hardware"],
            "model": row["model"],
            "devices": devices,
        }
        yield Row(labels, theirs, ours, row["hardware"])


STEP = 1000 * 4
"""Tokens of a trajectory: 1,000 steps of a return, a state, an action and a reward."""
AGENTS = {
    "AT + ME 32": COLUMNS[1],
    "AT + BPT 32": COLUMNS[2],
    "AT + BPT 128": COLUMNS[2],
    "AT + RA 128": COLUMNS[3],
}
"""Columns of table 5 whose model reads several trajectories, and their ways of table 3."""
AGENT_FLAGS = """
    --model-type gpt --position-embedding-type rope --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --vocab-size 512 --mock-data --device cpu --no-bf16 --context-parallel-method ring --micro-batch-size 1
    --recompute-granularity full
"""
"""350M parameters are taken as GPT-2 medium's shape, without its vocabulary."""
AGENT_DEVICES = 8
GPUS_GB = (16, 24, 40, 80)
"""Memory that GPUs have."""


def agent(column: str) -> tuple[float, float]:
    """Return the predicted seconds of a step of a column of table 5, and 10^9 bytes of a device."""
    tokens, ring = int(column.split()[-1]) * STEP, AGENTS[column] == COLUMNS[3]
    sizes_of = f"--seq-length {tokens} --context-parallel-size {AGENT_DEVICES if ring else 1}"
    flags = f"{AGENT_FLAGS} {sizes_of} --global-batch-size {1 if ring else AGENT_DEVICES}"
    config = parse_args(flags.split())
    seconds = predicted(config, AGENT_DEVICES, device("A100 NVLink")).time
    return seconds, needed(
        workload_of(config, 1, "cuda"), AGENTS[column], AGENT_DEVICES, tokens
    ) / 1e9


def reinforcement() -> Iterator[Row]:
    """Yield table 5's returns, the planner's prediction for its models."""
    for row in rows.published("ring_rl"):
        theirs = {
            name: value if value == "oom" else float(value)
            for name, value in row.items()
            if name != "task"
        }
        yield Row({"row": row["task"]}, theirs, {}, "not stated")
    ours = {column: agent(column) for column in AGENTS}
    for place, what in enumerate(("seconds of a step", "10^9 bytes of a GPU")):
        yield Row(
            {"row": what},
            {},
            {name: round(figures[place], 1) for name, figures in ours.items()},
            "8 A100 of 80 GB",
        )
    fits = {
        name: next(size for size in GPUS_GB if figures[1] <= size) for name, figures in ours.items()
    }
    yield Row({"row": "smallest GPU that fits, GB"}, {}, fits, "any")


TABLES: rows.Makers = {
    "minimal_block": minimal_blocks,
    "activations": activations,
    "flops": flops,
    "max_context": max_context,
    "rl": reinforcement,
}
main = partial(rows.main, "ring", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
