"""Moments reach those that take part in them, in their order, each with its own flags."""

from train.watching.moments import UPDATE, Clock, Watcher, Watchers


class Asking(Watcher):
    def __init__(self, flags, ends=False):
        self.flags, self.ends, self.heard = flags, ends, list[int]()

    def ask(self):
        return self.flags

    def hear(self, counts):
        self.heard = list(counts)
        return self.ends


class Judging(Watcher):
    def __init__(self, said, order):
        self.said, self.order = said, order

    def judge(self, loss, norm):
        self.order.append(self.said)
        return self.said


def test_each_hears_the_counts_of_its_own_flags_and_any_of_them_ends_the_run():
    one, none, other = Asking([True, False], ends=True), Asking([]), Asking([True])
    watchers = Watchers(one, Watcher(), none, other)
    assert watchers.ask() == [True, False, True]
    assert watchers.hear([3, 0, 2])
    assert (one.heard, none.heard, other.heard) == ([3, 0], [], [2])
    one.ends = False
    watchers.ask()
    assert not watchers.hear([0, 0, 0])


def test_all_judge_in_their_order_and_the_first_reason_counts():
    order = []
    watchers = Watchers(*(Judging(said, order) for said in ("", "a", "b")))
    assert watchers.judge(1.0, 1.0) == "a"
    assert order == ["", "a", "b"], "each may be collective"
    assert Watchers().judge(1.0, 1.0) == ""


def test_a_moment_that_none_takes_part_in_is_not_called():
    assert Watchers(Watcher(), Asking([])).call("before", 1) == []


def test_time_is_kept_of_the_parts_that_ranks_compare():
    clock = Clock()
    with clock.part(UPDATE), clock.part("longmesh: saving"):
        pass
    assert [name for name, seconds in clock.seconds.items() if seconds] == [UPDATE]
