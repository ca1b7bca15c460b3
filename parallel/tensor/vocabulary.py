"""Cross entropy of logits sharded over the vocabulary, which are never gathered.

Shapes: N tokens, C width of the residual stream, V vocabulary entries, W of them on this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.chunks import over_chunks
from kernels.loss import cross_entropy_sum as whole_cross_entropy_sum
from kernels.loss import row_chunks, softmax_rows


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """As ``kernels.loss.cross_entropy_sum``, also for a DTensor of logits [..., V] sharded over V; collective then.

    All ranks of the logits' mesh hold the same labels and get the same loss.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(logits, DTensor):
        return whole_cross_entropy_sum(logits, labels, ignore_index)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)} must agree in all but V")
    from parallel.tensor.styles import first_entry

    first = first_entry(logits, -1)
    group = logits.device_mesh.get_group()
    loss = _SplitCrossEntropySum.apply(logits.to_local().flatten(0, -2), labels.flatten(), ignore_index, first, group)
    return loss, (labels != ignore_index).sum()


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, ignore_index: int = -100
) -> Tensor:
    """Compute the loss of ``cross_entropy_sum`` from hidden states, with the logits of ``chunk_size`` tokens at a time.

    Takes hidden [..., C], output weights [V, C] and labels [...]. If the weights are a DTensor sharded over V, hidden
    is a replicated DTensor; the call is then collective, and each rank computes the logits of its own W entries only.
    """
    from torch.distributed.tensor import DTensor, Partial

    labels = labels.flatten()
    of_logits: Callable[[Tensor, Tensor], Tensor]
    if isinstance(weight, DTensor):
        assert isinstance(hidden, DTensor)
        from parallel.tensor.styles import first_entry

        split = first_entry(weight), weight.device_mesh.get_group()
        of_logits = lambda logits, labels: _SplitCrossEntropySum.apply(logits, labels, ignore_index, *split)  # noqa: E731
        # Each rank's entries give a partial gradient of the hidden states.
        hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
    else:
        of_logits = lambda logits, labels: whole_cross_entropy_sum(logits, labels, ignore_index)[0]  # noqa: E731

    def loss(part: Tensor, rows: slice) -> Tensor:
        return of_logits(F.linear(part, weight), labels[rows])

    return over_chunks(loss, hidden.flatten(0, -2), chunk_size, (weight,), summed=True)


class _SplitCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, first: int, group: dist.ProcessGroup
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        valid = labels != ignore_index  # [N]
        here = valid & (labels >= first) & (labels < first + logits.shape[1])
        column = (labels - first).where(here, 0)
        lse = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        for rows in row_chunks(logits):
            torch.logsumexp(logits[rows].to(dtype), dim=-1, out=lse[rows])  # of these W entries
        chosen = logits.gather(-1, column[:, None])[:, 0].to(dtype).where(here, 0)
        largest = lse.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums = torch.stack(((lse - largest).exp(), chosen))  # [2, N]: one message for both
        dist.all_reduce(sums, group=group)
        lse = largest + sums[0].log()
        ctx.save_for_backward(logits, column, here, valid, lse)
        return (lse - sums[1]).where(valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, here, valid, lse = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in row_chunks(logits):
            chunk = softmax_rows(logits, lse, rows, grad)
            chunk.scatter_add_(-1, column[rows, None], -here[rows, None].to(chunk.dtype))
            chunk.mul_(grad_loss).masked_fill_(~valid[rows, None], 0)
            if chunk.dtype != grad.dtype:
                grad[rows] = chunk
        return grad, None, None, None, None
