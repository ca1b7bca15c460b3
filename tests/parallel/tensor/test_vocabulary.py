"""Cross entropy of logits that no rank holds whole equals that of the whole logits."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kernels import loss as whole
from parallel.tensor.vocabulary import cross_entropy_sum
from runtime.ranks import run_ranks

TOKENS, VOCABULARY = (3, 11), 37


def inputs(dtype):
    """Return logits far from zero, largest on different ranks; labels have both ends and -100."""
    generator = torch.Generator().manual_seed(5)
    logits = 30 * torch.randn(*TOKENS, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, TOKENS, generator=generator)
    labels[0, :4] = torch.tensor([0, VOCABULARY - 1, -100, -100])
    return logits.to(dtype), labels


def split(rank, world_size, dtype, shift):
    """The loss, its tokens and the gradient in full; labels are wrong by ``shift``."""
    whole.LOSS_CHUNK["cpu"] = 4 * VOCABULARY  # several chunks of rows
    logits, labels = inputs(dtype)
    labels = labels.where(labels < 0, (labels + shift) % VOCABULARY)
    mesh = init_device_mesh("cpu", (world_size,))
    leaf = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    loss, count = cross_entropy_sum(leaf, labels)
    (loss / 7).backward()
    return loss.item(), int(count), leaf.grad.full_tensor()


def unsplit(dtype):
    logits, labels = inputs(dtype)
    logits.requires_grad_()
    loss, count = cross_entropy_sum(logits, labels)
    (loss / 7).backward()
    assert logits.grad is not None
    return loss.item(), int(count), logits.grad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_the_whole_logits(size, dtype):
    want_loss, want_count, want = unsplit(dtype)
    results = run_ranks(split, size, dtype, 0)
    assert len({loss for loss, _, _ in results}) == 1, "all ranks get the same bits"
    for loss, count, gradient in results:
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert count == want_count
        assert gradient.dtype == dtype
        torch.testing.assert_close(
            gradient, want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7
        )


def test_a_label_looked_up_beside_its_place_would_be_seen():
    want, got = unsplit(torch.float32), run_ranks(split, 2, torch.float32, 1)[0]
    assert abs(got[0] - want[0]) > 1
    assert (got[2] - want[2]).abs().max() > 0.1


def of_other_shape(rank, world_size):
    logits = distribute_tensor(
        torch.zeros(2, 3, 5), init_device_mesh("cpu", (world_size,)), [Shard(-1)]
    )
    with pytest.raises(ValueError, match="must agree in all dimensions but V") as caught:
        cross_entropy_sum(logits, torch.zeros(2, 4, dtype=torch.int64))
    return str(caught.value)


def test_labels_of_another_shape_are_refused():
    assert "labels has shape (2, 4), but logits has (2, 3) x V" in run_ranks(of_other_shape, 2)[0]
