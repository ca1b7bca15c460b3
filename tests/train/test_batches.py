"""Items made ahead: in order, each error where its item is taken, no thread left.

The clock of a step's parts.
"""

import threading
from itertools import islice

import pytest
import torch

from train.batches import Clock, Prefetcher
from train.callbacks import UPDATE

CPU = torch.device("cpu")


def items(producers, bad=None):
    """0, 1, 2, 3; notes the thread of each."""
    for number in range(4):
        producers.append(threading.current_thread().name)
        if number == bad:
            raise ValueError(f"{number} is bad")
        yield number


def test_items_come_in_order_each_made_while_the_one_before_is_in_use():
    producers = []
    with Prefetcher(items(producers), CPU) as ahead:
        assert producers == []
        for number in range(4):
            assert next(ahead) == number
            ahead.wait()
            assert len(producers) == min(number + 2, 4)
        assert next(ahead, None) is None
    assert producers[0] == threading.current_thread().name
    assert all(name.startswith("prefetch") for name in producers[1:])
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_is_raised_where_its_item_is_taken(bad):
    with Prefetcher(items([], bad), CPU) as ahead:
        assert [next(ahead) for _ in range(bad)] == list(range(bad))
        with pytest.raises(ValueError, match=f"{bad} is bad"):
            next(ahead)
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_an_item_that_is_not_taken_raises_nothing_and_no_more_is_made_than_there_is():
    with Prefetcher(items([], 1), CPU) as ahead:
        assert next(ahead) == 0
    producers = []
    with Prefetcher(islice(items(producers), 2), CPU) as ahead:
        assert list(ahead) == [0, 1]
    assert len(producers) == 2


def test_time_is_kept_of_the_parts_that_ranks_compare():
    clock = Clock()
    with clock.part(UPDATE), clock.part("longmesh: saving"):
        pass
    assert [name for name, seconds in clock.seconds.items() if seconds] == [UPDATE]
