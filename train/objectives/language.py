"""Next-token prediction, the objective of language models. B samples of S tokens, T tokens of this
rank.
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
"""Values of padding, by what a rank holds of a batch."""


class NextToken(Objective):
    """Shard a batch over the context-parallel ranks and sum the loss of this rank's tokens."""

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
        """Set up for ``cp``, made for sequences of S tokens or, with ``reset_attention_mask``, of B
        * S.

        Args:
            loss_chunk_size: tokens whose logits exist at once; 0 for all.
            reset_position_ids: positions count from 0 in each document.
            reset_attention_mask: tokens attend inside their document alone.
            prepare: called with ``cp`` under the documents of each micro-batch, to make ahead what
                layers will need.
        """
        self._cp, self._length = cp, cp.plan.seq_len
        self._loss_chunk_size = loss_chunk_size
        self._device = device
        self._reset_positions, self._reset_attention = reset_position_ids, reset_attention_mask
        self._prepare = prepare
        self.wrong: Tensor | None = None
        """Tokens of each example, int64 [N], that were not the likeliest: counted in batches with
        ``examples``.
        """
        # Padding takes the last position: a table of learned positions may have none beyond the
        # sequence.
        self._positions = cp.positions.clamp(max=cp.plan.seq_len - 1).to(device)  # [T]

    def blank(self, micro_batch_size: int) -> Batch:
        """Return a micro-batch as the data's, of zeros; each sample is one document."""
        length = self._cp.plan.seq_len // (micro_batch_size if self._reset_attention else 1)
        tokens = torch.zeros(micro_batch_size, length, dtype=torch.int64)
        starts = torch.zeros(micro_batch_size, length, dtype=torch.bool)
        starts[:, 0] = True
        return {"tokens": tokens, "labels": tokens, "starts": starts}

    def local(self, batch: Batch) -> Batch:
        """Return this rank's tokens and labels ``[B, T]`` of sequences ``[B, S]``; padding carries
        no loss.

        Where documents are told apart, there are ``positions`` [B, T] too. Where tokens attend
        inside them alone, the samples are joined, in order, into one sequence whose attention needs
        no rows: tokens, labels and positions are ``[1, T]``, and ``plan`` is the number of its plan
        in ``PLANS``, int64 [1] on the CPU, which keeps it alive.
        """
        cp, plan = self._cp, {}
        if self._reset_positions or self._reset_attention:
            starts = batch["starts"]
            apart = self._reset_positions
            positions = (
                positions_in_documents(starts)
                if apart
                else torch.arange(starts.shape[1]).expand(starts.shape)
            )
            batch = batch | {"positions": positions}
        if self._reset_attention:
            batch = {name: rows.reshape(1, -1) for name, rows in batch.items()}  # [1, B * S]
            cp = cp.under(
                documents=cumulative_lengths(batch["starts"][0]), window=cp.plan.mask.window
            )
            self._prepare(cp)
            plan = {"plan": PLANS.tensor(cp.plan, shape=(1,))}
        names = [name for name in PADDING if name in batch]
        own = {name: cp.shard(batch[name], dim=1, pad_value=PADDING[name]) for name in names}
        count = (own["labels"] != IGNORE_INDEX).sum()[None]
        return (
            {name: to_device(x, self._device) for name, x in own.items()} | plan | {"count": count}
        )

    def lengths(self, local: Batch) -> list[int]:
        """Return the lengths of documents where they attend apart, else of sequences."""
        if "plan" not in local:
            return [self._length] * len(local["tokens"])
        plan = PLANS[local["plan"]]
        return [end - start for start, end in pairwise(plan.documents or (0, plan.seq_len))]

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of this rank's token losses, float32.

        A stage other than the last returns hidden states; one other than the first takes them in
        place of tokens. Of a batch with ``examples``, the number of each token's, it is how many
        tokens with labels are not the likeliest.
        """
        labels, size = local["labels"], self._loss_chunk_size

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            if "examples" in local:
                assert self.wrong is not None
                return count_wrong(hidden, weight, labels, local["examples"], self.wrong)
            if size:
                return chunked_cross_entropy_sum(hidden, weight, labels, size, IGNORE_INDEX)
            return cross_entropy_sum(linear(hidden, weight), labels, IGNORE_INDEX)[0]

        mask = {"mask": PlanHandle(local["plan"])} if "plan" in local else {}
        return model(local["tokens"], local.get("positions", self._positions), head, **mask)

    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the name and a meta tensor of tokens ``[B, T]``, or ``[1, T]`` of joined samples."""
        sequences = 1 if self._reset_attention else micro_batch_size
        return "tokens", torch.empty(
            (sequences, len(self._positions)), dtype=torch.int64, device="meta"
        )

    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Tie the embedding of the first stage and the last if it is also the output projection."""
        assert isinstance(part, Decoder)
        apart = (
            part.config.untie_embeddings_and_output_weights or part.config.lora_rank is not None
        )  # frozen copies
        return {} if apart else {"embedding.weight": (0, stages - 1)}

    def validation_line(self, record: dict[str, Any]) -> str:
        """Describe a validation in one line, with the corpus's unigram entropy if known."""
        line = (
            super().validation_line(record)
            + f" | perplexity: {math.exp(min(record['validation_loss'], 99)):.2f}"
        )
        if "unigram_entropy" in record:
            line += f" | unigram entropy of the corpus: {record['unigram_entropy']:.4f}"
        return line


def count_wrong(
    hidden: Tensor, weight: Tensor, labels: Tensor, examples: Tensor, wrong: Tensor
) -> Tensor:
    """Add to ``wrong`` [N] how many of each example's labels are not the likeliest tokens; return
    their sum, float32.

    Takes hidden [B, T, C] and the output weights [V, C], as ``chunked_cross_entropy_sum``: DTensors
    of the tensor parallel ranks are collective. Logits exist for the labelled tokens alone, which
    are few.
    """
    there = labels != IGNORE_INDEX
    whole: Any = hidden
    if hasattr(weight, "full_tensor"):
        from torch.distributed.tensor import DTensor, Replicate

        picked = whole.to_local()[there]  # [n, C]
        logits: Any = linear(
            DTensor.from_local(picked, whole.device_mesh, [Replicate()], run_check=False), weight
        )
        likeliest = logits.full_tensor().argmax(-1)
    else:
        likeliest = linear(whole[there], weight).argmax(-1)
    misses = (likeliest != labels[there]).to(wrong.dtype)  # [n]
    wrong.index_add_(0, examples[there], misses)
    return misses.sum().float()


def corpus_entropy(data: DataConfig) -> dict[str, float]:
    """Return the unigram entropy of the corpus (nats per token), to print beside a validation loss.

    Returns nothing for a blend, whose token frequencies depend on its weights, for conversations,
    of which not all is predicted, and for mock_data.
    """
    if data.mock_data:
        return {}
    prefixes, _ = blend(data.data_path)
    return (
        {"unigram_entropy": entropy(token_counts(prefixes[0]))}
        if len(prefixes) == 1 and not data.sft
        else {}
    )
