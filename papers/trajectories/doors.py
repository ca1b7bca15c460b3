"""A small world in which attempts teach: rooms in a row, and in each of them one door that leads
on.

An attempt begins in the first room and opens one door a step. The right one leads to the next room
and gives a reward, the room's number from 1; any other leaves the player where it is, without. The
right doors are the task: a draw of 8^4, so that no weight can know them, and one attempt is too
short to find them. K tasks, R rooms, N attempts of T steps.
"""

from dataclasses import dataclass

import numpy as np

from papers.trajectories.episodes import Episode

ROOMS = STEPS = 4
"""Whoever knows all doors is through the last room with the last step."""
BEST = ROOMS * (ROOMS + 1) // 2
"""The best return."""
DOORS = 8
SLIPS = (0.1, 0.2, 0.3)
"""Shares of a player's steps that are drawn, whatever it knows; each player has one."""
NOVICE = 24
"""Bound of the attempts in which a player draws all steps and only looks; each player has a number
of them. Without them whoever counts doors would know the right ones from the player's habits, and
would need no reward."""


def tasks(seed: int, first: int, count: int) -> np.ndarray:
    """Return the right door of each room, int64 [K, R], of ``count`` tasks from ``first`` on, all
    different.
    """
    numbers = np.random.default_rng(seed).permutation(DOORS**ROOMS)[first : first + count]
    return numbers[:, None] // DOORS ** np.arange(ROOMS) % DOORS


@dataclass
class Rooms:
    """The players of K tasks, each in a room."""

    right: np.ndarray
    """[K, R]."""

    def __post_init__(self) -> None:
        self.room = np.zeros(len(self.right), np.int64)

    def open(self, door: np.ndarray) -> np.ndarray:
        """Open a door [K] of each player's room; return the rewards [K]. Nobody opens more than R."""
        reward: np.ndarray = (door == self.right[np.arange(len(door)), self.room]) * (self.room + 1)
        self.room = self.room + (reward > 0)
        return reward


def histories(
    right: np.ndarray, attempts: int, seed: int, *, perfect: bool = False
) -> list[np.ndarray]:
    """Return what players of mixed quality see and do who learn from attempt to attempt: int64 [K,
    N, T] each.

    Rooms, doors and rewards. A player opens the door that it knows, or one that it has not seen
    fail. When it begins to, and how often it slips, differ between players. A perfect one begins at
    once and never slips.
    """
    rng, every = np.random.default_rng((seed, 1)), np.arange(len(right))
    slips, novice = np.zeros(len(right)), np.zeros(len(right), np.int64)
    if not perfect:
        slips, novice = rng.choice(SLIPS, len(right)), rng.integers(NOVICE, size=len(right))
    knows = np.zeros((len(right), ROOMS, DOORS))
    """1 for the right door, -1 for one that failed."""
    steps = []
    for attempt in range(attempts):
        share = np.where(attempt < novice, 1, slips)
        world = Rooms(right)
        for _ in range(STEPS):
            room = world.room
            door = (2 * knows[every, room] + rng.random((len(right), DOORS))).argmax(1)
            door = np.where(
                rng.random(len(right)) < share, rng.integers(DOORS, size=len(right)), door
            )
            reward = world.open(door)
            knows[every, room, door] = np.where(reward, 1, -1)
            steps.append((room, door, reward))
    return [
        np.stack(part, 1).reshape(len(right), attempts, STEPS) for part in zip(*steps, strict=True)
    ]


def episodes(right: np.ndarray, attempts: int, seed: int) -> list[Episode]:
    """Return the players' histories as episodes, task by task in order of time."""
    rooms, doors, rewards = (part.astype(np.float64) for part in histories(right, attempts, seed))
    return [
        Episode(str(task), rooms[task, n, :, None], doors[task, n, :, None], rewards[task, n])
        for task in range(len(right))
        for n in range(attempts)
    ]
