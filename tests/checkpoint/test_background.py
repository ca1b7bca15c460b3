"""Saves by a process beside the training: what they hold, and what is left when it is lost."""

from pathlib import Path
from typing import Any

import pytest

from checkpoint.api import load_checkpoint, save_checkpoint
from checkpoint.background import Background
from checkpoint.keeping import Keeper
from checkpoint.search import find_checkpoint, saved_iterations
from runtime.errors import UserError
from testing.ranks import run_ranks
from tests.parallel.tiny import ARCHITECTURE, build, equal, train, whole_tensors


def begin(background: Background, folder: Path, iteration: int, model: Any, optimizer: Any) -> None:
    save_checkpoint(folder, iteration, model, optimizer, architecture=ARCHITECTURE, extra={}, beside=background)


def _trained_while_saving(rank: int, size: int, folder: Path) -> tuple[bool, bool, list[int]]:
    background = Background(Keeper(last=2, every=None))
    model, optimizer = build(0, sharded=True)
    saved = {}
    for iteration in (1, 2, 3):  # the first without moments: the memory grows
        begin(background, folder, iteration, model, optimizer)
        saved = {name: value.clone() for name, value in whole_tensors(model, optimizer).items()}
        train(model, optimizer, range(3))  # what is written must be as it was
        assert background.wait() == folder / f"iter_{iteration:07d}"
    after = whole_tensors(model, optimizer)
    model, optimizer = build(1, sharded=True)
    load_checkpoint(find_checkpoint(folder), model, optimizer, ARCHITECTURE)
    loaded = whole_tensors(model, optimizer)
    process = background._beside.process
    if rank == 1:
        process.kill()
    begin(background, folder, 4, model, optimizer)
    with pytest.raises(UserError, match="the process that writes checkpoints ended with status -9"):
        background.wait()
    assert not background.under_way
    return equal(loaded, saved), equal(loaded, after), saved_iterations(folder)


def test_what_is_written_is_the_state_at_the_save_and_a_lost_process_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for exact, trained, left in run_ranks(_trained_while_saving, 2, tmp_path):
        assert exact
        assert not trained, "the comparison can tell states apart"
        assert left == [3, 2]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert not list(tmp_path.glob("*.tmp"))
