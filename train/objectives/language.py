"""Next-token prediction, the objective of language models.

Shapes: B samples of S tokens, T tokens of this context-parallel rank, C hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, Batch
from data.text.blend import cumulative_lengths, positions_in_documents
from data.text.config import DataConfig, blend
from data.text.indexed import entropy, token_counts
from kernels.operators import linear
from model.decoder import Decoder
from parallel.context import ContextParallel
from parallel.context.plan import PLANS, PlanHandle
from parallel.tensor.vocabulary import chunked_cross_entropy_sum, cross_entropy_sum
from runtime.tensors import to_device
from train.objectives import Objective

PADDING = {"tokens": 0, "labels": IGNORE_INDEX, "positions": 0, "examples": 0}
"""Value that pads each tensor of a batch, keyed by the tensor's name."""


class NextToken(Objective):
    """Shards a batch over the context-parallel ranks and sums the loss of this rank's tokens.

    If tokens attend only inside their document, the samples of a micro-batch are joined into one
    sequence ``[1, B * S]``: a sample's end is then one more document boundary, and the attention's
    plan covers the whole micro-batch.
    """

    loss_name = "lm_loss"
    unit = "tokens"

    def __init__(
        self,
        cp: ContextParallel,
        device: torch.device,
        loss_chunk_size: int = 0,
        *,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        prepare: Callable[[ContextParallel], None] = lambda cp: None,
    ) -> None:
        """Set up; ``cp`` shards sequences of S tokens, or B * S with ``reset_attention_mask``.

        Args:
            loss_chunk_size: number of tokens whose logits exist at once; 0 means all.
            reset_position_ids: positions count from 0 in each document.
            reset_attention_mask: tokens attend only inside their document.
            prepare: function called for each micro-batch, with ``cp`` for the micro-batch's
                documents, to precompute the layers' plans.
        """
        self._cp = cp
        self._length = cp.plan.seq_len
        self._loss_chunk_size = loss_chunk_size
        self._device = device
        self._reset_positions = reset_position_ids
        self._reset_attention = reset_attention_mask
        self._prepare = prepare
        self.wrong: Tensor | None = None
        """Number of wrong tokens per example, int64 [N]; batches with ``examples`` add to it."""
        # Padding takes the last position, since a table of learned positions may end with the
        # sequence.
        self._positions = cp.positions.clamp(max=cp.plan.seq_len - 1).to(device)  # [T]

    def blank(self, micro_batch_size: int) -> Batch:
        """Return a micro-batch of zeros in the data's format; each sample is one document."""
        length = self._cp.plan.seq_len // (micro_batch_size if self._reset_attention else 1)
        tokens = torch.zeros(micro_batch_size, length, dtype=torch.int64)
        starts = torch.zeros(micro_batch_size, length, dtype=torch.bool)
        starts[:, 0] = True
        return {"tokens": tokens, "labels": tokens, "starts": starts}

    def local(self, batch: Batch) -> Batch:
        """Return this rank's tokens and labels ``[B, T]`` of sequences ``[B, S]``.

        Padding has no loss. If documents have positions or attention of their own, the shard has
        ``positions`` [B, T] too. If tokens attend only inside their document, the joined samples
        are ``[1, T]``, and the shard has ``plan``, int64 [1] on the CPU: the number of the
        attention's plan in ``PLANS``, which lives as long as this tensor.
        """
        cp = self._cp
        if self._reset_positions or self._reset_attention:
            starts = batch["starts"]
            if self._reset_positions:
                positions = positions_in_documents(starts)
            else:
                positions = torch.arange(starts.shape[1]).expand(starts.shape)
            batch = batch | {"positions": positions}
        if self._reset_attention:
            batch = {name: values.reshape(1, -1) for name, values in batch.items()}  # [1, B * S]
            cu_seqlens = cumulative_lengths(batch["starts"][0])
            cp = cp.under(documents=cu_seqlens, window=cp.plan.mask.window)
            self._prepare(cp)

        local = {}
        for name, pad_value in PADDING.items():
            if name in batch:
                local[name] = cp.shard(batch[name], dim=1, pad_value=pad_value)  # [B, T]
        count = (local["labels"] != IGNORE_INDEX).sum()[None]
        local = {name: to_device(values, self._device) for name, values in local.items()}
        if self._reset_attention:
            local["plan"] = PLANS.tensor(cp.plan, shape=(1,))
        local["count"] = count
        return local

    def lengths(self, local: Batch) -> list[int]:
        """Return the lengths of documents if tokens attend only inside them, else of sequences."""
        if "plan" not in local:
            return [self._length] * len(local["tokens"])
        plan = PLANS[local["plan"]]
        return [end - start for start, end in pairwise(plan.cu_seqlens or (0, plan.seq_len))]

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of this rank's token losses, float32.

        Every pipeline stage but the last returns hidden states; every one but the first takes
        hidden states as ``tokens``. For a batch with ``examples`` (each token's example number) the
        result is the number of labels that are not the likeliest token.
        """
        labels = local["labels"]
        chunk_size = self._loss_chunk_size

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            if "examples" in local:
                assert self.wrong is not None
                return count_wrong(hidden, weight, labels, local["examples"], self.wrong)
            if chunk_size:
                return chunked_cross_entropy_sum(hidden, weight, labels, chunk_size, IGNORE_INDEX)
            return cross_entropy_sum(linear(hidden, weight), labels, IGNORE_INDEX)[0]

        mask = {"mask": PlanHandle(local["plan"])} if "plan" in local else {}
        return model(local["tokens"], local.get("positions", self._positions), head, **mask)

    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the key of tokens and a meta tensor, ``[B, T]`` or, if joined, ``[1, T]``."""
        num_sequences = 1 if self._reset_attention else micro_batch_size
        shape = (num_sequences, len(self._positions))
        return "tokens", torch.empty(shape, dtype=torch.int64, device="meta")

    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Tie the first and last stages' embeddings if they are also the output projection."""
        assert isinstance(part, Decoder)
        config = part.config
        # Under adapters the two copies are frozen, and stay equal without being tied.
        if config.untie_embeddings_and_output_weights or config.lora_rank is not None:
            return {}
        return {"embedding.weight": (0, stages - 1)}

    def validation_line(self, record: dict[str, Any]) -> str:
        """Describe a validation in one line, with the corpus's unigram entropy if known."""
        perplexity = math.exp(min(record["validation_loss"], 99))
        line = super().validation_line(record) + f" | perplexity: {perplexity:.2f}"
        if "unigram_entropy" in record:
            line += f" | unigram entropy of the corpus: {record['unigram_entropy']:.4f}"
        return line


def count_wrong(
    hidden: Tensor, weight: Tensor, labels: Tensor, examples: Tensor, wrong: Tensor
) -> Tensor:
    """Add each example's wrong tokens to ``wrong`` [N]; return their total, float32.

    A token with a label is wrong if another token is likelier. Logits are computed only for the few
    tokens with labels. With DTensors of tensor-parallel ranks the call is collective.

    Args:
        hidden: [B, T, C].
        weight: the output weights [V, C].
        labels: [B, T].
        examples: each token's example number, [B, T].
    """
    has_label = labels != IGNORE_INDEX
    hidden_states: Any = hidden
    if hasattr(weight, "full_tensor"):
        from torch.distributed.tensor import DTensor, Replicate

        labelled = hidden_states.to_local()[has_label]  # [n, C]
        replicated = DTensor.from_local(
            labelled, hidden_states.device_mesh, [Replicate()], run_check=False
        )
        logits: Any = linear(replicated, weight)
        likeliest = logits.full_tensor().argmax(-1)
    else:
        likeliest = linear(hidden_states[has_label], weight).argmax(-1)
    misses = (likeliest != labels[has_label]).to(wrong.dtype)  # [n]
    wrong.index_add_(0, examples[has_label], misses)
    return misses.sum().float()


def corpus_entropy(data: DataConfig) -> dict[str, float]:
    """Return the corpus's unigram entropy (nats per token), to print next to a validation loss.

    Empty for mock_data; for a blend, because its token frequencies depend on its weights; and for
    conversations, because only some of their tokens are predicted.
    """
    if data.mock_data:
        return {}
    prefixes, _ = blend(data.data_path)
    if len(prefixes) != 1 or data.sft:
        return {}
    return {"unigram_entropy": entropy(token_counts(prefixes[0]))}
