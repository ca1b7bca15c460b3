"""Episodes to chains from the command line.

What it writes, what prepare_data's check says of it, what it refuses.
"""

import json

import numpy as np

from papers.trajectories.prepare import main
from tools.prepare_data import main as check


def write_episodes(folder, count=6, steps=4):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        observation, action = (
            rng.standard_normal((steps + 1, 2)),
            rng.standard_normal((steps + 1, 1)),
        )
        np.savez(
            folder / f"{number}.npz",
            observation=observation,
            action=action,
            reward=rng.random((steps + 1, 1)),
        )


def test_a_folder_of_npz_becomes_chains_that_can_be_read(tmp_path, capsys):
    write_episodes(tmp_path / "buffer")
    flags = [
        "--input",
        str(tmp_path / "buffer"),
        "--output-prefix",
        str(tmp_path / "c"),
        "--bins",
        "4",
    ]
    assert main([*flags, "--trajectories", "4"]) == 0
    out = capsys.readouterr().out
    assert (
        "1 chains of 4 attempts at 1 tasks, 84 tokens in 1 samples, 16 of them actions, which "
        "carry loss"
    ) in out
    assert "2 episodes are left over" in out
    assert "--sft --seq-length" in out
    record = json.loads((tmp_path / "c.json").read_text())
    assert [len(column["values"]) for column in record["columns"]] == [4] * 5
    assert check(["--check", str(tmp_path / "c"), "--inspect", "1", "--whole"]) == 0
    assert "⟦action:" in capsys.readouterr().out
    assert main([*flags, "--trajectories", "4"]) == 1
    (tmp_path / "empty").mkdir()
    assert (
        main(
            [
                "--input",
                str(tmp_path / "empty"),
                *flags[2:],
                "--trajectories",
                "2",
                "--output-prefix",
                "new",
            ]
        )
        == 1
    )
    refusal, empty = capsys.readouterr().err.splitlines()
    assert "exists; give another" in refusal
    assert "there is no episode in" in empty
