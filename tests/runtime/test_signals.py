"""Signals ask a process to end, once; and it ends with its launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime import signals
from runtime.signals import (
    ASKING,
    end_with_launcher,
    end_with_parent,
    leave_to_parent,
    stop_requests,
)
from tests.starts import ROOT, wait_until

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel tells of a parent's death on Linux only"
)


def forked(body):
    """A child that runs ``body`` with the end of a pipe to write to, once it has written.

    Return its id, and the other end.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP would be ignored
        try:
            body(writing)
        finally:
            os._exit(7)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    return child, reading


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", ASKING)
def test_before_there_is_work_a_signal_ends_the_process_with_its_status(number):
    def body(report):
        with stop_requests():
            os.write(report, b".")
            time.sleep(60)

    child, _ = forked(body)
    os.kill(child, number)
    assert status_of(child) == 128 + number


@pytest.mark.parametrize("number", ASKING)
def test_the_first_signal_is_noted_and_the_second_ends_at_once(number, monkeypatch):
    monkeypatch.setattr(signals, "SAME_SECONDS", 0.5)

    def body(report):
        with stop_requests() as notice:
            notice.works = True
            os.write(report, b".")
            while notice.signal is None:
                time.sleep(0.01)
            os.write(report, bytes([notice.signal]))
            time.sleep(60)

    child, reading = forked(body)
    os.kill(child, number)
    os.kill(child, number)  # the same one, passed on by a launcher
    assert os.read(reading, 1) == bytes([number])
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "one signal that came twice is one"
    time.sleep(0.6)
    os.kill(child, signal.SIGTERM)
    assert status_of(child) == 128 + signal.SIGTERM


def test_what_was_ignored_stays_ignored_and_handlers_come_back():
    before = {number: signal.getsignal(number) for number in ASKING}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as notice:
            assert notice.signal is None
            notice.works = True
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: notice.signal is not None)
            assert notice.signal is signal.SIGUSR1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP] or signal.SIG_DFL)
    assert {number: signal.getsignal(number) for number in ASKING} == before


def family(launched):
    """A parent and its child, which was told by which launcher it was started; their ids."""

    def child(report):
        os.environ.update({"TORCHELASTIC_RUN_ID": "1"} if launched else {})
        end_with_launcher()
        os.write(report, str(os.getpid()).encode())
        time.sleep(60)

    def parent(report):
        grandchild, reading = os.pipe(), None
        if os.fork() == 0:
            child(grandchild[1])
        reading = os.read(grandchild[0], 20)
        os.write(report, b"." + reading)
        time.sleep(60)

    pid, reading = forked(parent)
    return pid, int(os.read(reading, 20))


def runs(pid):
    """True if a process is there and is no zombie that nobody waits for."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@on_linux
@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_ends_with_its_launcher_and_a_program_started_by_hand_does_not(launched):
    parent, child = family(launched)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    if launched:
        wait_until(lambda: not runs(child))
        return
    time.sleep(0.3)
    assert runs(child)
    os.kill(child, signal.SIGKILL)


@on_linux
@pytest.mark.parametrize("gone", [True, False])
def test_a_process_whose_parent_is_gone_already_ends(gone):
    def body(report):
        os.write(report, b".")
        end_with_parent(os.getpid() if gone else os.getppid())

    assert status_of(forked(body)[0]) == (-signal.SIGKILL if gone else 7)


@on_linux
@pytest.mark.parametrize("entry", ["pretrain_gpt.py", "pretrain_dit.py"])
def test_a_rank_that_still_imports_torch_ends_with_its_launcher(entry, tmp_path):
    (tmp_path / "torch.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, "
        f"str(os.getpid())).touch()\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": str(tmp_path)}
    launcher = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} {entry} & wait"], cwd=ROOT, env=environment
    )
    wait_until(lambda: any(path.name.isdigit() for path in tmp_path.iterdir()))
    (rank,) = (int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    launcher.kill()
    launcher.wait()
    time.sleep(0.3)
    lived = runs(rank)
    if lived:
        os.kill(rank, signal.SIGKILL)
    assert not lived


def test_a_loaders_process_leaves_signals_to_its_parent():
    def body(report):
        with stop_requests():
            leave_to_parent(0)
            os.write(report, b".")
            time.sleep(60)

    child, _ = forked(body)
    for number in ASKING:
        os.kill(child, number)
    time.sleep(0.2)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL
