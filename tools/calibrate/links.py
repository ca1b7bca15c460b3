"""Measure links inside nodes and between nodes, and how computing overlaps with them."""

from statistics import mean

import torch
import torch.distributed as dist

from tools.calibrate.devices import Figures, rank_step
from tools.common.ceilings import FIRST_BYTES, PROBES, exchange_seconds, posting, slowest
from tools.common.shapes import AttentionShape
from train.callbacks import say

GROWTH = 4
MAX_BYTES = 1 << 28
LONG_ENOUGH = 0.05
"""Seconds of an exchange, beyond its latency, above which no larger message is tried.

TCP resends a message that waits longer than its shortest timeout, 0.2 s, behind earlier messages of
its sender: such a time would say nothing about the link. Overlaps are measured with computing that
takes about as long.
"""


def measure_inside(device: torch.device, local_size: int) -> Figures:
    """Measure the latency and rate of the link between the ranks of a node."""
    latency, rate, _ = measure_link("inside a node", device, _node_ring(local_size))
    about = f"{local_size} ranks of a node at once, each to the next"
    return {"inside_gb_per_s": (rate / 1e9, about), "inside_latency_us": (1e6 * latency, about)}


def _node_ring(local_size: int) -> list[int]:
    """Return the next and the previous rank in a ring of this node's ranks."""
    rank = dist.get_rank()
    first = rank - rank % local_size
    return [first + (rank + 1) % local_size, first + (rank - 1) % local_size]


def _ring(distance: int) -> list[int]:
    """Return the ranks ``distance`` after and before this one, in a ring of all ranks."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    return [(rank + distance) % size, (rank - distance) % size]


def measure_between(device: torch.device, local_size: int) -> Figures:
    """Measure the link between nodes, and decide whether the ranks of a node share it."""
    across = _ring(local_size)
    latency, together, largest = measure_link("between nodes", device, across)

    peers = []
    if dist.get_rank() % local_size == 0:
        peers = across
    smaller_seconds = exchange_seconds(device, peers, largest // GROWTH)
    larger_seconds = exchange_seconds(device, peers, largest)
    alone = rate_of(largest, smaller_seconds, larger_seconds)
    say(f"between nodes, one rank of each alone: {alone / 1e9:.4g} GB/s")

    # If a node's ranks share a link, one rank alone is local_size times as fast as each of them
    # when all send; if each has its own, equally fast. The threshold is the geometric mean.
    shared = local_size == 1 or alone / together > local_size**0.5
    # A shared link's rate is the better of the two measurements: if all ranks send, some wait
    # longer. With a link for each rank, one rank alone counts: if all send, the processors may be
    # the limit.
    rate = alone
    if shared:
        rate = max(alone, together * local_size)
    about = f"{local_size} ranks of a node at once, each to its counterpart"
    about_link = f"one rank alone is {alone / together:.2g} times as fast"
    return {
        "between_gb_per_s": (rate / 1e9, f"one rank alone, or {about}"),
        "between_latency_us": (1e6 * latency, about),
        "between_link": ("node" if shared else "rank", about_link),
    }


def measure_overlaps(device: torch.device, work: AttentionShape, local_size: int) -> Figures:
    """Measure the share of an exchange's time that computing of about the same length hides.

    For ``posted_overlap`` the exchange is posted before the computing and waited for after it; for
    ``shared_overlap`` each rank first waits for the exchange, while its neighbours may compute.
    """
    has_nodes = dist.get_world_size() > local_size
    distance = local_size if has_nodes else 1
    peers = _ring(distance)
    attend, _ = rank_step(device, work)
    repeats = max(1, round(LONG_ENOUGH / slowest(attend, device.type, PROBES)))

    def compute() -> None:
        for _ in range(repeats):
            attend()

    compute_seconds = slowest(compute, device.type, 3 * PROBES, mean)
    num_bytes = FIRST_BYTES
    exchange = exchange_seconds(device, peers, num_bytes)
    while exchange < compute_seconds and num_bytes < MAX_BYTES:
        growth = min(GROWTH, max(2.0, compute_seconds / exchange))
        num_bytes = min(MAX_BYTES, int(num_bytes * growth))
        exchange = exchange_seconds(device, peers, num_bytes)

    post = posting(device, peers[:1], peers[1:], num_bytes)
    neighbours = sorted(set(_node_ring(local_size)) - {dist.get_rank()})
    meet = None
    if neighbours:
        meet = posting(device, neighbours, neighbours, 1)

    def posted_before() -> None:
        wait = post()
        compute()
        wait()

    def waited_for() -> None:
        post()()
        compute()
        if meet is not None:  # end together with the neighbours
            meet()()

    figures: Figures = {}
    for name, step, manner in (
        ("posted_overlap", posted_before, "posted before"),
        ("shared_overlap", waited_for, "completed before"),
    ):
        together = slowest(step, device.type, 3 * PROBES, mean)
        saved = compute_seconds + exchange - together
        share = min(1.0, max(0.0, saved / min(compute_seconds, exchange)))
        about = (
            f"an exchange of {1e3 * exchange:.3g} ms {manner} "
            f"{1e3 * compute_seconds:.3g} ms of computing"
        )
        say(f"{about}: {1e3 * together:.4g} ms")
        figures[name] = (share, about)

    return figures


def measure_link(name: str, device: torch.device, peers: list[int]) -> tuple[float, float, int]:
    """Measure a link with messages that grow up to ``LONG_ENOUGH`` or ``MAX_BYTES``.

    Returns the latency in seconds, the rate in bytes per second, and the size of the largest
    message in bytes. ``peers`` are those of ``exchange_seconds``.
    """
    size = FIRST_BYTES
    latency = 0.0
    before = 0.0
    while True:
        seconds = exchange_seconds(device, peers, size)
        say(f"{name}, {size} bytes: {1e6 * seconds:.4g} us")
        latency = latency or seconds
        long_enough = seconds - latency > LONG_ENOUGH or size * GROWTH > MAX_BYTES
        if size > FIRST_BYTES and long_enough:
            return latency, rate_of(size, before, seconds), size
        before = seconds
        size *= GROWTH


def rate_of(size: int, smaller_seconds: float, larger_seconds: float) -> float:
    """Return the bytes per second, from the times of a message and of the next smaller one.

    ``size`` is the larger message's, in bytes. The difference of the times contains no latency, and
    should be most of the larger time. If it is less than half, the smaller exchange was disturbed,
    and half of the larger time is used instead.
    """
    seconds = max(larger_seconds - smaller_seconds, larger_seconds / 2, 1e-9)
    return (size - size // GROWTH) / seconds
