"""Processes that a test starts do not depend on how the tests were started."""

import signal
import subprocess
from contextlib import nullcontext

import pytest

from tests.starts import PATIENCE, interruptible

TOLD = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", TOLD)
def test_a_process_ends_on_a_signal_where_the_tests_are_a_background_job_too(number):
    """As in a shell's background job, and worse; without ``interruptible`` it runs on."""
    before = {ignored: signal.signal(ignored, signal.SIG_IGN) for ignored in (*TOLD, signal.SIGHUP)}
    try:
        for started, end in ((interruptible(), number), (nullcontext(), signal.SIGKILL)):
            with started:
                process = subprocess.Popen(["sleep", str(PATIENCE)])
            process.send_signal(number)
            process.send_signal(end)
            assert process.wait(PATIENCE) == -end
            assert signal.getsignal(number) is signal.SIG_IGN, "the tests themselves stay as they were started"
    finally:
        for ignored, handler in before.items():
            signal.signal(ignored, handler)
