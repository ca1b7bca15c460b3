"""A lock file has one holder, whether or not the file system has locks that other nodes see."""

import errno
import fcntl
import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from runtime import locks
from runtime.locks import InUseError, Lock
from tests.runtime.test_signals import forked, status_of

TOKEN = "0" * 32
ELSEWHERE = f"process 7 on node9, Slurm job 77, since 2026-11-22 02:30:01 UTC\n{TOKEN}\n"
HERE = f"process {2**22 + 1} on {socket.gethostname()}, since 2026-11-22 02:30:01 UTC\n{TOKEN}\n"
"""The lock of a process that does not exist: no pid is as high."""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 1.5)


@pytest.fixture
def no_locks(monkeypatch):
    """As on a file system without locks; the processes forked from this one have none either."""

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)


@contextmanager
def beating(path, record=ELSEWHERE):
    """A process that holds the file, by default one of another host."""
    path.write_text(record)
    over = threading.Event()

    def beat():
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def holder(path, ends=False):
    def body(report):
        lock = Lock(path, wait=False)
        os.write(report, b".")
        time.sleep(60)
        lock.release()

    child, _ = forked(body)
    try:
        yield child
    finally:
        if not ends:
            os.kill(child, signal.SIGKILL)
            status_of(child)


def test_the_record_says_who_since_when_and_how_to_end_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with holder(tmp_path / ".lock") as child, pytest.raises(InUseError) as caught:
        Lock(tmp_path / ".lock", wait=False)
    host = re.escape(socket.gethostname())
    assert re.fullmatch(
        rf"{tmp_path} is in use by process {child} on {host}, Slurm job 4711, "
        r"since 20..-..-.. ..:..:.. UTC "
        r"\(lock \.lock\); wait until it ends or end it \(scancel 4711\)",
        str(caught.value),
    )
    assert caught.value.again, "this job's last start, which ends by itself"
    monkeypatch.setenv("SLURM_JOB_ID", "471")
    with beating(tmp_path / ".lock"), pytest.raises(InUseError) as caught:
        Lock(tmp_path / ".lock", wait=False)
    assert not caught.value.again


def test_another_hosts_holder_that_beats_keeps_it_though_no_lock_is_seen(quick, tmp_path):
    """As where each node of a shared file system sees its own locks alone."""
    with (
        beating(tmp_path / ".lock"),
        pytest.raises(InUseError, match=r"process 7 on node9, Slurm job 77, since 2026"),
    ):
        Lock(tmp_path / ".lock", wait=False)
    assert (tmp_path / ".lock").read_text() == ELSEWHERE


def test_another_hosts_holder_without_a_beat_is_dead(quick, tmp_path, capsys):
    (tmp_path / ".lock").write_text(ELSEWHERE)
    lock = Lock(tmp_path / ".lock", wait=False)
    assert "belongs to process 7 on node9" in capsys.readouterr().err
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    lock.release()
    assert not list(tmp_path.iterdir())


def test_without_locks_the_beat_tells_a_living_holder_from_a_dead_one(
    quick, no_locks, tmp_path, capsys
):
    with (
        holder(tmp_path / ".lock") as child,
        pytest.raises(InUseError, match=f"process {child} on "),
    ):
        Lock(tmp_path / ".lock", wait=False)
    capsys.readouterr()
    Lock(tmp_path / ".lock", wait=False).release()
    assert capsys.readouterr().err == "", "its process is gone from this host: nothing to watch for"


def taken_by(path, rounds):
    def body(report):
        os.write(report, b".")
        won = 0
        while not (path.parent / "go").exists():
            pass
        for _ in range(rounds):
            try:
                mine = Lock(path, wait=False)
            except InUseError:
                continue
            won += 1
            alone = os.open(
                path.parent / "alone", os.O_CREAT | os.O_EXCL
            )  # a second holder would fail
            time.sleep(0.005)
            os.close(alone)
            os.unlink(path.parent / "alone")
            mine.release()
        os._exit(20 + min(won, 100))

    return body


@pytest.mark.parametrize("left", ["", ELSEWHERE, HERE], ids=["nothing", "elsewhere", "here"])
def test_of_many_that_start_at_once_one_at_a_time_has_it(left, quick, no_locks, tmp_path):
    if left:
        (tmp_path / ".lock").write_text(left)
    children = [
        forked(taken_by(tmp_path / ".lock", 1 if left == ELSEWHERE else 10))[0] for _ in range(5)
    ]
    (tmp_path / "go").touch()
    wins = [status_of(child) - 20 for child in children]
    assert min(wins) >= 0, "two had it at once"
    assert sum(wins) >= 1
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("removed", [True, False])
def test_a_holder_that_hung_while_another_took_its_file_or_wrote_into_it_ends(
    removed, quick, tmp_path, capfd
):
    with holder(tmp_path / ".lock", ends=True) as child:
        if removed:
            (tmp_path / ".lock").unlink()
            time.sleep(0.2)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a file that is only gone says nothing"
        (tmp_path / ".lock").write_text(ELSEWHERE)
        assert status_of(child) == 1
    assert f"error: {tmp_path} was taken over by process 7 on node9" in capfd.readouterr().err


def test_a_dead_host_whose_lock_the_server_keeps_is_dead(quick, tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text(ELSEWHERE)
    dead, lock = (tmp_path / ".lock").stat().st_ino, locks._lock
    monkeypatch.setattr(
        locks, "_lock", lambda handle: os.fstat(handle).st_ino != dead and lock(handle)
    )
    os.link(tmp_path / ".lock", tmp_path / "kept")  # so that its number is not used again
    Lock(tmp_path / ".lock", wait=False).release()


def test_a_file_system_that_fails_is_not_one_without_locks(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Input/output error"):
        Lock(tmp_path / ".lock", wait=False)
    assert os.listdir("/proc/self/fd") == before


def test_another_users_process_on_this_host_is_no_dead_one(quick, no_locks, tmp_path, monkeypatch):
    """It may not be signalled, and holds the file as long as it touches it."""

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    with (
        beating(tmp_path / ".lock", HERE),
        pytest.raises(InUseError, match=rf"process {2**22 + 1} on"),
    ):
        Lock(tmp_path / ".lock", wait=False)
    monkeypatch.undo()
    assert not locks._runs(2**22 + 1), "negative control: of no process"
