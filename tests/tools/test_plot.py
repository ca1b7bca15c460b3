"""Pictures: what the layout pictures show equals the plan and the mask.

The loss comes from metrics.jsonl.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from parallel.context import METHODS
from tools import plot
from tools.common.layouts import drawing as layouts
from tools.common.layouts import figure

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ulysses"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_length", "size"), [(16, 1), (30, 3), (64, 8)])
def test_rounds_cover_the_mask_once_by_the_owner_of_what_stays(method, causal, seq_length, size):
    shown = layouts.drawing(method, seq_length, size, causal)
    length = shown.plan.padded_len
    covered = np.sum([computed >= 0 for computed in shown.rounds], axis=0)
    mask = (
        np.tril(np.ones((length, length), dtype=int))
        if causal
        else np.ones((length, length), dtype=int)
    )
    valid = shown.plan.seq_len
    assert np.array_equal(covered[:valid, :valid], mask[:valid, :valid])
    assert covered.max() == 1
    for index, computed in enumerate(shown.rounds):
        queries, keys = np.nonzero(computed >= 0)
        stationary = keys if method == "allgather_q" else queries
        assert np.array_equal(computed[computed >= 0], shown.owners[stationary])
        pairs = [int((computed == rank).sum()) for rank in range(size)]
        assert (
            pairs
            == [shown.plan.rounds(rank)[index].pairs for rank in range(size)]
            == shown.work[index].tolist()
        )


def test_striping_shows_its_balance():
    ring, striped, zigzag = (layouts.drawing(name, 32, 4) for name in ("ring", "striped", "zigzag"))
    assert (ring.slowest, striped.slowest, zigzag.slowest) == (36 + 3 * 64, 4 * 36, 36 + 3 * 32)
    assert ring.even == striped.even == zigzag.even == 32 * 33 / 2 / 4


def seen_by_brute_force(lengths, causal, window):
    place, document = np.arange(sum(lengths)), np.repeat(np.arange(len(lengths)), lengths)
    apart = place[:, None] - place[None, :]
    visible = document[:, None] == document[None, :]
    visible &= apart >= 0 if causal else True
    return visible & (abs(apart) <= window) if window else visible


@pytest.mark.parametrize("method", layouts.PACKED)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 8), (False, 3)])
def test_packed_rounds_cover_the_mask_once(method, causal, window):
    if not causal and method in ("striped", "zigzag"):
        return  # refused under full attention
    lengths = [20, 5, 11, 3, 14, 7, 4]
    reach = (window, 0 if causal else window) if window else None
    shown = layouts.drawing(method, 64, 4, causal, (0, *np.cumsum(lengths).tolist()), reach)
    covered = np.sum([computed >= 0 for computed in shown.rounds], axis=0)
    assert np.array_equal(covered, seen_by_brute_force(lengths, causal, window))
    assert 0 < shown.rows < 3 * 64
    assert shown.slowest == max(shown.work.sum(axis=0))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seq-length", "6", "--size", "3", "--full", "--methods", "ring", "allgather"],
        ["--documents", "9", "4", "--window", "5", "--size", "2", "--methods", "exchange"],
    ],
)
def test_layout_is_written(tmp_path, arguments, capsys):
    output = tmp_path / "new" / "layouts.png"
    assert plot.main(["layout", *arguments, "--output", str(output)]) == 0
    assert output.read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f"written: {output}\n"


def write_run(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_loss_of_several_runs_is_written(tmp_path):
    lines = [
        {"iteration": i, "lm_loss": 5 / i, "validation_loss": 6.0 if i == 3 else None}
        for i in range(1, 4)
    ]
    runs = [write_run(tmp_path / name, lines) for name in ("a", "b")]
    axes = plot.losses_figure(runs, None, "iteration", 0.0).axes[0]
    assert [line.get_label() for line in axes.lines] == [
        "a, training",
        "a, validation",
        "b, training",
        "b, validation",
    ]
    assert axes.lines[0].get_xydata().tolist() == [[1, 5], [2, 2.5], [3, 5 / 3]]
    assert axes.lines[1].get_xydata().tolist() == [[3, 6]]
    output = tmp_path / "loss.png"
    assert plot.main(["losses", *map(str, runs), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(PNG)


def test_an_iteration_done_again_counts_as_last_written(tmp_path):
    run = write_run(
        tmp_path / "run",
        [{"iteration": i, "lm_loss": loss} for i, loss in ((1, 9.0), (2, 8.0), (2, 7.0))],
    )
    assert plot.read_curves(run, ["lm_loss"], "iteration")["lm_loss"] == [(1, 9.0), (2, 7.0)]


def test_other_fields_are_drawn_by_tokens_or_hours_and_smoothed(tmp_path):
    lines = [
        {
            "iteration": n,
            "lm_loss": 1.0,
            "grad_norm": norm,
            "consumed_tokens": 8 * n,
            "iteration_time_ms": 1.8e6,
        }
        for n, norm in enumerate((4.0, 2.0, 0.0), 1)
    ]
    run = write_run(tmp_path / "run", lines)
    first, second = plot.losses_figure([run], ["grad_norm", "lm_loss"], "hours", 0.5).axes
    assert (first.get_ylabel(), second.get_ylabel()) == ("grad norm", "loss (nats per token)")
    # By hand: 4, (4/4 + 2/2) / (3/4), (4/8 + 2/4) / (7/8).
    assert first.lines[0].get_xydata() == pytest.approx(
        np.array([[0.5, 4], [1, 8 / 3], [1.5, 8 / 7]])
    )
    together = plot.losses_figure(
        [run], ["lm_loss", "grad_norm", "validation_loss"], "iteration", 0
    ).axes
    assert [axes.get_ylabel() for axes in together] == ["loss (nats per token)", "grad norm"]
    tokens = plot.read_curves(run, ["lm_loss"], "tokens")["lm_loss"]
    assert tokens == [(8, 1.0), (16, 1.0), (24, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("layout --methods rong", "'rong' does not exist"),
        ("layout --methods ulysses", "ulysses splits heads"),
        ("layout --seq-length 100000", "--seq-length is 100000"),
        ("layout --size 0", "is 0"),
        ("layout --documents 4 5 --seq-length 10", "--documents have 9 tokens"),
        ("losses missing", "missing does not exist"),
        ("losses broken.jsonl", "broken.jsonl, line 1 is not the record of an iteration"),
        (
            "losses empty.jsonl",
            "has no lm_loss and no diffusion_loss and no validation_loss; it has no iteration",
        ),
        ("losses one.jsonl --metric speed", "has no speed; it has iteration, lm_loss"),
        ("losses one.jsonl --smooth 1", "--smooth is 1.0"),
        ("losses missing --output ..", "--output is .., but that is a folder; give a file"),
    ],
)
def test_what_cannot_be_drawn_is_said_once_and_nothing_written(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text("[1, 2]\n")
    Path("empty.jsonl").touch()
    Path("one.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    command, *more = arguments.split()
    assert plot.main([command, "--output", "out.png", *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not Path("out.png").exists()


def test_captions_count_as_one_says_it():
    assert [figure.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 113)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "111th",
        "113th",
    ]
