"""Name the ranks that no longer answer, and their nodes, when a collective fails because of a peer.

Errors are recognised by the texts of gloo and the store. Not measured under NCCL, whose watchdog ends the process in
C++ before Python sees an error.
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
from runtime.slurm import AGAIN, leave_ending

CLOSED = re.compile(
    r"(Connection (closed|reset) by peer|Broken pipe|remote process exited|Application timeout)[^\n.]*(\.\d+[^\n.]*)*"
)
TIMED_OUT = re.compile(
    r"(Timed out waiting \d+ ?ms for|wait timeout after|Timed out after \d+ seconds waiting for clients)[^\n.]*", re.I
)
GRACE = 1.5  # seconds that a rank whose connection closed waits to hear that another rank timed out
TURN = 0.05  # seconds between two checks of who has answered, on an idle machine
SLOWED = 10  # on a busy machine a roll call may take this many times as long
ANSWER = "longmesh/answer of rank {}"


@dataclass(frozen=True)
class _Roll:
    """Result of a roll call: the ``silent`` ranks with their nodes, and whether any rank ``timed_out`` waiting."""

    silent: dict[int, str]
    timed_out: bool
    first: bool


def tell_lost(error: RuntimeError, seconds: float) -> bool:
    """Print one line if a collective failed because of a peer; return False, silently, for any other error.

    Ranks that timed out call the roll through the store for up to ``seconds``; one of them names the ranks that do not
    answer: stopped, hanging or gone. A rank whose connection closed reports only that.
    """
    found = TIMED_OUT.search(str(error)) or CLOSED.search(str(error))
    if found is None:
        return False
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    alone = f"rank {rank} ends because a peer of it did ({found[0]})"
    leave_ending(AGAIN, alone)
    waited = TIMED_OUT.search(str(error)) is not None
    before = _at_sigterm(alone)  # the launcher ends this rank as soon as it sees that another ended
    roll = _called(rank, waited, seconds)
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    if roll is None and waited and dist.is_initialized():
        _say(f"{alone}; the store does not answer either, which rank 0 holds where torchrun does not: look at rank 0")
    elif roll is None or not roll.timed_out:
        _say(alone)
    elif roll.first:
        _say(_naming(roll.silent, found[0]))
    time.sleep(0.5)  # let the speaker print: the launcher ends all ranks once one has ended
    return True


def _naming(silent: dict[int, str], reason: str) -> str:
    advice = "where they are only slow, give a longer --distributed-timeout-minutes"
    if not silent:
        return f"ranks waited in vain for each other ({reason}), and all of them answer now; {advice}"
    names = ", ".join(f"{rank}{node and f' on {node}'}" for rank, node in silent.items())
    ranks = "ranks" if len(silent) > 1 else "rank"
    return f"{ranks} {names} did not answer ({reason}): stopped, hanging or lost, and so the others end; {advice}"


def _called(rank: int, waited: bool, seconds: float) -> _Roll | None:
    """Call the roll; return None if there is no peer or the store does not answer."""
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
    store = shared.clone()  # own connection: another thread may be waiting on the shared one
    size, turns = dist.get_world_size(), 0
    if waited:
        store.set("longmesh/timed out", "")
    store.set(ANSWER.format(rank), "")
    while True:
        waited = waited or store.check(["longmesh/timed out"])
        silent = [other for other in range(size) if not store.check([ANSWER.format(other)])]
        if not silent or turns * TURN > (seconds if waited else min(GRACE, seconds)):
            break
        # Count turns, not seconds: load that slows this rank also slows the ranks it waits for.
        turns += 1
        time.sleep(TURN)
    nodes = {other: NODE.format(other) for other in silent}
    named = {other: store.get(key).decode() if store.check([key]) else "" for other, key in nodes.items()}
    return _Roll(named, waited, store.add("longmesh/speaker", 1) == 1)


def _at_sigterm(line: str) -> Any:
    """Make SIGTERM print ``line`` and end the process; return the old handler, None if not on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def end(*_: object) -> NoReturn:
        _say(line)
        os._exit(1)

    return signal.signal(signal.SIGTERM, end)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
