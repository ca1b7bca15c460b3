"""Events of allocating and freeing storages, and the memory that they add up to."""

from collections.abc import Collection, Iterable

Event = tuple[int, int]
"""An allocation or a free: the storage's number, and the change of its size in bytes."""


def alive_after(events: Iterable[Event]) -> dict[int, int]:
    """Return the bytes of each storage that is alive after these events."""
    sizes: dict[int, int] = {}
    for number, change in events:
        sizes[number] = sizes.get(number, 0) + change
    return {number: size for number, size in sizes.items() if size}


def peak_event(events: Iterable[Event], ignored: Collection[int]) -> int:
    """Return the number of events up to the memory's first peak, without ``ignored`` storages."""
    live = 0
    peak = 0
    num_events = 0
    for index, (number, change) in enumerate(events, 1):
        if number not in ignored:
            live += change
        if live > peak:
            peak = live
            num_events = index
    return num_events
