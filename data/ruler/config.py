"""The settings of a run's small curve of RULER."""

from dataclasses import dataclass
from typing import ClassVar

from data.ruler.tasks import TASKS
from runtime.errors import UserError, at_least, require

LEAST = 512
"""Tokens of an example that most tasks' answers fit into."""


@dataclass(frozen=True, kw_only=True)
class RulerConfig:
    """The needles that a run looks for as it trains (RULER, Hsieh et al. 2024)."""

    ruler_interval: int | None = None
    """Iterations between points of the curve, such as save_interval: how many needles are found at each length; one is
    made at the end too. By default none, which on the command line leaves out the curve of --config's file."""
    ruler_lengths: tuple[int, ...] = ()
    """Tokens of the examples, at most seq_length; by default that, and of its half and quarter those of 512
    or more."""
    ruler_samples: int = 8
    """Examples of each length, shared out over the tasks; each takes a forward of seq_length tokens."""
    ruler_tasks: tuple[str, ...] = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")
    """Tasks of the examples, of those that read no file."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"ruler_interval": ("ruler_lengths", "ruler_samples", "ruler_tasks")}
    """The fields of --config's file that go where a flag sets another to none."""

    def __post_init__(self) -> None:
        at_least(self, 1, "ruler_interval", "ruler_samples")
        for length in self.ruler_lengths:
            require(self, length >= 1, "ruler_lengths", "each must be 1 or more")
        there = [task for task in TASKS if not task.startswith("qa")]
        for task in self.ruler_tasks:
            require(self, task in there, "ruler_tasks", f"there are {', '.join(there)}; name some of these")
        require(self, bool(self.ruler_tasks), "ruler_tasks", "name at least one, such as niah_single_1")
        require(self, len(set(self.ruler_tasks)) == len(self.ruler_tasks), "ruler_tasks", "name each task once")
        most = f"it must be at least 1 for each of the {len(self.ruler_tasks)} ruler_tasks; give more, or name fewer"
        require(self, self.ruler_samples >= len(self.ruler_tasks), "ruler_samples", most)
        for name in self.PARTS["ruler_interval"] if self.ruler_interval is None else ():
            default = getattr(self, name) == getattr(RulerConfig, name)
            must = "it is of a curve that ruler_interval asks for; give --ruler-interval N, or leave it out"
            require(self, default, name, must)

    def lengths(self, seq_length: int) -> list[int]:
        """Return the lengths in ascending order. Raises UserError: one is more than the model reads at once."""
        parts = [part for part in (seq_length // 4, seq_length // 2) if part >= LEAST]
        found = sorted(set(self.ruler_lengths)) or [*parts, seq_length]
        if found[-1] > seq_length:
            raise UserError(
                f"ruler_lengths names {found[-1]} and seq_length is {seq_length}, so that prompts would be cut; give "
                "at most that, and ask for longer ones with python -m tools.ruler"
            )
        return found
