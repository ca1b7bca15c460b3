"""Ranks that do not answer, or make no step, are named, with the stacks of all."""

import io
import os
import signal
import socket
import time
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.processes import join
from runtime.ranks import run_ranks
from runtime.slurm import AGAIN, ENDINGS
from runtime.together import report_unresponsive_ranks
from runtime.watchdog import EXCLUDE, FOLDER, LEAST_STEPS, Process, Watchdog, own_process, write_stacks_of
from tests.runtime.test_signals import forked
from train.run import exit_status

HOST = socket.gethostname()
STOPPED = 1


def stuck(rank, world_size, folder, how):
    """Make some steps; then rank 1 is stopped, or waits elsewhere, and the others wait for it."""
    pair = dist.new_group([0, 1], group_desc="pair")
    with Watchdog(2.0, 1.0, folder) as watchdog:
        for _ in range(LEAST_STEPS):
            dist.all_reduce(torch.ones(1))
            watchdog.beat(0.01)
        if rank == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and how == "elsewhere":
            dist.broadcast(torch.ones(2), 0, group=pair)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "words", "nodes"),
    [
        ("stopped", f"; rank 1 on {HOST} did not answer: stopped, hanging or lost; ", f"{HOST}\n"),
        pytest.param(
            "elsewhere",
            f"; rank 1 on {HOST} waits in broadcast 1 of pair (at tests/runtime/test_watchdog.py:38); ",
            "",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_hangs_is_named_and_all_stacks_are_written(how, words, nodes, tmp_path):
    with pytest.raises(RuntimeError, match=f"died without a word, exit code ({AGAIN}|-9)"):
        run_ranks(stuck, 3, str(tmp_path), how)
    said = (tmp_path / FOLDER / "report.txt").read_text()
    assert said.startswith("hung: no step in ")
    assert words in said
    waiting = f"rank 0 on {HOST}, rank 2 on {HOST} waits in all_reduce 6 of default_pg (at tests/runtime/test_watchdog"
    assert waiting in said
    assert (tmp_path / EXCLUDE).read_text() == nodes
    for rank in range(3):
        stacks = (tmp_path / FOLDER / f"rank-{rank}.txt").read_text()
        assert 'test_watchdog.py", line' in stacks.partition("Native")[0 if rank != 1 or how != "stopped" else 2]
        assert "Native, per thread: " in stacks
    assert "did not answer" in (tmp_path / FOLDER / "rank-1.txt").read_text() or how != "stopped"


def at_work(rank, world_size, folder):
    """A save that takes longer than a step may."""
    with Watchdog(3.0, 0.4, folder) as watchdog:
        for _ in range(LEAST_STEPS):
            watchdog.beat(0.2)
        with watchdog.paused():
            time.sleep(1.5)
    return not any(Path(folder).iterdir())


def test_a_pause_is_no_hang(tmp_path):
    assert run_ranks(at_work, 1, str(tmp_path)) == [True]


def test_a_stopped_process_is_woken_for_its_stacks_and_knows_it_before_it_runs(tmp_path, monkeypatch):
    """Else it may write its own file of stacks over the one that says that it did not answer."""

    def body(report):
        own = own_process.__wrapped__()  # the tests' own process may be known already
        os.write(report, f". {own.born} {own.stacks}".encode())
        os.kill(own.pid, signal.SIGSTOP)
        time.sleep(60)

    child, reading = forked(body)
    born, stacks = os.read(reading, 99).decode().split()
    process, sizes, plain = Process(child, born, int(stacks)), [], Process.send

    def send(of, *signals):
        sizes.append(os.stat(f"/proc/{child}/fd/{stacks}").st_size)
        plain(of, *signals)

    monkeypatch.setattr(Process, "send", send)
    os.waitpid(child, os.WUNTRACED)
    with (tmp_path / "stacks").open("w+") as out:
        write_stacks_of(out, process, time.monotonic() + 10)
        out.seek(0)
        said = out.read()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert sizes == [1]
    assert said.startswith(f"process {child} did not answer\n")
    assert 'test_watchdog.py", line' in said.partition("Python:")[2]


def left_alone(rank, world_size, folder, how):
    """A rank's messages and exit status while another one is stopped; then all join anew, for run_ranks."""
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


def collective(rank, world_size, how):
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
def test_a_stopped_rank_is_named_once(how, tmp_path):
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
def test_a_rank_that_cannot_ask_the_others(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ENDINGS, str(tmp_path / "endings"))
    assert report_unresponsive_ranks(RuntimeError(text), 1.0)
    said = capsys.readouterr().err
    assert said.startswith("rank 0 ")
    assert words in said
    assert said.count("\n") == 1
    assert (tmp_path / "endings" / "rank-0").read_text() == f"{AGAIN} {said}"


def test_another_error_is_not_a_peers(capsys):
    assert not report_unresponsive_ranks(RuntimeError("DataLoader timed out after 30 seconds"), 1.0)
    assert capsys.readouterr().err == ""
