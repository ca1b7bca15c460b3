"""Compare a sharded model with one process that runs each document alone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.loss import cross_entropy_sum
from parallel.comparison import LossTerm, Report, compare_losses
from parallel.transformers.batch import IGNORED, Batch
from parallel.transformers.router import RouterLoss, RouterTerm, real_tokens
from runtime.errors import UserError


def compare(
    model: nn.Module,
    batch: Batch,
    group: dist.ProcessGroup | None,
    paused: Callable[[], AbstractContextManager[None]],
    router: RouterLoss,
) -> Report:
    """Compute the report of ``Sharded.check``.

    Args:
        paused: a context in which the model uses the attention that it had before ``shard``.
        router: the model's router's loss, which is a part of the compared loss if it is enabled.
    """
    count = (batch.whole.tokens["labels"] != IGNORED).sum()
    if not count:
        raise UserError(
            "the batch has no labels, so there is no loss to compare; give labels to cp.batch"
        )

    def loss_of(inputs: dict[str, Any], labels: Tensor, router_term: RouterTerm) -> LossTerm:
        def loss(model: nn.Module) -> Tensor:
            output = model(**inputs)
            loss_sum, _ = cross_entropy_sum(output.logits, labels)
            return loss_sum / count + router_term(model, output)

        return loss

    def one_process() -> list[LossTerm]:
        documents = list(_documents(batch))
        router_term = RouterTerm(router, [inputs for inputs, _ in documents])
        return [loss_of(inputs, labels, router_term) for inputs, labels in documents]

    local_tokens = real_tokens(batch.context)
    local_router_term = RouterTerm(router, [batch.inputs], local_tokens, group)
    return compare_losses(
        model,
        group,
        paused,
        sharded=[loss_of(batch.inputs, batch.labels, local_router_term)],
        one_process=one_process(),
        exact=one_process(),
    )


def _documents(batch: Batch) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the inputs and labels of each document separately."""
    for start, end in pairwise(batch.whole.cu_seqlens):
        inputs: dict[str, Any] = {
            name: x[:, start:end] for name, x in batch.whole.tokens.items()
        }  # [1, length]
        labels = inputs.pop("labels")

        # Leave out position ids if possible, so that the model's own are the reference for
        # Longmesh's.
        positions = inputs["position_ids"][0] - batch.whole.first_position
        if torch.equal(positions, torch.arange(end - start, device=positions.device)):
            del inputs["position_ids"]
        yield {**inputs, "use_cache": False}, labels
