"""Cross entropy of logits sharded over the vocabulary, which are never gathered.

Shapes: C width of the residual stream, V vocabulary entries.
"""

from typing import Any

from torch import Tensor

from kernels import loss
from kernels.loss import sum_over_chunks
from kernels.operators import linear


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """As ``kernels.loss.cross_entropy_sum``, also for a DTensor of logits [..., V] sharded over V;
    collective then.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(logits, DTensor):
        return loss.cross_entropy_sum(logits, labels, ignore_index)
    return loss.cross_entropy_sum(logits.to_local(), labels, ignore_index, _split(logits, -1))


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, ignore_index: int = -100
) -> Tensor:
    """Compute the loss of ``cross_entropy_sum`` from hidden states, with the logits of
    ``chunk_size`` tokens at a time.

    Takes hidden [..., C], output weights [V, C] and labels [...]. If the weights are a DTensor
    sharded over V, hidden is a replicated DTensor; the call is then collective, and each rank
    computes the logits of its own entries only.
    """
    from torch.distributed.tensor import DTensor, Partial

    labels, split = labels.flatten(), None
    if isinstance(weight, DTensor):
        assert isinstance(hidden, DTensor)
        split = _split(weight, 0)
        # Each rank's entries give a partial gradient of the hidden states.
        hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()

    def of_chunk(part: Tensor, rows: slice) -> Tensor:
        return loss.cross_entropy_sum(linear(part, weight), labels[rows], ignore_index, split)[0]

    return sum_over_chunks(of_chunk, hidden.flatten(0, -2), chunk_size, (weight,))


def _split(x: Any, dim: int) -> loss.Split:
    from parallel.tensor.styles import first_entry

    return first_entry(x, dim), x.device_mesh.get_group()
