"""Next-token prediction, as the training loop sees it."""

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

    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Tokens ``[B, T]``."""
        return "tokens", torch.empty((micro_batch_size, self.local_length), dtype=torch.int64, device="meta")

    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """The embedding, where it is the output projection too: of the first stage and the last."""
        assert isinstance(part, LanguageModel)
        return {} if part.config.untie_embeddings_and_output_weights else {"embedding.weight": (0, stages - 1)}

    def validation_line(self, record: dict[str, Any]) -> str:
        """One line on a validation, beside the loss that knowing the tokens' frequencies alone would give."""
        line = super().validation_line(record) + f" | perplexity: {math.exp(min(record['validation_loss'], 99)):.2f}"
        if "unigram_entropy" in record:
            line += f" | unigram entropy of the corpus: {record['unigram_entropy']:.4f}"
        return line


def corpus_entropy(data: DataConfig) -> dict[str, float]:
    """The loss (nats per token) of knowing the tokens' frequencies alone, to print beside a validation loss.

    Nothing for a blend, whose frequencies depend on its weights.
    """
    prefixes, _ = blend(data.data_path)
    return {"unigram_entropy": unigram_entropy(prefixes[0])} if len(prefixes) == 1 else {}
