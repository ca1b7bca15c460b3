"""Cross entropy of logits that are sharded over the vocabulary and never gathered.

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
    """Compute ``kernels.loss.cross_entropy_sum``, also for logits sharded over V.

    Takes logits [..., V], a plain tensor or a DTensor; for a DTensor the call is collective.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(logits, DTensor):
        return loss.cross_entropy_sum(logits, labels, ignore_index)
    return loss.cross_entropy_sum(logits.to_local(), labels, ignore_index, _split(logits, -1))


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, ignore_index: int = -100
) -> Tensor:
    """Compute ``cross_entropy_sum`` from hidden states, in chunks of ``chunk_size`` tokens.

    Takes hidden [..., C], output weights [V, C] and labels [...]. If the weights are a DTensor
    sharded over V, hidden is a replicated DTensor; the call is then collective, and each rank
    computes the logits of its own entries only.
    """
    from torch.distributed.tensor import DTensor, Partial

    labels = labels.flatten()
    split = None
    if isinstance(weight, DTensor):
        assert isinstance(hidden, DTensor)
        split = _split(weight, 0)
        # Each rank's entries give a partial gradient of the hidden states.
        hidden = hidden.to_local(grad_placements=[Partial()])
        weight = weight.to_local()

    def chunk_loss(chunk: Tensor, tokens: slice) -> Tensor:
        logits = linear(chunk, weight)
        return loss.cross_entropy_sum(logits, labels[tokens], ignore_index, split)[0]

    return sum_over_chunks(chunk_loss, hidden.flatten(0, -2), chunk_size, (weight,))


def _split(x: Any, dim: int) -> loss.Split:
    from parallel.tensor.styles import first_entry

    return first_entry(x, dim), x.device_mesh.get_group()
