"""Attempts in a context.

Roll-outs beside whole forwards and players written by hand, and runs on 4 processes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model.generate import Draw
from papers.convergence import train
from papers.trajectories import attempts, doors
from papers.trajectories.doors import BEST, DOORS, ROOMS, STEPS
from papers.trajectories.episodes import Chains, Codec, write_chains
from runtime.ranks import run_ranks
from train.config.language import parse_args, validate
from train.generation import opened

SIZE = attempts.Size(tasks=8, iterations=2, unseen=6)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    path = tmp_path_factory.mktemp("doors") / "4"
    episodes = doors.episodes(doors.tasks(0, 0, 8), 16, 0)
    write_chains(episodes, path, Chains(trajectories=4, seq_length=8 * 17))
    return path


class Player:
    """Reads what a model would, and opens the door that it saw lead on.

    If it saw none, it opens one that it has not seen fail.
    """

    def __init__(self, codec, tasks):
        self.codec, self.rng, self.held = codec, np.random.default_rng(0), []
        self.every, self.knows = np.arange(tasks), np.zeros((tasks, doors.ROOMS, DOORS))

    def __call__(self, tokens, positions, ends):
        before = sum(cached.shape[1] for cached in self.held)
        self.held.append(tokens.numpy())
        assert positions.tolist() == [list(range(before, before + tokens.shape[1]))]
        assert ends.tolist() == [before + tokens.shape[1]] * len(tokens)
        if before:
            passed = self.held[-1][:, 1] != self.codec.words.index("reward:0")
            self.knows[self.every, self.room, self.door] = np.where(passed, 1, -1)
        self.room = self.held[-1][:, -1] - self.codec.offsets[1]
        self.door = (
            2 * self.knows[self.every, self.room] + self.rng.random((len(tokens), DOORS))
        ).argmax(1)
        return torch.from_numpy(self.door + self.codec.offsets[2])


def test_who_remembers_gains_and_gains_nothing_where_tasks_are_shuffled(prefix):
    codec, right = Codec.load(prefix), doors.tasks(0, 100, 40)
    assert sum(word.startswith("action") for word in codec.words) == DOORS
    figures = attempts.figures(attempts.roll_out(Player(codec, 40), codec, right, 32))
    more, error = attempts.gain(figures, 16, figures)
    assert more > 10 * error
    assert figures["mean"][-1] == BEST
    shuffled = attempts.figures(
        attempts.roll_out(Player(codec, 40), codec, right, 16, shuffled=True)
    )
    more, error = attempts.gain(shuffled, 16, shuffled)
    assert more <= attempts.ERRORS * error


def test_a_roll_out_has_the_tokens_of_a_chain(prefix):
    codec, right = Codec.load(prefix), doors.tasks(0, 100, 5)
    player = Player(codec, 5)
    returns = attempts.roll_out(player, codec, right, 12)
    for task, row in enumerate(np.concatenate(player.held, 1).tolist()):
        words = [codec.words[token] for token in row]
        doors_opened = [int(word.split(":")[1]) for word in words if word.startswith("action")]
        world, total, position = doors.Rooms(right[task : task + 1]), 0, 0
        for step, door in enumerate(doors_opened):
            expected = [f"return:{BEST - total}", f"observation:{world.room[0]}", f"action:{door}"]
            total += int(world.open(np.array([door]))[0])
            assert words[position : position + 3] == expected
            position += 4
            if step % STEPS == STEPS - 1:
                assert words[position] == ("done" if total == BEST else "again")
                assert total == returns[task, step // STEPS]
                world, total, position = doors.Rooms(right[task : task + 1]), 0, position + 1


def flags_of(prefix, save, cp):
    """The flags of a run on short samples, one process or several."""
    flags = attempts.command_line(4, prefix, save, 3)
    flags += ["--seq-length", "136", "--micro-batch-size", "2", "--context-parallel-size", str(cp)]
    return [*flags, "--split", "1,0,0"]


@pytest.mark.slow
def test_losses_on_four_processes_equal_one_and_the_cache_equals_whole_forwards(prefix, tmp_path):
    alone, shared = (
        run_ranks(train, cp, flags_of(prefix, tmp_path / str(cp), cp))[0] for cp in (1, 4)
    )
    np.testing.assert_allclose(shared, alone, rtol=0, atol=2e-6)
    assert alone[-1] < alone[0]
    run_ranks(attempts.train, 1, flags_of(prefix, tmp_path / "run", 1))
    codec, right = Codec.load(prefix), doors.tasks(0, 100, 3)
    returns = attempts.play(tmp_path / "run", codec, right, 4)
    columns, first = [], int(codec.offsets[codec.acts][0])
    draw = Draw(
        temperature=attempts.TEMPERATURE, generator=torch.Generator().manual_seed(attempts.SEED)
    )
    with torch.no_grad(), opened(tmp_path / "run") as writer:

        def whole(tokens, positions, ends):
            columns.append(tokens)
            hidden = writer._part.hidden(torch.cat(columns, 1))
            return first + draw(
                hidden[:, -1], writer._part.project(hidden)[:, -1, first : first + DOORS]
            )

        np.testing.assert_array_equal(attempts.roll_out(whole, codec, right, 4), returns)


def test_every_run_is_one_that_the_entry_takes_with_as_many_tokens():
    batches = set()
    for trajectories in attempts.CHAIN_LENGTHS:
        config = parse_args(attempts.command_line(trajectories, Path("data"), Path("run"), 10))
        validate(config, attempts.RANKS)
        batches.add((config.train.seq_length, config.train.global_batch_size))
        assert config.mesh.context_parallel_size == (2 if trajectories == 64 else 1)
    assert batches == {(1088, 2)}


def runs(**last):
    """Runs whose first attempts return 1, and all later ones as named."""
    lengths = {"4": 4, "64": 64, "shuffled": 64}
    return {
        name: {"mean": [1.0] + [last[name]] * (lengths[name] - 1), "error": [0.1] * lengths[name]}
        for name in last
    }


@pytest.mark.parametrize(
    ("last", "wrong"),
    [
        ({"4": 2.0, "64": 4.0, "shuffled": 1.1}, []),
        ({"64": 1.1}, ["attempt 16 above the first, 64 in the context"]),
        ({"4": 3.9, "64": 4.0}, ["the last of 64 in the context above the last of 4"]),
        ({"shuffled": 2.0}, ["attempt 16 above the first, of shuffled tasks (control)"]),
    ],
)
def test_what_the_table_claims_is_checked(last, wrong):
    lines, failures = attempts.compared(runs(**last))
    assert failures == wrong
    assert len(lines) == ("64" in last) + ("4" in last) + ("shuffled" in last)


@pytest.mark.slow
def test_the_whole_is_run_once_and_kept(tmp_path, capsys):
    flags = [f"--{name}={value}" for name, value in vars(SIZE).items()]
    flags += ["--results", str(tmp_path / "results"), "--data", str(tmp_path / "data")]
    assert attempts.main(flags) == 1  # untrained, it gains nothing
    assert "the results contradict the paper" in capsys.readouterr().err
    path = tmp_path / "results" / "ring_rl.jsonl"
    assert len(path.read_text().splitlines()) == 1 + 4 + 2 + 1
    assert json.loads(path.read_text().splitlines()[0])["settings"] == vars(SIZE)
    assert path.with_suffix(".png").exists()
    attempts.main(flags)
    assert "nothing is trained" in capsys.readouterr().out
    assert attempts.main([*flags, "--iterations", "3"]) == 1
    assert "has runs with" in capsys.readouterr().err


def test_the_committed_runs_are_all_and_as_claimed():
    table = attempts.read_runs(attempts.RESULTS)
    assert table["settings"] == vars(attempts.Size())
    assert set(table["runs"]) == {
        *map(str, attempts.CHAIN_LENGTHS),
        attempts.CONTROL,
        "players",
        "perfect",
    }
    lines, wrong = attempts.compared(table["runs"])
    assert len(lines) == 3
    assert wrong == []


def test_tasks_are_different_and_of_their_seed_alone():
    drawn = doors.tasks(0, 0, 3200)
    assert drawn.shape == (3200, ROOMS)
    assert (drawn.min(), drawn.max()) == (0, DOORS - 1)
    assert len({tuple(row) for row in drawn.tolist()}) == 3200
    np.testing.assert_array_equal(doors.tasks(0, 3000, 200), drawn[3000:])
    assert not np.array_equal(doors.tasks(1, 0, 3200), drawn)


def test_histories_are_of_the_world_and_a_pure_function_of_the_seed():
    right = doors.tasks(0, 0, 20)
    rooms, opened, rewards = doors.histories(right, 5, 3)
    for array, other in zip((rooms, opened, rewards), doors.histories(right, 5, 3), strict=True):
        np.testing.assert_array_equal(array, other)
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
    mixed, perfect = (
        doors.histories(right, 32, 0, perfect=is_perfect)[2].sum(-1).mean(0)
        for is_perfect in (False, True)
    )
    assert perfect[0] < 1.7
    assert perfect[-1] == BEST
    assert mixed[0] < mixed[7] < mixed[-1] < BEST
    assert (mixed[4:] < perfect[4:]).all()


def test_episodes_are_the_histories():
    right = doors.tasks(0, 0, 2)
    episodes, (rooms, opened, rewards) = doors.episodes(right, 3, 1), doors.histories(right, 3, 1)
    assert [episode.task for episode in episodes] == ["0"] * 3 + ["1"] * 3
    left = rewards[1, 2].sum() - (rewards[1, 2].cumsum() - rewards[1, 2])
    expected = np.stack((left, rooms[1, 2], opened[1, 2], rewards[1, 2]), -1)
    np.testing.assert_array_equal(episodes[5].numbers(episodes[5].total), expected)
