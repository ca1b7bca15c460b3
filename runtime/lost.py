"""What ranks say whose collective failed for a peer's sake: which ranks no longer answer, and where they are.

Errors are known by gloo's and the store's texts alone: under NCCL, where this has not been measured, the watchdog ends
the process in C++ before Python hears of it.
"""

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from runtime.processes import NODE

CLOSED = re.compile(
    r"(Connection (closed|reset) by peer|Broken pipe|remote process exited|Application timeout)[^\n.]*(\.\d+[^\n.]*)*"
)
TIMED_OUT = re.compile(
    r"(Timed out waiting \d+ ?ms for|wait timeout after|Timed out after \d+ seconds waiting for clients)[^\n.]*", re.I
)
GRACE = 1.5  # seconds in which a rank whose connection closed may hear that another one has timed out
TURN = 0.05  # seconds between two looks at who has answered, on an idle machine
SLOWED = 10  # times as long as it was meant to take may a roll take on a busy one
ANSWER = "longmesh/answer of rank {}"


@dataclass(frozen=True)
class _Roll:
    """Who has answered: ``silent`` ranks have not; ``timed_out`` says whether a rank has waited for them in vain."""

    silent: dict[int, str]
    timed_out: bool
    first: bool


def tell_lost(error: RuntimeError, seconds: float) -> bool:
    """Say in one line that a collective failed for a peer's sake; returns False, in silence, for any other error.

    Ranks that waited in vain call the roll for up to ``seconds``, by the store, and one of them names those that do not
    answer: stopped, hanging or gone. A rank whose connection was closed knows no more than that.
    """
    found = TIMED_OUT.search(str(error)) or CLOSED.search(str(error))
    if found is None:
        return False
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    alone = f"rank {rank} ends because a peer of it did ({found[0]})"
    waited = TIMED_OUT.search(str(error)) is not None
    before = _at_sigterm(alone)  # a launcher ends this rank as soon as it sees that another has ended
    roll = _called(rank, waited, seconds)
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    if roll is None and waited and dist.is_initialized():
        _say(f"{alone}; the store does not answer either, which rank 0 holds where torchrun does not: look at rank 0")
    elif roll is None or not roll.timed_out:
        _say(alone)
    elif roll.first:
        _say(_naming(roll.silent, found[0]))
    time.sleep(0.5)  # for the one that speaks: a launcher ends all when the first has ended
    return True


def _naming(silent: dict[int, str], reason: str) -> str:
    advice = "where they are only slow, give a longer --distributed-timeout-minutes"
    if not silent:
        return f"ranks waited in vain for each other ({reason}), and all of them answer now; {advice}"
    names = ", ".join(f"{rank}{node and f' on {node}'}" for rank, node in silent.items())
    ranks = "ranks" if len(silent) > 1 else "rank"
    return f"{ranks} {names} did not answer ({reason}): stopped, hanging or lost, and so the others end; {advice}"


def _called(rank: int, waited: bool, seconds: float) -> _Roll | None:
    """The roll; None where there is nobody to call, or the store does not answer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    answer: list[_Roll] = []

    def call() -> None:
        with suppress(RuntimeError):
            answer.append(_call(rank, waited, seconds))

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(SLOWED * seconds + 1)
    return answer[0] if answer else None


def _call(rank: int, waited: bool, seconds: float) -> _Roll:
    shared: Any = dist.distributed_c10d._get_default_store()
    store = shared.clone()  # a connection of its own: another thread may be waiting on the shared one
    size, turns = dist.get_world_size(), 0
    if waited:
        store.set("longmesh/timed out", "")
    store.set(ANSWER.format(rank), "")
    while True:
        waited = waited or store.check(["longmesh/timed out"])
        silent = [other for other in range(size) if not store.check([ANSWER.format(other)])]
        if not silent or turns * TURN > (seconds if waited else min(GRACE, seconds)):
            break
        # Turns are counted, not seconds: where others' work slows this rank, it slows those that are waited for too.
        turns += 1
        time.sleep(TURN)
    nodes = {other: NODE.format(other) for other in silent}
    named = {other: store.get(key).decode() if store.check([key]) else "" for other, key in nodes.items()}
    return _Roll(named, waited, store.add("longmesh/speaker", 1) == 1)


def _at_sigterm(line: str) -> Any:
    """Let SIGTERM print the line and end the process; returns what it did before, None where it stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def end(*_: object) -> NoReturn:
        _say(line)
        os._exit(1)

    return signal.signal(signal.SIGTERM, end)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
