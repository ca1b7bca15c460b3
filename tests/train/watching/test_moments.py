"""The clock of a step's parts."""

from train.watching.moments import UPDATE, Clock


def test_time_is_kept_of_the_parts_that_ranks_compare():
    clock = Clock()
    with clock.part(UPDATE), clock.part("longmesh: saving"):
        pass
    assert [name for name, seconds in clock.seconds.items() if seconds] == [UPDATE]
