"""What ends a bench."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from runtime.errors import UserError
from runtime.ranks import RankError
from runtime.words import counted


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


def swept(
    device: str, cases: Mapping[str, Callable[[], float]], bound: float, refusals: tuple[type[Exception], ...] = ()
) -> dict[str, Any]:
    """Run each case to its relative error, and name under "wrong" those that raise or are above the bound.

    One that raises does not end the others, unless it takes the device away; that is told first, with how many did not
    run. Errors of ``refusals`` are no fault.
    """
    errors, wrong, refused = dict[str, float](), list[str](), dict[str, str]()
    for number, (case, run) in enumerate(cases.items(), 1):
        try:
            errors[case] = run()
        except refusals as error:
            refused[case] = one_line(error)
        except Exception as error:  # Triton's own errors have no other base
            wrong.append(f"{case}: {one_line(error)}")
            print(wrong[-1], flush=True)
            if _lost(device, error):
                left = counted(len(cases) - number, "case")
                wrong.insert(0, f"the device is lost since {case}; not run after it: {left}")
                break
        else:
            if not errors[case] <= bound:
                wrong.append(f"{case}: {errors[case]:.1e}")
    return {"worst": max(errors.values(), default=None), "cases": len(errors), "refused": refused, "wrong": wrong}


def _lost(device: str, error: Exception) -> bool:
    """Whether a fault takes the device from this process, as an illegal access does: each later call fails."""
    if device != "cuda":
        return isinstance(error, torch.AcceleratorError)
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # of which AcceleratorError is one
        return True
    return False
