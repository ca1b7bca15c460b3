"""Processes that a test starts do not depend on how the tests were started."""

import signal
import subprocess

import pytest

from tests.starts import PATIENCE, interruptible

TOLD = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def background():
    """As in a shell's background job, and worse."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*TOLD, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", TOLD)
def test_what_is_started_ends_on_a_signal_in_a_background_job_too(number, background):
    with interruptible():
        process = subprocess.Popen(["sleep", str(PATIENCE)])
    process.send_signal(number)
    assert process.wait(PATIENCE) == -number
    assert signal.getsignal(number) is signal.SIG_IGN, "the tests themselves stay as they were started"


@pytest.mark.parametrize("number", TOLD)
def test_without_that_it_runs_on(number, background):
    process = subprocess.Popen(["sleep", str(PATIENCE)])
    process.send_signal(number)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
