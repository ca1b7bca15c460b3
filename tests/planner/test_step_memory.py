"""The search's formula of memory, against the code itself on tensors without memory."""

import shlex
from dataclasses import replace

import pytest

from planner.cluster import CLUSTERS, default_cluster, load_cluster
from planner.dry_run import rehearsed
from planner.levers import MOMENTS
from planner.search import weigh
from tests.train.optimizers.momentum import NAME, Momentum
from train.config.language import parse_args
from train.optimizers import OPTIMIZERS
from train.tasks.language import LanguageTask

LLAMA = (
    "--device cuda --bf16 --mock-data --model-type llama --num-layers 4 --hidden-size 1024 "
    "--num-attention-heads 16 "
    "--num-query-groups 4 --seq-length 16384 --micro-batch-size 1 --global-batch-size 1 "
    "--vocab-size 32000 "
)
CHUNKS = "--loss-chunk-size 2048 --ffn-chunk-size 2048 "
AGAIN, CP = " --recompute-granularity ", "--loss-chunk-size 2048 --context-parallel-size "
BY, WALLFACER = (
    " --context-parallel-method ",
    " --context-parallel-method wallfacer --context-parallel-team-size ",
)
LOCAL = " --window-size 1023,0 --window-attn-skip-freq 2"
GPIPE = "--pipeline-schedule GPipe --pipeline-model-parallel-size 2 --global-batch-size 4"
DELTA = (
    "--model-type qwen3_5 --num-layers 8 --hidden-size 512 --num-attention-heads 4 "
    "--kv-channels 128 "
    "--num-query-groups 2 --ffn-hidden-size 1536 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 "
    "--linear-key-head-dim 64 --rotary-percent 0.25 --vocab-size 8192 --context-parallel-method "
    "none "
)
MUON = "--optimizer muon "
BF16 = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
SHORT = "--seq-length 256 --global-batch-size 4 --recompute-granularity full --loss-chunk-size 64 "
SLICES = (
    "--seq-length 65536 --recompute-granularity full --loss-chunk-size 256 --vocab-size 256 "
    "--context-parallel-method ulysses --layer-chunk-size 16384 "
)
CASES = {
    "none": (1, ""),
    "none, chunks": (1, CHUNKS),
    "full": (1, AGAIN + "full --loss-chunk-size 2048"),
    "attention_boundary, offload": (1, AGAIN + "attention_boundary --recompute-offload " + CHUNKS),
    ("several micro-batches, moments on the "
    "host"): (1, "--global-batch-size 4 --optimizer-cpu-offload"),
    "zigzag 4, full": (4, CP + "4" + BY + "zigzag" + AGAIN + "full"),
    "ulysses 4, full": (4, CP + "4" + BY + "ulysses --seq-length 262144" + AGAIN + "full"),
    ("ulysses 4 in stages, "
    "full"): (4, CP + "4" + BY + "ulysses --ulysses-head-chunks 4" + AGAIN + "full"),
    "teams of 2, full": (4, CP + "4" + WALLFACER + "2" + AGAIN + "full"),
    "allgather 4, full": (4, CP + "4" + BY + "allgather --seq-length 131072" + AGAIN + "full"),
    "tensor 2, pipeline 2":
        (4, ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--global-batch-size 4")),
    "GPipe 2": (2, GPIPE),
    "GPipe 2, full, chunks": (2, GPIPE + AGAIN + "full " + CHUNKS),
    ("interleaved "
    "2"): (2, "--pipeline-model-parallel-size 2 --pipeline-schedule Interleaved1F1B "
    "--global-batch-size 4 "
                      "--num-virtual-stages-per-pipeline-rank 2 --num-layers 8"),
    ("tensor 4, attention_boundary, "
    "chunks"): (4, "--tensor-model-parallel-size 4 --seq-length 65536 " + CHUNKS + AGAIN
                                             + "attention_boundary"),
    "data 4, zero1": (4, "--data-parallel-sharding-strategy zero1 --global-batch-size 8"),
    "on a CPU": (4, "--device cpu" + AGAIN + "full " + CP + "4" + BY + "zigzag"),
    "on a CPU, float32": (4, "--device cpu --no-bf16" + AGAIN + "full " + CP + "4" + BY + "zigzag"),
    "gpt": (1, "--model-type gpt --num-query-groups 16 --max-position-embeddings 16384"),
    "gemma3": (1, "--model-type gemma3" + LOCAL),
    "gemma3, full": (1, "--model-type gemma3 --loss-chunk-size 2048" + LOCAL + AGAIN + "full"),
    "olmo3": (1, "--model-type olmo3" + LOCAL),
    "smollm3": (1, "--model-type smollm3"),
    "granite": (1, "--model-type granite --attention-multiplier 0.01 --residual-multiplier 0.22 "
                   "--embedding-multiplier 12"),
    "qwen3_5": (1, DELTA),
    "qwen3_5, full": (1, DELTA + AGAIN + "full --loss-chunk-size 2048"),
    "qwen3_5, attention_boundary, chunks": (1, DELTA + AGAIN + "attention_boundary " + CHUNKS),
    "qwen3_5 on a CPU, float32": (1, DELTA + "--device cpu --no-bf16"),
    "qwen3_5 on a CPU": (1, DELTA + "--device cpu"),
    "olmo_hybrid": (1, DELTA.replace("--rotary-percent 0.25 ", "") + "--model-type olmo_hybrid"),
    "slices": (1, SLICES),
    "slices, tensor 2": (2, SLICES + "--tensor-model-parallel-size 2"),
    "slices, ulysses 4, adapters, offload":
        (4, SLICES + "--context-parallel-size 4 --lora-rank 8 --recompute-offload"),
    "slices, qwen3_5": (1, DELTA + SLICES + "--num-layers 4"),
    "slices on a CPU": (1, SLICES + "--device cpu"),
    "muon, pipeline 4": (4, MUON + SHORT + "--pipeline-model-parallel-size 4"),
    "bf16 moments, a step of tensor 2":
        (4, BF16 + SHORT + "--tensor-model-parallel-size 2 --vocab-size 8000"),
    "bf16 moments on the host": (1, BF16 + SHORT + "--vocab-size 512 --optimizer-cpu-offload"),
    "int8 moments, pipeline 2":
        (2, "--exp-avg-dtype int8 --exp-avg-sq-dtype int8 " + GPIPE + AGAIN + "full"),
    ("transnormer, lasp 4, "
    "full"): (4, "--model-type transnormer --num-query-groups 16 --context-parallel-method lasp "
                                  "--context-parallel-size 4" + AGAIN + "full"),
}  # fmt: skip
QUICK = (
    "attention_boundary, offload",
    "ulysses 4 in stages, full",
    "teams of 2, full",
    "tensor 2, pipeline 2",
    "muon, pipeline 4",
    "bf16 moments on the host",
    "data 4, zero1",
    "gemma3",
    "transnormer, lasp 4, full",
    "slices, ulysses 4, adapters, offload",
)
"""Cases of ``make test``: whatever is cut, stored or sent is in one of them.

The others combine the same.
"""


@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_the_formula_is_near_what_the_code_takes(case):
    world_size, flags = CASES[case]
    config = parse_args(shlex.split(LLAMA + flags))
    cluster = (
        default_cluster("cpu")
        if "--device cpu" in flags
        else load_cluster(CLUSTERS / "h100_pod.toml")
    )
    device_bytes = weigh(config, world_size, cluster, None).device
    ran = rehearsed(config, LanguageTask, world_size, cluster)
    assert device_bytes == pytest.approx(max(stage.bytes for stage in ran), rel=0.05)


def test_an_optimizer_of_one_state_takes_half_of_the_moments(monkeypatch):
    """The states that an optimizer names, against the tensors that its step makes."""
    monkeypatch.setitem(OPTIMIZERS, NAME, Momentum())
    cluster = load_cluster(CLUSTERS / "h100_pod.toml")
    config = parse_args(shlex.split(LLAMA + "--data-parallel-sharding-strategy ddp " + CHUNKS))
    lighter = replace(config, optimizer=replace(config.optimizer, optimizer=NAME))
    whole, half = (weigh(run_config, 1, cluster, None) for run_config in (config, lighter))
    parameters = whole.inputs[0].parameters
    assert whole.device - half.device == 4 * parameters
    (ran,) = rehearsed(lighter, LanguageTask, 1, cluster)
    assert half.device == pytest.approx(ran.bytes, rel=0.05)
    assert ran.memory["optimizer"] == pytest.approx(4 * parameters, rel=1e-3)
    assert MOMENTS.further(config, cluster) == [(True,)]
    assert MOMENTS.further(lighter, cluster) == []
