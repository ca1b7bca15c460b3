"""What ends a bench."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import UserError
from testing.ranks import RankError


class MeasureError(UserError):
    """What was to be measured failed, or computes something else than it should; its time would mean nothing."""


@contextmanager
def failures_told(of: str = "") -> Iterator[None]:
    """Raise a rank's failure in the block as a MeasureError: the last line, and which file has its traceback."""
    try:
        yield
    except RankError as error:
        said, *trace = str(error).strip().splitlines()
        if trace:
            with tempfile.NamedTemporaryFile("w", prefix="longmesh-", suffix=".log", delete=False) as log:
                log.write(str(error))
            said = f"{said} {trace[-1]}; its traceback is in {log.name}"
        raise MeasureError(of + said) from None


def one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
