"""What ranks say of a peer that does not answer."""

import io
import os
import signal
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.lost import tell_lost
from runtime.processes import join
from runtime.ranks import run_ranks
from runtime.slurm import AGAIN, ENDINGS
from train.run import exit_status

STOPPED = 1


def left_alone(rank: int, world_size: int, folder: Path, how: str) -> str:
    """What a rank says while another one is stopped, and exit_status's verdict; then all join anew, for run_ranks."""
    store = dist.FileStore(str(folder / "pids"), world_size)
    store.set(f"{rank}", str(os.getpid()))
    dist.destroy_process_group()
    join("gloo", timedelta(seconds=4), dist.FileStore(str(folder / "store"), world_size), rank, world_size)
    dist.barrier()
    errors = io.StringIO()
    if rank == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with redirect_stderr(errors):
            assert exit_status(lambda _: collective(rank, world_size, how), []) == 1
        if rank == 0:
            store.wait([f"{other} has spoken" for other in range(world_size) if other not in (0, STOPPED)])
            os.kill(int(store.get(f"{STOPPED}")), signal.SIGCONT)
        store.set(f"{rank} has spoken", "")
    dist.destroy_process_group()
    join(store=dist.FileStore(str(folder / "anew"), world_size), rank=rank, world_size=world_size)
    return errors.getvalue()


def collective(rank: int, world_size: int, how: str) -> None:
    given, got = torch.ones(1000), torch.ones(1000)
    for _ in range(3):
        if how == "ring":
            receive = dist.P2POp(dist.irecv, got, (rank - 1) % world_size)
            send = dist.P2POp(dist.isend, given, (rank + 1) % world_size)
            for work in dist.batch_isend_irecv([receive, send]):
                work.wait()
        else:
            dist.all_reduce(given)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "all_reduce"])
def test_a_stopped_rank_is_named_once(how: str, tmp_path: Path) -> None:
    said = [lines for lines in run_ranks(left_alone, 4, tmp_path, how) if lines]
    assert len(said) == 1, said
    assert said[0].startswith(f"rank {STOPPED} on {os.uname().nodename} did not answer (")
    assert said[0].count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Timed out waiting 600000ms for recv operation to complete",
            "a peer of it did (Timed out waiting 600000ms for",
        ),
        ("[pair.cc:553] Connection closed by peer [10.0.0.1]:62110. This is typical", "peer [10.0.0.1]:62110)\n"),
        ("[pair.cc:537] Read error [10.0.0.1]:63152: Connection reset by peer. This is", "reset by peer)\n"),
        ("wait timeout after 1000ms, keys: /default_pg/0", "(wait timeout after 1000ms, keys: /default_pg/0)\n"),
    ],
)
def test_a_rank_that_cannot_ask_the_others(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENDINGS, str(tmp_path / "endings"))
    assert tell_lost(RuntimeError(text), 1.0)
    said = capsys.readouterr().err
    assert said.startswith("rank 0 ")
    assert words in said
    assert said.count("\n") == 1
    assert (tmp_path / "endings" / "rank-0").read_text() == f"{AGAIN} {said}"


def test_another_error_is_not_a_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert not tell_lost(RuntimeError("DataLoader timed out after 30 seconds"), 1.0)
    assert capsys.readouterr().err == ""
