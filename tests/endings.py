"""The status and the messages that a command ends with, for tests with invalid input."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import torch.distributed as dist

from train.run import SECONDS_TO_SPEAK, exit_status


@dataclass(frozen=True)
class Ending:
    """A command's status and its messages, in one process."""

    status: int
    stderr: str
    stdout: str = ""

    @property
    def wrong(self):
        """Say what is wrong, if anything.

        A refusal is one line and a status, a success prints no errors.
        """
        lines = self.stderr.splitlines()
        if self.status == 0:
            return (
                f"status 0, and said {lines[-1]}"
                if any(line.startswith("error:") for line in lines)
                else None
            )
        if len(lines) != 1 or not lines[0].startswith("error: "):
            return f"status {self.status} and {len(lines)} lines: {self.stderr[-300:]!r}"
        if not lines[0].isprintable() or len(lines[0]) > 5000:
            return f"a line that does what it likes with a terminal: {lines[0][:300]!r}"
        return None


def end(command, arguments, seconds_to_speak=SECONDS_TO_SPEAK):
    """Call an entry's or a tool's main as its last line does.

    An unhandled exception is noted in ``stderr``.
    """
    errors, out, statuses = io.StringIO(), io.StringIO(), [0]

    def noted(arguments):
        status = command(arguments)
        statuses[0] = status if isinstance(status, int) else 0

    with redirect_stderr(errors), redirect_stdout(out):
        try:
            status = exit_status(noted, arguments, seconds_to_speak) or statuses[0]
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except Exception as error:
            status = 1
            print(f"Traceback: {type(error).__name__}: {error}"[:300], file=errors)
    return Ending(status, errors.getvalue(), out.getvalue())


def apart(cases):
    """Yield each case on ranks that have joined, as if it were another run.

    That spares the imports of each.
    """
    store = dist.distributed_c10d._get_default_store()
    for case in cases:
        dist.distributed_c10d._get_default_store = lambda case=case: dist.PrefixStore(case, store)
        yield case


def refusal(endings):
    """Return the one line by which all ranks end."""
    assert [ending.status for ending in endings] == [1] * len(endings)
    (line,) = "".join(ending.stderr for ending in endings).splitlines()
    assert line.startswith("error: ")
    return line
