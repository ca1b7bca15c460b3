"""Megatron-LM's flags that are missing here by name: what to give instead, or that they always hold."""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.errors import UserError

# A line per flag: the flag, its values (N: any word; A|B: one of these), then `=` if it always holds (or holds with the
# named values of a field), `>` before what to give instead, or `!` before why there is none.
TABLE = """\
[Model]
--swiglu                                | | = with model_type llama | its feed-forward is SwiGLU; a gpt has GELU, a transnormer a GLU without activation
--normalization                         | RMSNorm | = with model_type llama | its norm is RMSNorm; a gpt has LayerNorm
--disable-bias-linear                   | | = with model_type llama, transnormer | they have no biases; a gpt and a linear_transformer have them
--use-rotary-position-embeddings        | | = with model_type llama | its positions are rotary; a gpt takes --position-embedding-type rope
--rotary-percent                        | 1 | = | rope turns every channel of a head
--no-position-embedding                 | | > | --position-embedding-type rope
--group-query-attention                 | | > | --num-query-groups N, which alone says it
--rotary-interleaved                    | | ! | rope turns channel i with channel i + D/2, as Hugging Face's LLaMA does
--rotary-seq-len-interpolation-factor   | N | > | --rope-scaling-type linear --rope-scaling-factor N
--use-rope-scaling                      | | > | --rope-scaling-type llama3, with its factor and original length
--make-vocab-size-divisible-by          | N | > | --vocab-size N; no multiple is needed, tensor parallelism splits any vocabulary
--padded-vocab-size                     | N | > | --vocab-size N
--apply-layernorm-1p                    | | ! | the norms' weights are as they are stored
--apply-residual-connection-post-layernorm | | ! | the norm comes first, inside of the residual
--squared-relu                          | | ! | feed-forwards are SwiGLU in a llama and GELU in a gpt
--quick-geglu                           | | ! | feed-forwards are SwiGLU in a llama and GELU in a gpt
--openai-gelu                           | | = with model_type gpt, linear_transformer | their GELU is in the tanh form, as GPT-2 has it
--onnx-safe                             | | ! | nothing is exported to ONNX; model/hf/api.py writes Hugging Face's format
--multi-latent-attention                | | ! | attention is of many heads or grouped queries
--num-experts                           | N | ! | there is no mixture of experts
--moe-router-topk                       | N | ! | there is no mixture of experts
--moe-router-load-balancing-type        | N | ! | there is no mixture of experts
--moe-aux-loss-coeff                    | N | ! | there is no mixture of experts
--moe-grouped-gemm                      | | ! | there is no mixture of experts
--moe-token-dispatcher-type             | N | ! | there is no mixture of experts
--moe-ffn-hidden-size                   | N | ! | there is no mixture of experts
--moe-layer-freq                        | N | ! | there is no mixture of experts
--moe-shared-expert-intermediate-size   | N | ! | there is no mixture of experts
--moe-permute-fusion                    | | ! | there is no mixture of experts
--moe-z-loss-coeff                      | N | ! | there is no mixture of experts
--expert-model-parallel-size            | 1 | = | there is no mixture of experts
--expert-tensor-parallel-size           | 1 | = | there is no mixture of experts
--mtp-num-layers                        | N | ! | one next token is predicted
--spec                                  | N | ! | the model is --model-type; model/gpt.py is the one to start a new one from
--hybrid-layer-pattern                  | N | > | --softmax-every N, of a transnormer
--hybrid-override-pattern               | N | > | --softmax-every N, of a transnormer
--transformer-impl                      | N | = | the modules are this project's own, whichever is named
--use-mcore-models                      | | = | the modules are this project's own
--use-legacy-models                     | | ! | the modules are this project's own
--init-method-xavier-uniform            | | ! | weights are drawn from a normal distribution of --init-method-std
--perform-initialization                | | = | weights are always initialized
--no-initialization                     | | ! | weights are always initialized
--use-cpu-initialization                | | = | every rank draws whole tensors and keeps its shard
--attention-dropout                     | 0 | = | there is no dropout
--hidden-dropout                        | 0 | = | there is no dropout
--attention-softmax-in-fp32             | | = | the softmax is in float32
--no-masked-softmax-fusion              | | = | attention is a kernel of --attention-backend
--no-bias-gelu-fusion                   | | = | there is no such fusion
--no-bias-swiglu-fusion                 | | = | there is no such fusion
--no-bias-dropout-fusion                | | = | there is no such fusion
--no-rope-fusion                        | | = | there is no such fusion
--no-persist-layer-norm                 | | = | there is no such kernel
--apply-query-key-layer-scaling         | | ! | scores are scaled by 1 / sqrt(D) alone
--use-flash-attn                        | | = | attention never holds the scores of a whole sequence
--cross-entropy-loss-fusion             | | > | --loss-chunk-size N, which bounds the logits' memory
--cross-entropy-fusion-impl             | N | > | --loss-chunk-size N, which bounds the logits' memory
[Parallelism]
--sequence-parallel                     | | = | it is always on where --tensor-model-parallel-size is above 1
--no-sequence-parallel                  | | ! | tensor parallelism always shares the tokens too
--model-parallel-size                   | N | > | --tensor-model-parallel-size N
--world-size                            | N | ! | the launcher says it: torchrun --nproc-per-node N
--rank                                  | N | ! | the launcher says it: torchrun --node-rank N
--local-rank                            | N | = | the launcher says it, in the environment
--cp-comm-type                          | N | > | --context-parallel-method: p2p is zigzag, all_gather is allgather, a2a is ulysses
--hierarchical-context-parallel-sizes   | N | > | --ulysses-degree N, heads within and a method around it
--num-layers-per-virtual-pipeline-stage | N | > | --num-virtual-stages-per-pipeline-rank N with --pipeline-schedule Interleaved1F1B
--decoder-first-pipeline-num-layers     | N | > | --pipeline-layers, the layers of each stage
--decoder-last-pipeline-num-layers      | N | > | --pipeline-layers, the layers of each stage
--pipeline-model-parallel-layout        | N | > | --pipeline-layers, the layers of each stage
--account-for-embedding-in-pipeline-split | | > | --pipeline-layers, the layers of each stage
--account-for-loss-in-pipeline-split    | | > | --pipeline-layers, the layers of each stage
--no-overlap-p2p-communication          | | ! | torch's schedules decide when stages send
--overlap-p2p-communication             | | = | torch's schedules send while others compute
--microbatch-group-size-per-virtual-pipeline-stage | N | ! | torch's schedules decide it
--use-distributed-optimizer             | | = with data_parallel_sharding_strategy zero1, zero2, zero3, fsdp | they divide the optimizer's state; ddp and legacy_ddp do not
--use-torch-fsdp2                       | | = with data_parallel_sharding_strategy zero3, fsdp | they are FSDP2 with all it divides
--use-megatron-fsdp                     | | > | --data-parallel-sharding-strategy zero3
--use-custom-fsdp                       | | > | --data-parallel-sharding-strategy zero3
--torch-fsdp2-no-reshard-after-forward  | | > | --data-parallel-sharding-strategy zero2
--overlap-grad-reduce                   | | = with data_parallel_sharding_strategy ddp, zero1, zero2, zero3, fsdp | gradients are reduced while the backward goes on; legacy_ddp does so after it
--no-overlap-grad-reduce                | | > | --data-parallel-sharding-strategy legacy_ddp, which reduces after the last backward
--overlap-param-gather                  | | = with data_parallel_sharding_strategy zero1, zero2, zero3, fsdp | weights are gathered while layers compute; ddp and legacy_ddp have them whole
--overlap-param-gather-with-optimizer-step | | ! | weights are gathered as the next forward begins
--ddp-bucket-size                       | N | ! | a bucket is a layer
--ddp-num-buckets                       | N | ! | a bucket is a layer
--ddp-average-in-collective             | | ! | gradients are summed: the loss is divided by the number of tokens
--accumulate-allreduce-grads-in-fp32    | | = | gradients are accumulated and reduced in float32
--grad-reduce-in-bf16                   | | ! | gradients are accumulated and reduced in float32
--no-gradient-accumulation-fusion       | | = | there is no such fusion
--tp-comm-overlap                       | | ! | tensor parallelism's messages are torch's own
--no-async-tensor-model-parallel-allreduce | | = | with sequence parallelism there is no such all-reduce
--delay-wgrad-compute                   | | > | --pipeline-schedule InterleavedZeroBubble
--use-tp-pp-dp-mapping                  | | ! | ranks are neighbours along tp, then cp, dp and pp
--use-ring-exchange-p2p                 | | ! | messages are torch.distributed's own
--nccl-communicator-config-path         | N | ! | NCCL is set by its own environment variables
--use-sharp                             | | ! | NCCL is set by its own environment variables
--high-priority-stream-groups           | N | ! | groups have no priorities
--lazy-mpu-init                         | N | ! | processes join once the flags are checked
--standalone-embedding-stage            | | ! | the first stage has the embedding; --pipeline-layers can give it fewer layers
[Precision]
--fp16                                  | | > | --bf16; there is no loss scaling for float16
--fp8-format                            | N | > | --bf16; there is no fp8
--fp8-recipe                            | N | > | --bf16; there is no fp8
--fp8-margin                            | N | > | --bf16; there is no fp8
--fp8-amax-history-len                  | N | > | --bf16; there is no fp8
--fp8-amax-compute-algo                 | N | > | --bf16; there is no fp8
--fp8-param-gather                      | | > | --bf16; there is no fp8
--fp8-hybrid                            | | > | --bf16; there is no fp8
--fp4-format                            | N | > | --bf16; there is no fp4
--te-rng-tracker                        | | ! | Transformer Engine is not used
--loss-scale                            | N | ! | bfloat16 needs no loss scaling
--initial-loss-scale                    | N | ! | bfloat16 needs no loss scaling
--min-loss-scale                        | N | ! | bfloat16 needs no loss scaling
--loss-scale-window                     | N | ! | bfloat16 needs no loss scaling
--hysteresis                            | N | ! | bfloat16 needs no loss scaling
--fp32-residual-connection              | | ! | with --bf16 the residual stream is bfloat16
--fp16-lm-cross-entropy                 | | ! | the loss is computed in float32
--use-precision-aware-optimizer         | | ! | master weights and moments are float32
--main-grads-dtype                      | fp32 | = | gradients are accumulated and reduced in float32
--main-params-dtype                     | fp32 | = | master weights are float32
--exp-avg-dtype                         | fp32 | = | moments are float32
--exp-avg-sq-dtype                      | fp32 | = | moments are float32
[Optimizer and schedule]
--optimizer                             | adam | = | it is AdamW
--adam-w-mode                           | | = | it is AdamW
--sgd-momentum                          | N | ! | the optimizer is AdamW
--calculate-per-token-loss              | | = | the loss is the mean over all tokens of the global batch
--optimizer-cpu-offload                 | | ! | the state stays on its device; --recompute-offload moves activations
--optimizer-offload-fraction            | N | ! | the state stays on its device; --recompute-offload moves activations
--decoupled-lr                          | N | ! | all weights have one learning rate
--decoupled-min-lr                      | N | ! | all weights have one learning rate
--start-weight-decay                    | N | > | --weight-decay X, which stays the same
--end-weight-decay                      | N | > | --weight-decay X, which stays the same
--weight-decay-incr-style               | constant | = | the weight decay stays the same
--lr-warmup-samples                     | N | > | --lr-warmup-iters N, or --lr-warmup-fraction X
--lr-decay-samples                      | N | > | --lr-decay-iters N
--lr-wsd-decay-samples                  | N | > | --lr-wsd-decay-iters N
--rampup-batch-size                     | N | ! | the batch size stays the same
--batch-size                            | N | > | --micro-batch-size N
--train-samples                         | N | > | --train-iters N; an iteration takes --global-batch-size samples
--check-for-nan-in-loss-and-grad        | | = | a step whose gradient norm is not finite is skipped, ten in a row end the run
--no-check-for-nan-in-loss-and-grad     | | ! | a step whose gradient norm is not finite is skipped
--deterministic-mode                    | | ! | on a CPU a run repeats to the bit without it; on a GPU its kernels decide
--empty-unused-memory-level             | 0 | = | nothing is emptied
--manual-gc                             | | ! | Python collects its garbage by itself
--manual-gc-interval                    | N | ! | Python collects its garbage by itself
--barrier-with-L1-time                  | | = | there are no such timers
[Recompute]
--recompute-activations                 | | > | --recompute-granularity selective
--checkpoint-activations                | | > | --recompute-granularity full
--recompute-method                      | uniform | = | every layer is recomputed as --recompute-granularity says
--recompute-num-layers                  | 1 | = | every layer is recomputed by itself
--recompute-modules                     | N | > | --recompute-granularity attention_boundary
--distribute-saved-activations          | | ! | with tensor parallelism the tokens are shared already
--cpu-offloading-num-layers             | N | > | --recompute-offload
--fine-grained-activation-offloading    | | > | --recompute-offload
[Data]
--train-data-path                       | N | > | --data-path and --split
--valid-data-path                       | N | > | --data-path and --split
--test-data-path                        | N | > | --data-path and --split
--data-args-path                        | N | > | --data-path, or data_path in a TOML file of --config
--per-split-data-args-path              | N | > | --data-path and --split
--sft-tokenizer-prompt-format           | N | > | --sft, whose data python -m tools.prepare_data --chat --chat-template FILE wrote
--mock-data                             | | > | --data-path; python -m tools.prepare_data writes one of the standard library's sources
--vocab-file                            | N | > | --tokenizer-model FILE, a sentencepiece .model or a tokenizer.json
--merge-file                            | N | > | --tokenizer-model FILE, a sentencepiece .model or a tokenizer.json
--tokenizer-type                        | N | > | --tokenizer-model FILE alone, whose kind is seen in the file
--tokenizer-name-or-path                | N | > | --tokenizer-model FILE
--dataloader-type                       | single | = | the order is a function of the seed and the samples consumed
--no-mmap-bin-files                     | | = | .bin files are read by pread
--no-create-attention-mask-in-dataloader | | = | no mask is ever made
--encoder-seq-length                    | N | > | --seq-length N
--decoder-seq-length                    | N | > | --seq-length N
--num-dataset-builder-threads           | N | ! | indices are built by one thread
[Checkpoints]
--ckpt-format                           | torch_dist | = | checkpoints are torch.distributed.checkpoint's
--use-dist-ckpt                         | | = | checkpoints are torch.distributed.checkpoint's
--dist-ckpt-format                      | torch_dist | = | checkpoints are torch.distributed.checkpoint's
--auto-detect-ckpt-format               | | = | there is one format
--ckpt-fully-parallel-save              | | = | every rank writes its shards
--ckpt-fully-parallel-load              | | = | every rank reads its shards
--async-save                            | | ! | training waits until a checkpoint is whole on disk
--no-save-optim                         | | ! | checkpoints have the optimizer's state; tools read the weights alone
--no-save-rng                           | | = | nothing random has a state: all is drawn by the seed and the iteration
--no-load-rng                           | | = | nothing random has a state: all is drawn by the seed and the iteration
--no-load-optim                         | | > | --finetune, which leaves optimizer, schedule, counters and data behind
--pretrained-checkpoint                 | N | > | --load DIR
--save-retain-interval                  | N | ! | checkpoints are kept; remove what is not needed
--non-persistent-save-interval          | N | > | --save-interval N
--use-checkpoint-args                   | | > | --config DIR/config.toml, which every run writes
--dist-ckpt-strictness                  | N | ! | every tensor must be there
[Logging and running]
--log-throughput                        | | = | tokens/s are on every line, TFLOP/s and MFU in metrics.jsonl
--log-params-norm                       | | ! | metrics.jsonl has the gradient's norm
--log-num-zeros-in-grad                 | | ! | metrics.jsonl has the gradient's norm
--log-timers-to-tensorboard             | | = | the time of an iteration is written
--log-validation-ppl-to-tensorboard     | | ! | the validation loss is written; exp of it is the perplexity
--log-memory-to-tensorboard             | | = | memory is written
--log-progress                          | | = | metrics.jsonl has every iteration
--tensorboard-queue-size                | N | = | events are flushed as they are written
--tensorboard-log-interval              | N | ! | every iteration is written
--timing-log-level                      | 0 | = | there are no timers within an iteration
--wandb-save-dir                        | N | > | --save DIR, where wandb's files go too
--wandb-entity                          | N | ! | set WANDB_ENTITY in the environment
--one-logger-project                    | N | > | --wandb-project NAME
--no-one-logger                         | | = | nothing is sent anywhere unless --wandb-project asks for it
--profile                               | | ! | torch.profiler is not built in; make bench and python -m tools.plan --profile measure
--profile-step-start                    | N | ! | torch.profiler is not built in; make bench and python -m tools.plan --profile measure
--profile-step-end                      | N | ! | torch.profiler is not built in; make bench and python -m tools.plan --profile measure
--use-pytorch-profiler                  | | ! | torch.profiler is not built in; make bench and python -m tools.plan --profile measure
--yaml-cfg                              | N | > | --config FILE, a TOML file
--exit-signal-handler                   | | = | SIGTERM, SIGUSR1 and SIGHUP always save and exit
--skip-train                            | | ! | a run trains; python -m tools.sample draws from a checkpoint
--enable-cuda-graph                     | | ! | CUDA graphs are not used
--cuda-graph-impl                       | none | = | CUDA graphs are not used
--external-cuda-graph                   | | ! | CUDA graphs are not used
--disable-straggler-on-startup          | | = | there is no straggler detection
--log-straggler                         | | ! | there is no straggler detection
--enable-ft-package                     | | ! | torchrun --max-restarts N with --load starts a run again
--distributed-timeout-seconds           | N | > | --distributed-timeout-minutes X
"""


