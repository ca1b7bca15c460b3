"""Next-token prediction, the objective of language models."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, Batch
from data.text.megatron import DataConfig, blend
from data.text.prepare import unigram_entropy
from model.base import LanguageModel
from parallel.context import ContextParallel
from parallel.tensor.vocabulary import chunked_cross_entropy_sum, cross_entropy_sum
from train.objectives.base import Objective


class NextToken(Objective):
    """Shard a batch over the context-parallel ranks and sum the loss of this rank's tokens."""

    loss_name = "lm_loss"
    unit = "tokens"

    def __init__(self, cp: ContextParallel, device: torch.device, loss_chunk_size: int = 0) -> None:
        """loss_chunk_size: tokens whose logits exist at once; 0 for all."""
        self._cp = cp
        self._loss_chunk_size = loss_chunk_size
        self._device = device
        # Padding takes the last position: a table of learned positions may have none beyond the sequence.
        self._positions = cp.positions.clamp(max=cp.plan.seq_len - 1).to(device)  # [T]

    @property
    def local_length(self) -> int:
        """Return this rank's tokens per sequence, padding included."""
        return len(self._positions)

    def local(self, batch: Batch) -> Batch:
        """Return this rank's tokens and labels ``[B, T]`` of sequences ``[B, S]``; padding carries no loss."""
        tokens, labels = (batch[name].to(self._device, non_blocking=True) for name in ("tokens", "labels"))
        return {
            "tokens": self._cp.shard(tokens, dim=1),
            "labels": self._cp.shard(labels, dim=1, pad_value=IGNORE_INDEX),
        }

    def count(self, local: Batch) -> int:
        """Count the tokens that carry loss."""
        return int((local["labels"] != IGNORE_INDEX).sum())

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of this rank's token losses, float32.

        A stage other than the last returns hidden states; one other than the first takes them in place of tokens.
        """
        labels, size = local["labels"], self._loss_chunk_size

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            if size:
                return chunked_cross_entropy_sum(hidden, weight, labels, size, IGNORE_INDEX)
            return cross_entropy_sum(F.linear(hidden, weight), labels, IGNORE_INDEX)[0]

        return model(local["tokens"], self._positions, head)

    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the name and a meta tensor of tokens ``[B, T]``."""
        return "tokens", torch.empty((micro_batch_size, self.local_length), dtype=torch.int64, device="meta")

    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Tie the embedding of the first stage and the last if it is also the output projection."""
        assert isinstance(part, LanguageModel)
        return {} if part.config.untie_embeddings_and_output_weights else {"embedding.weight": (0, stages - 1)}

    def validation_line(self, record: dict[str, Any]) -> str:
        """Describe a validation in one line, with the corpus's unigram entropy if known."""
        line = super().validation_line(record) + f" | perplexity: {math.exp(min(record['validation_loss'], 99)):.2f}"
        if "unigram_entropy" in record:
            line += f" | unigram entropy of the corpus: {record['unigram_entropy']:.4f}"
        return line


def corpus_entropy(data: DataConfig) -> dict[str, float]:
    """Return the unigram entropy of the corpus (nats per token), to print beside a validation loss.

    Returns nothing for a blend, whose token frequencies depend on its weights.
    """
    prefixes, _ = blend(data.data_path)
    return {"unigram_entropy": unigram_entropy(prefixes[0])} if len(prefixes) == 1 else {}
