"""Bounds of time and memory, which the tests of templates and of adapters reach."""

import resource
import signal

import pytest

from runtime.bounds import bounded


def test_bounds_end_with_the_call():
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(ZeroDivisionError):
        bounded("a program", lambda: 1 // 0)
    assert bounded("a program", lambda: resource.getrlimit(resource.RLIMIT_AS)[0]) > 0
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
