"""Chains of attempts.

Bins by quantiles, targets relabelled, actions alone with loss, and what is refused.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from data.text.indexed import LOSS_MASK, open_indexed
from data.text.packing import Conversations
from papers.trajectories.episodes import Chains, Codec, Column, Episode, read_episodes, write_chains
from runtime.errors import DataError


def episode(task, rewards, actions=None, observations=None):
    steps = len(rewards)
    columns = (
        observations if observations is not None else [[n] for n in range(steps)],
        actions or [[0]] * steps,
    )
    return Episode(task, *(np.array(part, float) for part in columns), np.array(rewards, float))


def drawn(count=12, steps=3, seed=0):
    rng = np.random.default_rng(seed)
    return [
        episode(
            str(n % 2),
            rng.integers(2, size=steps).tolist(),
            rng.integers(3, size=(steps, 1)).tolist(),
        )
        for n in range(count)
    ]


def test_few_numbers_have_a_bin_each_and_many_equal_shares():
    few = Column.fit("reward", np.array([2.0, 0, 0, 5]), 8)
    assert few.values == (0, 2, 5)
    assert few.edges == (1, 3.5)
    numbers = np.random.default_rng(0).standard_normal(1000) ** 3
    many = Column.fit("observation", numbers, 8)
    shares = np.bincount(np.searchsorted(many.edges, numbers, side="right"), minlength=8)
    assert len(many.values) == 8
    assert shares.min() >= 124
    assert shares.max() <= 126
    for value, share in zip(
        many.values, np.split(np.sort(numbers), np.cumsum(shares)[:-1]), strict=True
    ):
        assert value == np.median(share)
    skewed = Column.fit(
        "reward", np.array([0.0] * 990 + list(range(1, 101))), 16
    )  # most quantiles are alike
    assert len(skewed.values) == len(skewed.edges) + 1 == 2
    assert skewed.values[0] == 0


def test_a_chain_is_sorted_relabelled_and_marked():
    attempts = [
        episode("a", [1, 1], [[2], [1]]),
        episode("a", [0, 0]),
        episode("a", [0, 1]),
        episode("a", [1, 1]),
    ]
    codec = Codec.fit(attempts, 8)
    words = codec.words
    ids, learned = codec.chain(attempts)
    text = " ".join(words[token] for token in ids)
    assert text == (
        "return:2 observation:0 action:0 reward:0 return:2 observation:1 action:0 reward:0 again "
        "return:2 observation:0 action:0 reward:0 return:2 observation:1 action:0 reward:1 again "
        "return:2 observation:0 action:2 reward:1 return:1 observation:1 action:1 reward:1 done "
        "return:2 observation:0 action:0 reward:1 return:1 observation:1 action:0 reward:1 done"
    )
    assert [word for word, loss in zip(text.split(), learned, strict=True) if loss] == [
        word for word in text.split() if word.startswith("action")
    ]


def test_the_same_bins_whatever_the_chains_and_every_number_of_vectors():
    attempts = [
        episode("a", [0.5, 1], [[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]]),
        episode("a", [0, 0], [[0, 0]] * 2, [[0] * 3] * 2),
    ]
    codec = Codec.fit(attempts, 4)
    assert [c.name for c in codec.columns] == [
        "return",
        "observation0",
        "observation1",
        "observation2",
        "action0",
        "action1",
        "reward",
    ]
    ids, learned = codec.chain(attempts)
    assert len(ids) == 2 * (2 * 7 + 1)
    assert learned.sum() == 2 * 2 * 2
    assert codec.vocab_size == len(codec.words) == len(set(codec.words))
    steps = attempts[0].numbers(1.5)
    values = np.array(
        [
            [
                c.values[token - offset]
                for c, offset, token in zip(codec.columns, codec.offsets, row, strict=True)
            ]
            for row in codec.encode(steps)
        ]
    )
    np.testing.assert_array_equal(values, steps)


@pytest.mark.parametrize("trajectories", [1, 2, 3])
def test_written_chains_are_samples_of_the_loader(tmp_path, trajectories):
    attempts = drawn()
    chains = Chains(trajectories=trajectories, seq_length=6 * 13)
    for name in "ab":
        written = write_chains(attempts, tmp_path / name, chains)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert written.tokens == 12 * 13
    assert written.learned == 12 * 3
    assert written.left_over == 0
    assert written.samples == 2
    codec = Codec.load(tmp_path / "a")
    assert codec.words == Codec.fit(attempts, 32).words  # of any number of trajectories
    samples = Conversations(str(tmp_path / "a"), codec.vocab_size, 6 * 13, check=True)
    for number in range(2):
        sample = samples.sample(number, 0)
        expected = [codec.words[token].startswith("action") for token in sample["labels"]]
        assert sample["loss_mask"].bool().tolist() == expected
        assert sample["starts"].nonzero().flatten().tolist() == list(
            range(0, 78, 13 * trajectories)
        )
    dealt = np.split(open_indexed(tmp_path / "a").token_ids(), 12)
    straight = [codec.chain([attempt])[0] for attempt in attempts]
    unmarked = [0, 4, 8, 12]  # targets and the mark are of the chain
    steps = sorted(tuple(np.delete(ids, unmarked)) for ids in dealt)
    assert steps == sorted(
        tuple(np.delete(ids, unmarked)) for ids in straight
    )  # every attempt, once
    assert open_indexed(f"{tmp_path / 'a'}{LOSS_MASK}").tokens == 12 * 13


def test_files_of_both_kinds_give_the_same_episode(tmp_path):
    (tmp_path / "task").mkdir()
    action, reward = np.array([[9.0], [1], [2]]), np.array([[0.0], [0.5], [1]])
    np.savez(
        tmp_path / "task" / "a.npz",
        observation=np.arange(6.0).reshape(3, 2),
        action=action,
        reward=reward,
    )
    row = {"task": "t", "observation": [[0, 1], [2, 3]], "action": [1, 2], "reward": [0.5, 1]}
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    from_npz, other = read_episodes([tmp_path / "task" / "a.npz", tmp_path / "b.jsonl"])
    assert (from_npz.task, other.task) == (str(tmp_path / "task"), "t")
    np.testing.assert_array_equal(from_npz.numbers(2), other.numbers(2))
    np.testing.assert_array_equal(from_npz.numbers(2), [[2, 0, 1, 1, 0.5], [1.5, 2, 3, 2, 1]])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"observation": [0], "action": [0]}, "line 1 lacks reward"),
        ({"observation": [0, 1], "action": [0], "reward": [0]}, "each step needs one row of each"),
        ({"observation": [0], "action": ["left"], "reward": [0]}, "a value that is not a number"),
        ({"observation": [0], "action": [0], "reward": [float("inf")]}, "not finite"),
        ([1], "not a JSON object"),
    ],
)
def test_what_is_no_episode_is_named(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row).replace("Infinity", "1e999") + "\n")
    with pytest.raises(DataError, match=message):
        list(read_episodes([path]))
    (broken := tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is damaged"):
        list(read_episodes([broken]))


def test_chains_that_cannot_be_are_refused(tmp_path):
    attempts = drawn()
    with pytest.raises(DataError, match="no task has that many episodes"):
        write_chains(attempts, tmp_path / "a", Chains(trajectories=7))
    with pytest.raises(DataError, match="a sequence has 26 tokens"):
        write_chains(attempts, tmp_path / "a", Chains(trajectories=2, seq_length=20))
    with pytest.raises(DataError, match="prepare each size separately"):
        write_chains(
            [*attempts, episode("0", [1], [[1, 2]])], tmp_path / "a", Chains(trajectories=1)
        )
    assert list(Path(tmp_path).iterdir()) == []
    with pytest.raises(DataError, match="has no bins"):
        Codec.load(tmp_path / "a")
