"""Episodes of reinforcement learning as tokens: returns, observations, actions and rewards.

A sequence is a chain of attempts at one task in ascending order of their returns. Each step begins
with the return-to-go, counted from the best return of the chain, and each attempt ends with a mark
that tells if it reached that best return (Liu and Abbeel 2023, arXiv:2305.16554, "Emergent Agentic
Transformer from Chain of Hindsight Experience"). Only actions carry loss. Numbers become tokens by
bins whose edges are quantiles, so every token of a column is about as frequent as the others.

Legend: T steps of an attempt, O and A numbers of an observation and an action, C = O + A + 2
columns.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from data.chat.convert import write_packed
from data.text.corpus import has_rows, rows
from data.text.indexed import LOSS_MASK, id_type, writing
from data.text.record import TOKENIZER
from data.tokenizer import END_OF_TEXT, load_tokenizer
from runtime.errors import DataError

MARKS = ("again", "done")
"""Marks that end an attempt: "again" if its return is below the chain's best, "done" if it
reaches it."""
_FIRST = 1 + len(MARKS)
STEPS = {"observation": slice(-1), "action": slice(1, None), "reward": slice(1, None)}
"""Fields of an episode, each with the slice of an .npz's array that holds its steps: no action
follows the last observation, and no observation precedes the first row of the others."""


@dataclass(frozen=True)
class Episode:
    """One attempt at a task; all arrays are float64."""

    task: str
    observation: np.ndarray
    """Observation before each action, [T, O]."""
    action: np.ndarray
    """Action of each step, [T, A]."""
    reward: np.ndarray
    """Reward after each action, [T]."""

    @cached_property
    def total(self) -> float:
        """Return (sum of rewards) of the episode."""
        return float(self.reward.sum())

    def numbers(self, best: float) -> np.ndarray:
        """Return the steps' numbers [T, C]: the return left to ``best``, then all arrays."""
        remaining = best - (np.cumsum(self.reward) - self.reward)
        return np.column_stack((remaining, self.observation, self.action, self.reward))


def read_episodes(paths: Iterable[Path]) -> Iterator[Episode]:
    """Yield the episodes of files in order.

    An .npz is one episode in ExoRL's format: observation [T + 1, O], and action and reward [T + 1,
    ...], whose row t + 1 belongs to observation t, while row 0 is unused. Its task is its folder.
    In any other file, each row is an episode with T entries per list, and may name its ``task``; by
    default, the file is the task.

    Raises DataError if a file or row is not such an episode; the message names it.
    """
    for path in paths:
        if path.suffix == ".npz":
            yield _episode(str(path), str(path.parent), _read_npz(path))
        elif has_rows(path):
            for where, row in rows(path):
                if isinstance(row, DataError):
                    raise DataError(f"{where}: {row}")
                if not isinstance(row, dict):
                    raise DataError(f"{where}: it is not a JSON object; repair the row")
                yield _episode(where, str(row.get("task", path)), row)
        else:
            raise DataError(
                f"{path} has no episodes; give .npz, .jsonl, .json, .parquet or a dataset"
            )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the fields of an episode in ExoRL's format, without the rows that are not steps."""
    try:
        with np.load(path) as file:
            return {name: file[name][rows] for name, rows in STEPS.items() if name in file}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not an .npz or is damaged ({error}); copy it again") from error


def _episode(where: str, task: str, fields: dict[str, Any]) -> Episode:
    """Make an episode from the fields of a file or row; messages call it ``where``."""
    missing = [name for name in STEPS if name not in fields]
    if missing:
        raise DataError(f"{where} lacks {' and '.join(missing)}; an episode has {', '.join(STEPS)}")
    try:
        observation, action, reward = (np.asarray(fields[name], np.float64) for name in STEPS)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has a value that is not a number ({error}); repair or remove the episode"
        ) from error

    observation = _as_rows(observation)
    action = _as_rows(action)
    if not 0 < len(observation) == len(action) == reward.size:
        raise DataError(
            f"{where} has {len(observation)} observations, {len(action)} actions "
            f"and {reward.size} rewards; each step needs one row of each, so repair or remove "
            "the episode"
        )
    for array in (observation, action, reward):
        if not np.isfinite(array).all():
            raise DataError(
                f"{where} has a number that is not finite; repair or remove the episode"
            )
    return Episode(task, observation, action, reward.reshape(-1))


def _as_rows(array: np.ndarray) -> np.ndarray:
    """Return an array as a matrix with a row per step."""
    if array.ndim == 0:
        return array[None, None]
    return array.reshape(len(array), -1)


