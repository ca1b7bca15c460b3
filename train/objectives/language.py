"""Next-token prediction, as the training loop sees it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, Batch
from data.text.megatron import DataConfig, blend
from data.text.prepare import unigram_entropy
from kernels.linear_attention import linear_attention
from kernels.linear_attention import select_backend as select_linear_backend
from model.attention import Attend, Attends, LinearAttend, sdpa
from parallel.context import ContextConfig, ContextParallel, context_parallel
from parallel.context.relayout import attend_inside
from parallel.mesh import Mesh
from parallel.pipeline.runner import Runner
from parallel.tensor.vocabulary import chunked_cross_entropy_sum, cross_entropy_sum
from train.assemble import runner_of, softmax_context
from train.config.language import Config
from train.objectives.base import Objective


class NextToken(Objective):
    """Shards a batch over the context-parallel ranks and sums the loss of this rank's tokens."""

    loss_name = "lm_loss"
    unit = "tokens"

    def __init__(self, cp: ContextParallel, device: torch.device, loss_chunk_size: int = 0) -> None:
        """loss_chunk_size: tokens whose logits exist at once; 0 is all."""
        self._cp = cp
        self._loss_chunk_size = loss_chunk_size
        self._device = device
        # Padding takes the last position: those beyond the sequence may have no entry in a table of learned positions.
        self._positions = cp.positions.clamp(max=cp.plan.seq_len - 1).to(device)  # [T]

    @property
    def local_length(self) -> int:
        """Tokens of a sequence that this rank takes, padding included."""
        return len(self._positions)

    def local(self, batch: Batch) -> Batch:
        """This rank's tokens and labels ``[B, T]`` of whole sequences ``[B, S]``; padding carries no loss."""
        tokens, labels = (batch[name].to(self._device, non_blocking=True) for name in ("tokens", "labels"))
        return {
            "tokens": self._cp.shard(tokens, dim=1),
            "labels": self._cp.shard(labels, dim=1, pad_value=IGNORE_INDEX),
        }

    def count(self, local: Batch) -> int:
        """Tokens that carry loss."""
        return int((local["labels"] != IGNORE_INDEX).sum())

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Sum of the losses of this rank's tokens, float32; hidden states, where the model is a part without the end.

        A part without the beginning finds hidden states in the place of the tokens.
        """
        labels, size = local["labels"], self._loss_chunk_size

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            if size:
                return chunked_cross_entropy_sum(hidden, weight, labels, size, IGNORE_INDEX)
            return cross_entropy_sum(F.linear(hidden, weight), labels, IGNORE_INDEX)[0]

        return model(local["tokens"], self._positions, head)

    def validation_line(self, record: dict[str, Any]) -> str:
        """One line on a validation, beside the loss that knowing the tokens' frequencies alone would give."""
        line = super().validation_line(record) + f" | perplexity: {math.exp(min(record['validation_loss'], 99)):.2f}"
        if "unigram_entropy" in record:
            line += f" | unigram entropy of the corpus: {record['unigram_entropy']:.4f}"
        return line


def build_runner(config: Config, mesh: Mesh, parts: Sequence[nn.Module], objective: NextToken) -> Runner:
    """What takes a step's micro-batches through this rank's parts of the model."""
    tokens = torch.empty((config.train.micro_batch_size, objective.local_length), dtype=torch.int64, device="meta")
    ends = 0, config.pipeline.stages(mesh.pp.size()) - 1
    tied = {} if config.model.untie_embeddings_and_output_weights else {"embedding.weight": ends}
    return runner_of(config, mesh, parts, objective, ("tokens", tokens), tied)


def corpus_entropy(data: DataConfig) -> dict[str, float]:
    """The loss (nats per token) of knowing the tokens' frequencies alone, to print beside a validation loss.

    Nothing for a blend, whose frequencies depend on its weights.
    """
    prefixes, _ = blend(data.data_path)
    return {"unigram_entropy": unigram_entropy(prefixes[0])} if len(prefixes) == 1 else {}


def context_of(
    config: Config, group: dist.ProcessGroup | None
) -> tuple[ContextParallel, Attend | LinearAttend | Attends]:
    """The context-parallel dimension that the configuration names, and the attention that the model calls."""
    if config.model.softmax_every is not None:
        return _hybrid_context_of(config, group)
    if config.model.linear_attention:
        return _linear_context_of(config, group, config.mesh.tensor_model_parallel_size)
    return softmax_context(config, group, sdpa)


def _hybrid_context_of(config: Config, group: dist.ProcessGroup | None) -> tuple[ContextParallel, Attends]:
    """Of a hybrid: tokens lie as linear attention needs them, and softmax attention may have its own layout."""
    if config.mesh.context_parallel_size == 1:
        context = ContextConfig(context_parallel_method="none")
        inside, softmax = softmax_context(replace(config, context=context), group, sdpa)
        outside, linear = _linear_context_of(config, group, inside.plan.local_len)
        return outside, Attends(linear, softmax)
    (layout,) = config.hybrid.layouts  # planner.complete has left one
    context = config.hybrid.context(layout)
    if config.context.attention_backend == "reference":
        context = replace(context, attention_backend="reference")
    inside, _ = softmax_context(replace(config, context=context), group, sdpa)
    # Padded to the same length, so that tokens can change their layout.
    outside, linear = _linear_context_of(config, group, inside.plan.local_len)
    return outside, Attends(linear, attend_inside(inside, outside))


def _linear_context_of(
    config: Config, group: dist.ProcessGroup | None, multiple: int
) -> tuple[ContextParallel, LinearAttend]:
    """Of a model with linear attention: the method's, or of a process that holds whole sequences."""
    dtype = torch.bfloat16 if config.train.bf16 else torch.float32
    backend = select_linear_backend(config.context.attention_backend, config.mesh.device_type, dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float]) -> Tensor:
        return linear_attention(q, k, v, log_decay, backend=backend)[0]

    seq_length = config.train.seq_length
    if config.mesh.context_parallel_size == 1:
        return context_parallel("ring", seq_len=seq_length, multiple=multiple), attend
    timeout = timedelta(minutes=config.mesh.distributed_timeout_minutes)
    method = config.context.context_parallel_method
    cp = context_parallel(method, seq_len=seq_length, group=group, multiple=multiple, backend=backend, timeout=timeout)
    return cp, cp.attend_linear
