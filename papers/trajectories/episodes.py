"""Episodes of reinforcement learning as tokens: returns, observations, actions and rewards, each in
bins by quantiles.

A sequence is a chain of attempts at one task in ascending order of their returns. Each step is told
what is left of the chain's best return, and each attempt ends with a mark that says whether it
reached that (Liu and Abbeel 2023, arXiv:2305.16554, "Emergent Agentic Transformer from Chain of
Hindsight Experience"). Actions alone carry loss.

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
"""Words at the end of an attempt: it fell short of the chain's best return, or reached it."""
_FIRST = 1 + len(MARKS)
STEPS = {"observation": slice(-1), "action": slice(1, None), "reward": slice(1, None)}
"""Fields of an episode, and the rows of an .npz's arrays that are its steps."""


@dataclass(frozen=True)
class Episode:
    """One attempt at a task; all arrays are float64."""

    task: str
    observation: np.ndarray
    """[T, O], before each action."""
    action: np.ndarray
    """[T, A]."""
    reward: np.ndarray
    """[T], after each action."""

    @cached_property
    def total(self) -> float:
        """The episode's return."""
        return float(self.reward.sum())

    def numbers(self, best: float) -> np.ndarray:
        """Return the columns [T, C] of its steps: what is left of the return ``best``, then the
        arrays.
        """
        left = best - (np.cumsum(self.reward) - self.reward)
        return np.column_stack((left, self.observation, self.action, self.reward))


def read_episodes(paths: Iterable[Path]) -> Iterator[Episode]:
    """Yield the episodes of files in order.

    An .npz is an episode as ExoRL has it: observation [T + 1, O], action and reward [T + 1, ...],
    of which row t + 1 has the action after observation t and its reward; row 0 has none. Its task
    is its folder. Rows of any other file are episodes with T rows in each list, and may name their
    ``task``, by default the file.

    Raises DataError: a file or row that is no such episode; names it.
    """
    for path in paths:
        if path.suffix == ".npz":
            try:
                with np.load(
                    path
                ) as file:  # the last observation has no action, the first action no observation
                    arrays = {name: file[name][STEPS[name]] for name in STEPS if name in file}
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{path} is no .npz or is damaged ({error}); copy it again"
                ) from error
            yield _episode(str(path), str(path.parent), arrays)
        elif has_rows(path):
            for where, row in rows(path):
                if isinstance(row, DataError) or not isinstance(row, dict):
                    raise DataError(
                        f"{where}: {row if isinstance(row, DataError) else 'no object; repair it'}"
                    )
                yield _episode(where, str(row.get("task", path)), row)
        else:
            raise DataError(
                f"{path} holds no episodes; they are in .npz, .jsonl, .json, .parquet or a dataset"
            )


def _episode(where: str, task: str, fields: dict[str, Any]) -> Episode:
    if missing := [name for name in STEPS if name not in fields]:
        raise DataError(f"{where} lacks {' and '.join(missing)}; an episode has {', '.join(STEPS)}")
    try:
        observation, action, reward = (np.asarray(fields[name], np.float64) for name in STEPS)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} holds what is no number ({error}); repair it or leave it out"
        ) from error
    arrays = [
        array.reshape(len(array), -1) if array.ndim else array[None, None]
        for array in (observation, action)
    ]
    steps = {"observation": len(arrays[0]), "action": len(arrays[1]), "reward": reward.size}
    if len(set(steps.values())) > 1 or not reward.size:
        raise DataError(
            f"{where} has {steps} rows; each step has one of each: repair it or leave it out"
        )
    if not all(np.isfinite(array).all() for array in (*arrays, reward)):
        raise DataError(f"{where} holds a number that is not finite; leave it out")
    return Episode(task, arrays[0], arrays[1], reward.reshape(-1))


