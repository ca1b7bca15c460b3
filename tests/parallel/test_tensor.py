"""A model split over ranks is the whole model: its weights, loss, gradients, their norm and its checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallel.data import reduce_gradients
from parallel.mesh import joined
from parallel.vocabulary import cross_entropy_sum
from tests.parallel.split import (
    Step,
    build,
    config,
    data,
    difference,
    full,
    mesh_config,
    own_batch,
    split_step,
    train_and_save,
    whole_step,
)
from tests.parallel.tiny import equal
from tests.ranks import run_ranks
from train.optim import gradient_norm

LOSS, GRADIENT = 2e-6, 1e-7
"""Bounds of the differences from one process."""
# [ranks, tp, cp]; the rest is data parallel. Both key-value heads fit on tp 2; on tp 4 two ranks share each.
MESHES = {"tp2": (2, 2, 1), "tp2 cp2": (4, 2, 2), "tp2 dp2": (4, 2, 1), "tp4": (4, 4, 1)}


def steps(rank: int, world_size: int, tp: int, cp: int) -> list[tuple[Step, float]]:
    """A step and its gradient norm, of untied and of tied embeddings."""
    found = []
    with joined(mesh_config(tp, cp)) as mesh:
        for tied in (False, True):
            model, step = split_step(mesh, config(tied))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            found.append((step, gradient_norm(model.parameters())))
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_one_step_is_that_of_one_process(mesh: str) -> None:
    ranks, tp, cp = MESHES[mesh]
    results = run_ranks(steps, ranks, tp, cp)
    for index, tied in enumerate((False, True)):
        want = whole_step(config(tied))
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in want.gradients.values()))
        for step, found in (result[index] for result in results):
            assert abs(step.loss - want.loss) < LOSS
            assert difference(step, want) < GRADIENT
            assert found == pytest.approx(norm, rel=1e-6)
            assert step.weights.keys() == want.weights.keys()
            for name in want.weights:
                assert torch.equal(step.weights[name], want.weights[name]), name


def without_the_sum(rank: int, world_size: int) -> Step:
    """Gradients of what is replicated over tp are left as each rank's part."""
    redistribute = DTensor.redistribute

    def keep_parts(self: DTensor, *args: Any, placements: Any, **kwargs: Any) -> DTensor:
        if self.placements == (Partial(),) and tuple(placements) == (Replicate(),):
            return DTensor.from_local(self.to_local(), self.device_mesh, placements, run_check=False)
        return redistribute(self, *args, placements=placements, **kwargs)

    DTensor.redistribute = keep_parts  # type: ignore[method-assign, assignment]
    with joined(mesh_config(tp=2)) as mesh:
        return split_step(mesh, config())[1]


def with_a_local_mean(rank: int, world_size: int) -> Step:
    with joined(mesh_config(tp=2)) as mesh:
        return split_step(mesh, config(), local_mean=True)[1]


@pytest.mark.parametrize(("wrong", "ranks"), [(without_the_sum, 2), (with_a_local_mean, 4)])
def test_a_gradient_not_summed_over_tp_or_a_local_mean_would_be_seen(wrong, ranks: int) -> None:
    assert difference(run_ranks(wrong, ranks)[0], whole_step(config())) > 1000 * GRADIENT


def accumulated(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Two micro-batches, the first of which is only added up."""
    with joined(mesh_config(tp=2)) as mesh:
        model, cp = build(mesh, config())
        valid = (data()[1] != -100).sum()
        tokens, labels = own_batch(mesh, cp)
        for index in range(2):
            reduce_gradients(model, index == 1)
            rows = slice(2 * index, 2 * index + 2)
            (cross_entropy_sum(model(tokens[rows], cp.positions), labels[rows])[0] / valid).backward()
        return {name: full(p.grad) for name, p in model.named_parameters()}


def test_micro_batches_accumulate() -> None:
    want = whole_step(config())
    for got in run_ranks(accumulated, 2):
        assert difference(Step(0.0, {}, got), want) < GRADIENT


def test_a_checkpoint_goes_from_one_mesh_to_another_bit_for_bit(tmp_path: Path) -> None:
    """From tp 2 x dp 2, where both shard one dimension, over tp 1 x cp 2 to tp 4, moments and all."""
    folders = [tmp_path / name for name in "abc"]
    first = run_ranks(train_and_save, 4, folders[0], 2, 1, None)[0]
    assert first["embedding.weight"].shape[0] == 37, "no padding is in it"
    second = run_ranks(train_and_save, 2, folders[1], 1, 2, folders[0] / "iter_0000001")[0]
    third = run_ranks(train_and_save, 4, folders[2], 4, 1, folders[1] / "iter_0000001")
    assert equal(first, second)
    assert all(equal(first, result) for result in third)
    assert not torch.equal(first["norm.weight/exp_avg"], torch.zeros_like(first["norm.weight/exp_avg"]))
