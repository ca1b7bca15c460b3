"""The runs of `parity.checkouts`: every family of models and methods, dimension, recompute and sharding strategy."""

from dataclasses import dataclass

ITERATIONS, MIDDLE = 4, 2
SHARED = f"""
    --hidden-size 64 --num-attention-heads 4 --device cpu --train-iters {ITERATIONS} --save-interval {MIDDLE}
    --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 1 --clip-grad 0.5 --eval-iters 1 --eval-interval 2 --log-interval 4
"""
LANGUAGE = "--seq-length 256 --global-batch-size 4"
DIFFUSION = "--data-path digits --latent-shape 1 8 8 --num-classes 10 --samples-per-class 0 --global-batch-size 8"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A run that both checkouts make."""

    name: str
    ranks: int
    flags: str
    entry: str = "pretrain_gpt.py"


CONFIGURATIONS = (
    Configuration(
        name="llama-striped",
        ranks=2,
        flags="--num-layers 2 --num-query-groups 2 --context-parallel-size 2 --context-parallel-method striped",
    ),
    Configuration(
        name="llama-zigzag-tensor",
        ranks=4,
        flags="--num-layers 2 --context-parallel-size 2 --context-parallel-method zigzag "
        "--tensor-model-parallel-size 2 --data-parallel-sharding-strategy zero1 --recompute-granularity selective",
    ),
    Configuration(
        name="gpt-ring-data",
        ranks=4,
        flags="--model-type gpt --max-position-embeddings 256 --num-layers 2 --context-parallel-size 2 "
        "--context-parallel-method ring --data-parallel-sharding-strategy zero2 --eod-mask-loss "
        "--recompute-granularity attention_boundary --loss-chunk-size 50",
    ),
    Configuration(
        name="llama-wallfacer",
        ranks=4,
        flags="--num-layers 2 --context-parallel-size 4 --context-parallel-method wallfacer "
        "--context-parallel-team-size 2 --data-parallel-sharding-strategy ddp --recompute-granularity full",
    ),
    Configuration(
        name="gpt-ulysses-bf16",
        ranks=2,
        flags="--model-type gpt --max-position-embeddings 256 --num-layers 2 --context-parallel-size 2 "
        "--context-parallel-method ulysses --data-parallel-sharding-strategy legacy_ddp --bf16 --num-workers 1",
    ),
    Configuration(
        name="llama-exchange-packed",
        ranks=4,
        flags="--num-layers 2 --context-parallel-size 4 --context-parallel-method exchange --reset-attention-mask "
        "--reset-position-ids --window-size 40,0 --window-attn-skip-freq 2 --softmax-type learnable",
    ),
    Configuration(
        name="llama-1f1b",
        ranks=4,
        flags="--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-layers 1 3 --context-parallel-size 2 "
        "--context-parallel-method allgather --loss-chunk-size 50",
    ),
    Configuration(
        name="gpt-interleaved-auto",
        ranks=4,
        flags="--model-type gpt --max-position-embeddings 256 --no-untie-embeddings-and-output-weights --num-layers 4 "
        "--pipeline-model-parallel-size 2 --pipeline-schedule Interleaved1F1B "
        "--num-virtual-stages-per-pipeline-rank 2 --context-parallel-size 2 --context-parallel-method auto",
    ),
    Configuration(
        name="llama-double-ring",
        ranks=4,
        flags="--num-layers 2 --context-parallel-size 4 --context-parallel-method double_ring "
        "--context-parallel-ranks-per-node 2 --num-distributed-optimizer-instances 2 --ffn-chunk-size 24",
    ),
    Configuration(
        name="transnormer-lasp",
        ranks=2,
        flags="--model-type transnormer --num-layers 2 --context-parallel-size 2 --context-parallel-method lasp "
        "--data-parallel-sharding-strategy zero1",
    ),
    Configuration(
        name="linear-transformer-lasp2",
        ranks=4,
        flags="--model-type linear_transformer --num-layers 2 --context-parallel-size 2 "
        "--context-parallel-method lasp2 --data-parallel-sharding-strategy fsdp --lr-decay-style WSD",
    ),
    Configuration(
        name="transnormer-hybrid",
        ranks=2,
        flags="--model-type transnormer --softmax-every 2 --num-layers 2 --context-parallel-size 2 "
        "--context-parallel-method lasp --hybrid-softmax-method ring --hybrid-softmax-layout zigzag",
    ),
    Configuration(
        name="dit-ema",
        ranks=2,
        flags="--num-layers 2 --objective rectified_flow --ema-decay 0.9 --context-parallel-size 2 "
        "--context-parallel-method ring --micro-batch-size 4",
        entry="pretrain_dit.py",
    ),
)
