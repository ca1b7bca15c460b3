"""A small world in which attempts teach: rooms in a row, each with one door that leads on.

In an attempt, a player starts in the first room and opens one door per step. The right door leads
to the next room and gives a reward, the room's number from 1; any other leaves the player in the
room, without a reward. A task is a choice of right doors, one of 8^4: a model's weights cannot
memorise them all, and one attempt is too short to find the doors, so a model can only gain by
reading earlier attempts.

Legend: K tasks, R rooms, N attempts of T steps.
"""

from dataclasses import dataclass

import numpy as np

from papers.trajectories.episodes import Episode

ROOMS = STEPS = 4
"""Number of rooms, and of steps in an attempt: a player that knows all right doors leaves the last
room with the last step."""
BEST = ROOMS * (ROOMS + 1) // 2
"""Best possible return of an attempt, the sum of all rooms' rewards."""
DOORS = 8
SLIPS = (0.1, 0.2, 0.3)
"""Shares of steps in which a player opens a random door, whatever it knows; each player has one of
these shares."""
NOVICE = 24
"""A player opens only random doors in its first attempts; their number is random, and below this
one. Without such attempts, a model could infer the right doors from how often a player opens
them, and would not need the rewards."""


def tasks(seed: int, first: int, count: int) -> np.ndarray:
    """Return the right door of each room, int64 [K, R], of ``count`` different tasks.

    The ``seed`` shuffles all possible tasks; ``first`` is the position of the first one to return.
    """
    numbers = np.random.default_rng(seed).permutation(DOORS**ROOMS)[first : first + count]
    return numbers[:, None] // DOORS ** np.arange(ROOMS) % DOORS


@dataclass
class Rooms:
    """State of K tasks: one player for each, in one of its rooms."""

    right: np.ndarray
    """Right door of each room, int64 [K, R]."""

    def __post_init__(self) -> None:
        self.room = np.zeros(len(self.right), np.int64)

    def open(self, door: np.ndarray) -> np.ndarray:
        """Open a door [K] of each player's room; return the rewards [K].

        Call this at most R times, since no room follows the last one.
        """
        is_right = door == self.right[np.arange(len(door)), self.room]
        reward: np.ndarray = is_right * (self.room + 1)
        self.room = self.room + (reward > 0)
        return reward


def histories(
    right: np.ndarray, attempts: int, seed: int, *, perfect: bool = False
) -> list[np.ndarray]:
    """Return the rooms, doors and rewards of players that learn from attempt to attempt.

    Each is int64 [K, N, T]. A player opens the door that it knows to be right, or one that it has
    not seen fail. Players differ in the attempt from which they play like this, and in how often
    they slip (open a random door). Perfect players play like this from the first attempt on, and
    never slip.
    """
    num_tasks = len(right)
    rng = np.random.default_rng((seed, 1))
    players = np.arange(num_tasks)
    slips = np.zeros(num_tasks)
    novice = np.zeros(num_tasks, np.int64)
    if not perfect:
        slips = rng.choice(SLIPS, num_tasks)
        novice = rng.integers(NOVICE, size=num_tasks)

    knowledge = np.zeros((num_tasks, ROOMS, DOORS))
    """Knowledge of each player's doors: 1 if right, -1 if seen to fail, 0 if unknown."""
    steps = []
    for attempt in range(attempts):
        random_share = np.where(attempt < novice, 1, slips)
        world = Rooms(right)
        for _ in range(STEPS):
            room = world.room
            door = (2 * knowledge[players, room] + rng.random((num_tasks, DOORS))).argmax(1)
            is_random = rng.random(num_tasks) < random_share
            door = np.where(is_random, rng.integers(DOORS, size=num_tasks), door)
            reward = world.open(door)
            knowledge[players, room, door] = np.where(reward, 1, -1)
            steps.append((room, door, reward))

    parts = []
    for part in zip(*steps, strict=True):
        parts.append(np.stack(part, 1).reshape(num_tasks, attempts, STEPS))
    return parts


def episodes(right: np.ndarray, attempts: int, seed: int) -> list[Episode]:
    """Return the players' histories as episodes, task by task in order of time."""
    rooms, doors, rewards = (part.astype(np.float64) for part in histories(right, attempts, seed))
    history = []
    for task in range(len(right)):
        for n in range(attempts):
            history.append(
                Episode(
                    task=str(task),
                    observation=rooms[task, n, :, None],
                    action=doors[task, n, :, None],
                    reward=rewards[task, n],
                )
            )
    return history
