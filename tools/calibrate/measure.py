"""Measure every figure of a cluster file that the started processes can measure."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from runtime.errors import UserError
from runtime.machine import usable_cores
from runtime.together import gather_results
from tools.calibrate.devices import (
    Figures,
    measure_memory,
    measure_products,
    measure_tiles,
    relate,
)
from tools.calibrate.links import measure_between, measure_inside, measure_overlaps
from tools.common.shapes import AttentionShape


def measure(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Return every figure that can be measured here, and print each measurement. Collective.

    Args:
        work: heads, batch and dtype of the attention; the layers are as wide as all heads together.
        lengths: numbers of positions per rank at which attention is measured; the longest gives
            the rate.

    Raises UserError if nodes have different numbers of processes, or no attention kernel runs here.
    """
    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if len(set(gather_results(lambda: local_size))) > 1 or size % local_size:
        raise UserError(
            "nodes have different numbers of processes (LOCAL_WORLD_SIZE); start the same number "
            "on each"
        )

    figures = measure_products(device, work, lengths[-1] * work.batch)
    figures |= measure_tiles(device, work, lengths)
    relate(figures)
    if size == 1:
        devices = len(usable_cores()) if device.type == "cpu" else torch.cuda.device_count()
        figures["gpus_per_node"] = (devices, "all of this machine")
    else:
        figures["gpus_per_node"] = (local_size, "processes started on each node")

    figures |= measure_memory(device, figures["gpus_per_node"][0])
    if local_size > 1:
        figures |= measure_inside(device, local_size)
    if size > local_size:
        figures |= measure_between(device, local_size)
    if size > 1:
        figures |= measure_overlaps(device, replace(work, seq_length=lengths[-1]), local_size)
    return figures