@dataclass(frozen=True)
class Column:
    """Bins of one column's numbers: bin b has those in [edges[b - 1], edges[b])."""

    name: str
    edges: tuple[float, ...]
    """Edges between the bins, ascending."""
    values: tuple[float, ...]
    """Number that stands for each bin in its token's text: the median of its numbers."""

    @classmethod
    def fit(cls, name: str, numbers: np.ndarray, bins: int) -> "Column":
        """Return bins that each have about the same share of ``numbers``.

        If there are at most ``bins`` different numbers, each has a bin.
        """
        distinct = np.unique(numbers)
        if len(distinct) <= bins:
            middles = (distinct[1:] + distinct[:-1]) / 2
            return cls(name, tuple(middles.tolist()), tuple(distinct.tolist()))

        shares = np.arange(1, bins) / bins
        edges = np.unique(np.quantile(numbers, shares, method="higher"))
        edges = edges[edges > distinct[0]]  # otherwise the first bin would be empty
        bin_of = np.searchsorted(edges, numbers, side="right")
        medians = [float(np.median(numbers[bin_of == index])) for index in range(len(edges) + 1)]
        return cls(name, tuple(edges.tolist()), tuple(medians))


class Codec:
    """Turns the numbers of steps into token ids.

    Id 0 ends a text. The ids of the marks follow, then those of the bins, column by column.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        """Set up for the bins of the columns of ``Episode.numbers``."""
        self.columns = tuple(columns)
        sizes = [len(column.values) for column in columns]
        self.offsets = _FIRST + np.cumsum([0, *sizes])[:-1]
        """First token id of each column, int64 [C]."""
        self.vocab_size = _FIRST + sum(sizes)
        self.acts = np.array([column.name.startswith("action") for column in columns])
        """True for the columns that are actions and carry loss, bool [C]."""

    @classmethod
    def fit(cls, episodes: Sequence[Episode], bins: int) -> "Codec":
        """Fit the bins to episodes, whatever chains they will be in.

        An attempt's target, the best return of its chain, is at least its own return and at most
        the best of its task: the bins are fitted to both.

        Raises DataError if episodes have different numbers of columns.
        """
        shapes = {(e.observation.shape[1], e.action.shape[1]) for e in episodes}
        if len(shapes) != 1:
            raise DataError(
                f"the episodes' observations and actions have different sizes, {sorted(shapes)}; "
                "prepare each size separately"
            )
        ((observations, actions),) = shapes

        best: dict[str, float] = {}
        for episode in episodes:
            best[episode.task] = max(episode.total, best.get(episode.task, episode.total))
        numbers = []
        for episode in episodes:
            for target in {episode.total, best[episode.task]}:
                numbers.append(episode.numbers(target))
        table = np.concatenate(numbers)  # [all T, C]

        names = ["return"]
        names += _names("observation", observations)
        names += _names("action", actions)
        names += ["reward"]
        columns = []
        for index, name in enumerate(names):
            columns.append(Column.fit(name, table[:, index], bins))
        return cls(columns)

    @classmethod
    def load(cls, prefix: Path) -> "Codec":
        """Load the bins of prepared data. Raises DataError if there are none."""
        path = Path(f"{prefix}.json")
        columns = []
        try:
            for row in json.loads(path.read_text(encoding="utf-8"))["columns"]:
                columns.append(Column(row["name"], tuple(row["edges"]), tuple(row["values"])))
            return cls(columns)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} has no bins ({error}); write it with papers.trajectories.prepare"
            ) from error

    @property
    def words(self) -> list[str]:
        """Text of each token, in the order of ids."""
        words = [END_OF_TEXT, *MARKS]
        for column in self.columns:
            words += [f"{column.name}:{value:g}" for value in column.values]
        return words

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Return the ids [..., C] of steps' numbers [..., C].

        Numbers beyond the outer bins get the ids of these bins.
        """
        bins = []
        for index, column in enumerate(self.columns):
            bins.append(np.searchsorted(column.edges, numbers[..., index], side="right"))
        return np.stack(bins, -1) + self.offsets

    def mark(self, total: float, best: float) -> int:
        """Return the id that ends an attempt with return ``total`` if the target is ``best``."""
        return 1 + int(total >= best)

    def chain(self, attempts: Sequence[Episode]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a chain, int64 [S], and the mask of those that carry loss, bool [S]."""
        # Stable: equal returns stay in order of time.
        attempts = sorted(attempts, key=lambda episode: episode.total)
        best = attempts[-1].total
        ids = self.encode(np.concatenate([episode.numbers(best) for episode in attempts]))  # [T, C]
        learned = np.broadcast_to(self.acts, ids.shape)

        # A mark after each attempt, which carries no loss.
        ends = np.cumsum([len(episode.reward) for episode in attempts]) * len(self.columns)
        marks = [self.mark(episode.total, best) for episode in attempts]
        return (
            np.insert(ids.reshape(-1), ends, marks),
            np.insert(learned.reshape(-1), ends, False),
        )


def _names(kind: str, count: int) -> list[str]:
    return [kind] if count == 1 else [f"{kind}{number}" for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class Chains:
    """Settings of prepared sequences."""

    trajectories: int
    """Number of attempts in a sequence."""
    bins: int = 32
    """Maximum number of bins of a column."""
    seq_length: int | None = None
    """Number of tokens of a sample, which has as many sequences as fit; by default the length of
    the longest sequence.
    """
    seed: int = 0
    """Seed for dealing the attempts at a task to its sequences, and for shuffling the sequences."""


@dataclass(frozen=True, kw_only=True)
class ChainSummary:
    """Counts and sizes of the prepared data, which PREFIX.json records."""

    tokenizer_sha256: str
    tasks: int
    sequences: int
    samples: int
    tokens: int
    learned: int
    """Number of tokens with a loss."""
    left_over: int
    """Number of episodes left over, too few for another sequence of their task."""
    seq_length: int


def write_chains(episodes: Sequence[Episode], prefix: Path, chains: Chains) -> ChainSummary:
    """Write the sequences, their loss mask, the tokenizer and the bins of episodes.

    The files are PREFIX.bin and .idx, the pair of the loss mask, PREFIX_tokenizer and PREFIX.json.
    Their content depends only on the arguments. Raises DataError if no task has enough episodes, or
    a sequence is longer than a sample.
    """
    codec = Codec.fit(episodes, chains.bins)

    groups = _deal(episodes, chains)
    if not groups:
        raise DataError(
            f"trajectories is {chains.trajectories}, but no task has that many episodes; give a "
            "smaller --trajectories"
        )

    encoded = [codec.chain(attempts) for attempts in groups]
    lengths = np.array([len(ids) for ids, _ in encoded], np.int32)
    seq_length = chains.seq_length or int(lengths.max())
    if lengths.max() > seq_length:
        raise DataError(
            f"seq_length is {seq_length}, but a sequence has {lengths.max()} tokens; give a "
            "larger --seq-length"
        )

    endings = (".bin", ".idx", f"{LOSS_MASK}.bin", f"{LOSS_MASK}.idx", TOKENIZER, ".json")
    targets = [Path(f"{prefix}{ending}") for ending in endings]
    with TemporaryDirectory() as folder, writing(*targets) as drafts:
        sources = [
            (Path(folder) / "ids", id_type(codec.vocab_size)),
            (Path(folder) / "mask", np.dtype(np.uint8)),
        ]
        for (path, dtype), arrays in zip(sources, zip(*encoded, strict=True), strict=True):
            np.concatenate(arrays).astype(dtype).tofile(path)

        pairs = [(drafts[0], drafts[1]), (drafts[2], drafts[3])]
        summary = ChainSummary(
            samples=write_packed(sources, pairs, lengths, seq_length),
            tokenizer_sha256=_write_tokenizer(codec, drafts[4]),
            tasks=len({episode.task for episode in episodes}),
            sequences=len(groups),
            tokens=int(lengths.sum(dtype=np.int64)),
            learned=sum(int(learned.sum()) for _, learned in encoded),
            left_over=len(episodes) - len(groups) * chains.trajectories,
            seq_length=seq_length,
        )

        record = {
            "made_with": asdict(chains),
            "prepared": asdict(summary),
            "columns": [asdict(column) for column in codec.columns],
        }
        drafts[5].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return summary


def _deal(episodes: Sequence[Episode], chains: Chains) -> list[list[Episode]]:
    """Return the attempts of each sequence in order of time, dealt at random within a task.

    Each sequence then has good and bad attempts. A player's attempts get better over time, so
    neighbouring attempts would hardly differ in their returns.
    """
    by_task = defaultdict[str, list[Episode]](list)
    for episode in episodes:
        by_task[episode.task].append(episode)

    rng = np.random.default_rng(chains.seed)
    size = chains.trajectories
    groups = []
    for task in by_task.values():
        order = rng.permutation(len(task))
        for start in range(0, len(task) - size + 1, size):
            groups.append([task[n] for n in np.sort(order[start : start + size])])
    return [groups[number] for number in rng.permutation(len(groups))]


def _write_tokenizer(codec: Codec, folder: Path) -> str:
    """Write a tokenizer whose words are the bins; return its SHA-256.

    Training and generation then read the data like any text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(codec.words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return load_tokenizer(path).sha256