class Entry(NamedTuple):
    """A Megatron flag's meaning here; `field` and `fits`: with which values of which field an = holds."""

    flag: str
    values: tuple[str, ...]
    verdict: str
    field: str
    fits: tuple[str, ...]
    text: str
    section: str

    @property
    def answer(self) -> str:
        """Say what a user who gives the flag should do."""
        return (
            f"it is Megatron-LM's; here give {self.text}"
            if self.verdict == ">"
            else f"it is Megatron-LM's: {self.text}"
        )


def entries() -> dict[str, Entry]:
    """Parse the table into entries by flag."""
    table, section = {}, ""
    for line in TABLE.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            continue
        flag, *values, verdict, text = (word.strip() for word in line.split("|"))
        mark, _, condition = verdict.partition(" with ")
        field, _, fits = condition.partition(" ")
        words = tuple(word for word in values if word)
        table[flag] = Entry(flag, words, mark, field, tuple(fits.split(", ")) if fits else (), text, section)
    return table


def without_what_is_so(argv: Sequence[str], known: Sequence[str]) -> tuple[list[str], list[Entry]]:
    """Split off Megatron flags that always hold here; return the rest and them. `known` are the program's own flags.

    Raises:
        UserError: a flag that does not hold, or has another name here.
    """
    table, left, taken = entries(), [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        entry = None if flag in known else table.get(flag)
        if entry is None:
            left.append(word)
            continue
        if entry.verdict != "=":
            raise UserError(f"unknown argument {flag}; {entry.answer}")
        if equals and not entry.values:
            raise UserError(f"{flag} takes no value, and {value!r} is given; {entry.answer}")
        if entry.values:
            if not equals and (not words or words[0].startswith("--")):
                raise UserError(f"{flag} has no value; {entry.answer}")
            value = value if equals else words.pop(0)
            if entry.values != ("N",) and not any(_same(value, one) for one in entry.values):
                raise UserError(f"{flag} is {value}, and here it can only be {' or '.join(entry.values)}: {entry.text}")
        taken.append(entry)
    return left, taken


def _same(value: str, word: str) -> bool:
    """Whether two words have the same value: 0.00 is 0."""
    try:
        return float(value) == float(word)
    except ValueError:
        return value == word


def markdown() -> str:
    """Return docs/reference/megatron_flags.md."""
    verdicts = {"=": "accepted", ">": "another name", "!": "refused"}
    lines = [
        "# Megatron-LM's flags here",
        "",
        "Most flags have Megatron-LM's names (`python pretrain_gpt.py --help` lists them). These do not exist here by their",
        "name. A flag that says what is so anyway is accepted, so that a command line can be taken over; any other one is",
        "refused in one line with what this table says. Made by `python -m train.config.pages`.",
    ]
    section = ""
    for entry in entries().values():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", "", "| Megatron-LM | here |", "| --- | --- |"]
        values = "" if entry.values in ((), ("N",)) else " " + " or ".join(entry.values)
        fits = f" with {entry.field} {', '.join(entry.fits)}" if entry.fits else ""
        lines.append(f"| `{entry.flag}{values}` | {verdicts[entry.verdict]}{fits}: {entry.text} |")
    return "\n".join(lines) + "\n"