@dataclass(frozen=True)
class Column:
    """Bins of one number: bin b has [edges[b - 1], edges[b])."""

    name: str
    edges: tuple[float, ...]
    """Ascending."""
    values: tuple[float, ...]
    """One number of each bin: its median, or all that it has."""

    @classmethod
    def fit(cls, name: str, numbers: np.ndarray, bins: int) -> "Column":
        """Return bins of as many of ``numbers`` each; of ``bins`` different numbers or fewer, a bin
        for each.
        """
        distinct = np.unique(numbers)
        if len(distinct) <= bins:
            return cls(
                name, tuple(((distinct[1:] + distinct[:-1]) / 2).tolist()), tuple(distinct.tolist())
            )
        edges = np.unique(np.quantile(numbers, np.arange(1, bins) / bins, method="higher"))
        edges = edges[edges > distinct[0]]
        bins_of = np.searchsorted(edges, numbers, side="right")
        medians = (float(np.median(numbers[bins_of == place])) for place in range(len(edges) + 1))
        return cls(name, tuple(edges.tolist()), tuple(medians))


class Codec:
    """Token ids of steps: the end of a text, the marks, then the bins of each column, one column
    after the other.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        """``columns`` are those of ``Episode.numbers``."""
        self.columns = tuple(columns)
        sizes = [len(column.values) for column in columns]
        self.offsets = _FIRST + np.cumsum([0, *sizes])[:-1]
        """The first id of each column, int64 [C]."""
        self.vocab_size = _FIRST + sum(sizes)
        self.acts = np.array([column.name.startswith("action") for column in columns])
        """Columns that are actions, bool [C]."""

    @classmethod
    def fit(cls, episodes: Sequence[Episode], bins: int) -> "Codec":
        """Fit the bins to episodes, whatever chains they will be in: an attempt's target is from
        its own to the best.

        Raises DataError: episodes with other numbers of columns.
        """
        shapes = {(e.observation.shape[1], e.action.shape[1]) for e in episodes}
        if len(shapes) != 1:
            raise DataError(
                f"the episodes' observations and actions have {sorted(shapes)} numbers; prepare each alone"
            )
        ((observations, actions),) = shapes
        best: dict[str, float] = {}
        for episode in episodes:
            best[episode.task] = max(episode.total, best.get(episode.task, episode.total))
        numbers = np.concatenate(
            [e.numbers(target) for e in episodes for target in {e.total, best[e.task]}]
        )
        names = [
            "return",
            *_names("observation", observations),
            *_names("action", actions),
            "reward",
        ]
        return cls([Column.fit(name, numbers[:, place], bins) for place, name in enumerate(names)])

    @classmethod
    def load(cls, prefix: Path) -> "Codec":
        """Return the bins that lie beside prepared data. Raises DataError."""
        path = Path(f"{prefix}.json")
        try:
            columns = json.loads(path.read_text(encoding="utf-8"))["columns"]
            return cls(
                [Column(row["name"], tuple(row["edges"]), tuple(row["values"])) for row in columns]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} holds no bins ({error}); papers.trajectories.prepare writes them"
            ) from error

    @property
    def words(self) -> list[str]:
        """The text of every id."""
        return [
            END_OF_TEXT,
            *MARKS,
            *(f"{column.name}:{value:g}" for column in self.columns for value in column.values),
        ]

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Return the ids [..., C] of steps' numbers [..., C]; those beyond the outer bins are in
        these.
        """
        bins = [
            np.searchsorted(c.edges, numbers[..., place], side="right")
            for place, c in enumerate(self.columns)
        ]
        return np.stack(bins, -1) + self.offsets

    def mark(self, total: float, best: float) -> int:
        """Return the id that ends an attempt of return ``total`` at ``best``."""
        return 1 + int(total >= best)

    def chain(self, attempts: Sequence[Episode]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a sequence, int64 [S], and which of them carry loss, bool [S]."""
        attempts = sorted(
            attempts, key=lambda episode: episode.total
        )  # stable: in order of time among equals
        best = attempts[-1].total
        ids = self.encode(np.concatenate([episode.numbers(best) for episode in attempts]))
        ends = np.cumsum([len(episode.reward) for episode in attempts]) * len(self.columns)
        # A mark after each attempt, which carries no loss.
        learned = np.insert(np.broadcast_to(self.acts, ids.shape).reshape(-1), ends, False)
        return np.insert(
            ids.reshape(-1), ends, [self.mark(e.total, best) for e in attempts]
        ), learned


def _names(kind: str, count: int) -> list[str]:
    return [kind] if count == 1 else [f"{kind}{number}" for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class Chains:
    """Settings of prepared sequences."""

    trajectories: int
    """Attempts of a sequence."""
    bins: int = 32
    """Most bins of a column."""
    seq_length: int | None = None
    """Tokens of a sample, which holds as many sequences as fit; by default the longest sequence's.
    """
    seed: int = 0
    """Deals the attempts at a task to its sequences, and orders these."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Facts about prepared sequences."""

    tokenizer_sha256: str
    tasks: int
    sequences: int
    samples: int
    tokens: int
    learned: int
    """Tokens that carry loss."""
    left_over: int
    """Episodes that make no whole sequence of their task."""
    seq_length: int


def write_chains(episodes: Sequence[Episode], prefix: Path, chains: Chains) -> Written:
    """Write PREFIX.bin and .idx, the pair of their loss mask, PREFIX_tokenizer and PREFIX.json,
    which has the bins.

    A pure function of its arguments. Raises DataError: no task has so many episodes, or a sequence
    is longer than a sample.
    """
    codec, dealt = Codec.fit(episodes, chains.bins), list(_dealt(episodes, chains))
    if not dealt:
        raise DataError(
            f"trajectories is {chains.trajectories}, and no task has as many episodes; give fewer"
        )
    encoded = [codec.chain(attempts) for attempts in dealt]
    lengths = np.array([len(ids) for ids, _ in encoded], np.int32)
    seq_length = chains.seq_length or int(lengths.max())
    if lengths.max() > seq_length:
        raise DataError(
            f"seq_length is {seq_length}, and a sequence has {lengths.max()} tokens; give --seq-length that"
        )
    dtype, left = id_type(codec.vocab_size), len(episodes) - len(dealt) * chains.trajectories
    ends = (".bin", ".idx", f"{LOSS_MASK}.bin", f"{LOSS_MASK}.idx", TOKENIZER, ".json")
    with (
        TemporaryDirectory() as folder,
        writing(*(Path(f"{prefix}{end}") for end in ends)) as drafts,
    ):
        sources = [(Path(folder) / "ids", dtype), (Path(folder) / "mask", np.dtype(np.uint8))]
        for (path, kind), parts in zip(sources, zip(*encoded, strict=True), strict=True):
            np.concatenate(parts).astype(kind).tofile(path)
        samples = write_packed(
            sources, [(drafts[0], drafts[1]), (drafts[2], drafts[3])], lengths, seq_length
        )
        written = Written(
            tokenizer_sha256=_write_tokenizer(codec, drafts[4]),
            tasks=len({episode.task for episode in episodes}),
            sequences=len(dealt),
            samples=samples,
            tokens=int(lengths.sum(dtype=np.int64)),
            learned=sum(int(learned.sum()) for _, learned in encoded),
            left_over=left,
            seq_length=seq_length,
        )
        record: dict[str, Any] = {"made_with": asdict(chains), "prepared": asdict(written)}
        record["columns"] = [asdict(column) for column in codec.columns]
        drafts[5].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return written


def _dealt(episodes: Sequence[Episode], chains: Chains) -> Iterator[list[Episode]]:
    """Yield the attempts of each sequence, in order of time: those at a task, at random among its
    sequences.
    """
    by_task = defaultdict[str, list[Episode]](list)
    for episode in episodes:
        by_task[episode.task].append(episode)
    rng, size = np.random.default_rng(chains.seed), chains.trajectories
    groups = []
    for task in by_task.values():
        drawn = rng.permutation(len(task))
        groups += [
            [task[n] for n in np.sort(drawn[at : at + size])]
            for at in range(0, len(task) - size + 1, size)
        ]
    return (groups[number] for number in rng.permutation(len(groups)))


def _write_tokenizer(codec: Codec, folder: Path) -> str:
    """Write a tokenizer whose words are the bins; return its SHA-256."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(codec.words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    backend.save(str(path := folder / "tokenizer.json"))
    return load_tokenizer(path).sha256
