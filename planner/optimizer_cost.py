"""Cost of an optimizer's step: its state, its work on whole matrices, and its temporary tensors.

An optimizer states what it stores and computes for a weight (train/optimizers/base.py), and
parallel/matrices.py divides whole matrices over the ranks of a pipeline stage. In each round every
rank gathers one matrix, computes, and sends each rank its slice; nothing overlaps. A round takes as
long as its largest matrix.

Ranks are assumed to hold equal slices. The few matrices that tensor parallelism copies (keys and
values with fewer heads than ranks) count as if it split them.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch

from model.registry import meta_model
from parallel.context.plan import Plan
from parallel.matrices import BUFFER, balanced_rounds, work_of
from planner.cluster import MICRO, Cluster
from planner.step_shape import Arrangement, OptimizerShape
from train.optimizers.base import MatrixCost, Weight
from train.optimizers.config import OptimizerConfig, trained_weights


class StageGroup(NamedTuple):
    """Ranks of a pipeline stage, and their slices of each matrix."""

    ranks: int
    """Number of ranks, dp x cp x tp."""
    slices: int
    """Number of different slices of a matrix; each is on ``ranks / slices`` ranks."""

    @property
    def gathered(self) -> float:
        """Share of a matrix that its owner receives: all slices but its own."""
        return 1 - 1 / self.slices

    @property
    def scattered(self) -> float:
        """Share of a matrix that its owner sends: each of the other ranks gets its slice."""
        return (self.ranks - 1) / self.slices


class MatrixRound(NamedTuple):
    """Matrices that are computed at the same time, at most one per rank."""

    costs: list[MatrixCost]

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest matrix."""
        return max(cost.num_bytes for cost in self.costs)

    def passes(self, share: float) -> int:
        """Return the number of collectives that move this share of every matrix."""
        return ceil(
            share * max(cost.num_bytes / cost.dtype.itemsize for cost in self.costs) / BUFFER
        )


@lru_cache(maxsize=64)
def optimizer_shape(config: OptimizerConfig, model: Any, stage_layers: int) -> OptimizerShape:
    """Return what an optimizer stores and computes for a model.

    Args:
        model: the model's configuration.
        stage_layers: number of layers of the largest pipeline stage; the first ones stand for it.
    """
    spec = config.spec
    piece = spec.step_piece(config)
    if not spec.whole_matrices and not piece.elements:
        state_bytes = spec.state_bytes(config)
        return OptimizerShape(state_bytes=state_bytes, outside_state_bytes=state_bytes)

    in_layers: list[Weight] = []
    outside: list[Weight] = []
    matrices = []
    largest = 0
    for weight in trained_weights(meta_model(model)):
        path = weight.name.split(".")
        is_layer = path[0] == "layers"
        if is_layer:
            in_layers.append(weight)
        else:
            outside.append(weight)
        if not spec.takes_whole(config, weight):
            largest = max(largest, weight.parameter.numel())
        elif not is_layer or int(path[1]) < stage_layers:
            rows, columns = weight.parameter.shape
            matrices.append(spec.matrix_cost(config, (rows, columns)))

    weights = in_layers + outside
    return OptimizerShape(
        state_bytes=_average_state_bytes(config, in_layers or weights),
        outside_state_bytes=_average_state_bytes(config, outside or weights),
        matrices=tuple(matrices),
        piece=piece,
        largest=largest,
    )


def _average_state_bytes(config: OptimizerConfig, weights: Sequence[Weight]) -> float:
    """Return the bytes of state per parameter of these weights."""
    num_bytes = 0.0
    elements = 0
    for weight in weights:
        count = weight.parameter.numel()
        num_bytes += config.spec.state_bytes(config, weight) * count
        elements += count
    return num_bytes / max(1, elements)


def stage_group(plan: Plan, arrangement: Arrangement) -> StageGroup:
    """Return the ranks of a pipeline stage, with the attention's ``plan`` over cp."""
    tp = arrangement.tp
    return StageGroup(arrangement.dp * plan.size * tp, arrangement.num_shards(plan) * tp)


@lru_cache(maxsize=4096)
def whole_matrix_seconds(
    matrices: tuple[MatrixCost, ...], group: StageGroup, cluster: Cluster
) -> float:
    """Predict the time of a step's work on whole matrices: to gather, compute and scatter them."""
    seconds = 0.0
    for turn in _rounds(matrices, group):
        times = []
        for cost in turn.costs:
            rate = cluster.products_flops_per_s
            if cost.dtype == torch.float32:
                rate = cluster.float32_flops_per_s
            times.append(cost.flops / rate)
        seconds += max(times)
        for share in (group.gathered, group.scattered):
            latency = turn.passes(share) * _latency(group, cluster)
            seconds += latency + share * turn.num_bytes * _seconds_per_byte(group, cluster)
    return seconds


@lru_cache(maxsize=4096)
def _whole_matrix_bytes(matrices: tuple[MatrixCost, ...], group: StageGroup) -> float:
    """Return the bytes of one whole matrix and of what a round adds to it, at the peak."""
    peak = 0.0
    for turn in _rounds(matrices, group):
        # Beside the matrix or the result: a buffer of what is sent, and one of what is received.
        for share in (group.gathered, group.scattered):
            buffer = share * turn.num_bytes / max(1, turn.passes(share))
            peak = max(peak, turn.num_bytes + 2 * buffer)
        for cost in turn.costs:
            peak = max(peak, cost.num_bytes + cost.temporary_bytes)
    return peak


def temporary_bytes(optimizer: OptimizerShape, group: StageGroup) -> float:
    """Return the bytes on the device of the step's temporary tensors and buffers."""
    elements = min(optimizer.piece.elements, optimizer.largest / group.slices)
    pieces = elements * optimizer.piece.bytes
    return max(pieces, _whole_matrix_bytes(optimizer.matrices, group))


def _rounds(matrices: tuple[MatrixCost, ...], group: StageGroup) -> Iterator[MatrixRound]:
    """Yield the rounds in which the ranks take the matrices."""
    work = [work_of(cost.shape) for cost in matrices]
    for matrix_of in balanced_rounds(work, group.ranks):
        yield MatrixRound([matrices[number] for number in matrix_of.values()])


def _seconds_per_byte(group: StageGroup, cluster: Cluster) -> float:
    """Return the seconds per byte of an all-to-all in which every rank sends.

    Messages in a node and between nodes travel at the same time. All ranks of a node share its
    links to other nodes.
    """
    ranks = group.ranks
    if ranks == 1:
        return 0.0
    near = min(ranks, cluster.gpus_per_node)
    inside = (near - 1) / (ranks - 1) / cluster.inside_bytes_per_s
    between = (ranks - near) / (ranks - 1) * cluster.gpus_per_node / cluster.node_bytes_per_s
    return max(inside, between)


def _latency(group: StageGroup, cluster: Cluster) -> float:
    if group.ranks <= cluster.gpus_per_node:
        return cluster.inside_latency_us * MICRO
    return cluster.between_latency_us * MICRO
