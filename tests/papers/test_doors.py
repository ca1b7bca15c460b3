"""The world of doors: tasks that differ, histories that are a pure function of a seed, players that learn."""

import numpy as np

from papers import doors
from papers.doors import BEST, DOORS, ROOMS, STEPS


def test_tasks_are_different_and_of_their_seed_alone():
    found = doors.tasks(0, 0, 3200)
    assert found.shape == (3200, ROOMS)
    assert (found.min(), found.max()) == (0, DOORS - 1)
    assert len({tuple(row) for row in found.tolist()}) == 3200
    np.testing.assert_array_equal(doors.tasks(0, 3000, 200), found[3000:])
    assert not np.array_equal(doors.tasks(1, 0, 3200), found)


def test_histories_are_of_the_world_and_a_pure_function_of_the_seed():
    right = doors.tasks(0, 0, 20)
    rooms, opened, rewards = doors.histories(right, 5, 3)
    for one, other in zip((rooms, opened, rewards), doors.histories(right, 5, 3), strict=True):
        np.testing.assert_array_equal(one, other)
    for task in range(20):
        for attempt in range(5):
            room = 0
            for step in range(STEPS):
                assert rooms[task, attempt, step] == room
                passed = opened[task, attempt, step] == right[task, room]
                assert rewards[task, attempt, step] == (room + 1) * passed
                room += passed


def test_players_learn_and_a_perfect_one_is_best():
    right = doors.tasks(0, 0, 400)
    mixed, perfect = (doors.histories(right, 32, 0, perfect=one)[2].sum(-1).mean(0) for one in (False, True))
    assert perfect[0] < 1.7
    assert perfect[-1] == BEST
    assert mixed[0] < mixed[7] < mixed[-1] < BEST
    assert (mixed[4:] < perfect[4:]).all()


def test_episodes_are_the_histories():
    right = doors.tasks(0, 0, 2)
    found, (rooms, opened, rewards) = doors.episodes(right, 3, 1), doors.histories(right, 3, 1)
    assert [one.task for one in found] == ["0"] * 3 + ["1"] * 3
    left = rewards[1, 2].sum() - (rewards[1, 2].cumsum() - rewards[1, 2])
    wanted = np.stack((left, rooms[1, 2], opened[1, 2], rewards[1, 2]), -1)
    np.testing.assert_array_equal(found[5].numbers(found[5].total), wanted)
