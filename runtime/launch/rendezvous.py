"""Connect to the launcher's store, or name the process or setting that prevents it.

torch's own client waits for minutes for a name that does not resolve, and forever for a port that
accepts connections and does not answer. So the name and the port are tested here first, with
deadlines.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from runtime.errors import AbsentError, LaunchError
from runtime.launch.variables import launched_world_size, read_number

HELLO = "longmesh/hello of rank {}"
"""Store key under which a rank announces its random name for this start."""
WELCOME = "longmesh/welcome {}"
"""Store key of rank 0's answer to an announced name."""
SECONDS_TO_ANSWER = 10.0
T = TypeVar("T")


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connect to the launcher's store; return the store, this process's rank and the world size.

    Raises LaunchError if the launcher's variables are inconsistent or lack MASTER_ADDR or
    MASTER_PORT, if rank 0's port is in use or another program answers there, or if after
    ``timeout`` nothing answers or a process is missing.
    """
    launched_world_size()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise LaunchError(
                f"RANK is set but {name} is not, so the processes cannot connect; start with "
                f"torchrun, which sets both, or set {name}, or unset RANK to start alone"
            )
    address = os.environ["MASTER_ADDR"]
    port = read_number("MASTER_PORT", None, minimum=1, limit=65536)
    _resolve(address)
    if os.environ["RANK"] != "0" or _agent_has_store():
        _wait_for_store(address, port, timeout)

    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"MASTER_PORT is {port}, but another program on this machine uses it; give another "
                "port, or start with torchrun --standalone, which finds a free one"
            ) from error
        raise AbsentError(
            f"rank {os.environ['RANK']} waited at MASTER_ADDR {address}, MASTER_PORT {port}, but "
            f"not all processes came ({str(error).splitlines()[0]}); check that WORLD_SIZE "
            "processes were started"
        ) from error
    store.set_timeout(timeout)
    if _agent_has_store():
        store = agree_on_prefix(store, rank, world_size, timeout)
    return store, rank, world_size


def _agent_has_store() -> bool:
    """Return True if torchrun's agent hosts the store; otherwise rank 0 hosts it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_prefix(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.Store:
    """Return the part of torchrun's store that belongs only to this start.

    The agent's store outlives a restart of the ranks, and so does every key of earlier starts:
    a rank could read a dead rank's answer. So rank 0 draws a random prefix. Another rank announces
    itself under a random name that no earlier start knows, is answered with the prefix, and
    confirms inside the new part. Rank 0 answers until all ranks have confirmed.
    """
    name = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(HELLO.format(rank), name)
    if rank > 0:
        try:
            prefix = store.get(WELCOME.format(name)).decode()
        except dist.DistError as error:
            raise AbsentError(
                f"rank {rank} connected to the launcher's store, but rank 0 never joined; check "
                "that rank 0 was started"
            ) from error
        part = dist.PrefixStore(prefix, store)
        part.set(HELLO.format(rank), "")
        return part

    part = dist.PrefixStore(name, store)
    missing = set(range(1, world_size))
    welcomed = set[bytes]()
    while True:
        missing = {other for other in missing if not part.check([HELLO.format(other)])}
        if not missing:
            return part

        for other in missing:
            if not store.check([HELLO.format(other)]):
                continue
            other_name = store.get(HELLO.format(other))
            if other_name not in welcomed:
                store.set(WELCOME.format(other_name.decode()), name)
                welcomed.add(other_name)

        if time.monotonic() > deadline:
            ranks = ", ".join(str(other) for other in sorted(missing)[:8])
            raise AbsentError(
                f"ranks that never joined rank 0 (up to 8 are listed): {ranks}; check that "
                f"{world_size} processes were started"
            )
        time.sleep(0.01)


def _resolve(address: str) -> None:
    """Raise LaunchError if this machine cannot resolve the host name."""
    deadline = time.monotonic() + SECONDS_TO_ANSWER
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > deadline:
                raise LaunchError(
                    f"MASTER_ADDR is {address}, but {socket.gethostname()} cannot resolve it "
                    f"({error.strerror}); set MASTER_ADDR to that machine's address, or enter the "
                    "name in DNS or /etc/hosts"
                ) from error
        time.sleep(1)


def _wait_for_store(address: str, port: int, timeout: timedelta) -> None:
    """Wait until the store at that address answers.

    A store that is slow, or silent, may take until ``timeout``. A program that answers, but is not
    a store, is detected within about SECONDS_TO_ANSWER, and so is a torchrun that has ended,
    because it starts its store before its ranks.
    """
    start = time.monotonic()
    deadline = start + timeout.total_seconds()
    location = f"MASTER_ADDR {address}, MASTER_PORT {port}"
    while True:
        try:
            socket.create_connection((address, port), timeout=SECONDS_TO_ANSWER).close()
            break
        except OSError as error:
            agent_is_gone = _agent_has_store() and isinstance(error, ConnectionRefusedError)
            patience = start + SECONDS_TO_ANSWER / 2 if agent_is_gone else deadline
            if time.monotonic() > patience:
                raise AbsentError(
                    f"rank {os.environ['RANK']} cannot connect to {location} ({error}); check "
                    "both, and that rank 0 runs"
                ) from error
        time.sleep(0.1)

    def ask() -> str:
        """Return "" once the store answers, or the reason why the program is not a store."""
        patience = timedelta(seconds=SECONDS_TO_ANSWER / 2)  # torch may take twice as long
        while True:
            try:
                dist.TCPStore(
                    address, port, is_master=False, timeout=patience, wait_for_workers=False
                )
                return ""
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if "timed out" not in reason or time.monotonic() > deadline:
                    return reason

    reason = in_time(ask, max(SECONDS_TO_ANSWER, deadline - time.monotonic()))
    if reason != "":
        raise LaunchError(
            f"rank {os.environ['RANK']} is connected to {location}, but the program there is not a "
            f"store of torch.distributed ({reason or 'it is silent'}); look at rank 0, or give "
            "another MASTER_PORT if another program uses this one"
        )


def in_time(call: Callable[[], T], seconds: float) -> T | None:
    """Return the result of a call to a store; None if it fails or takes longer than ``seconds``.

    A call to a store that does not answer may never return, so it runs in a thread.
    """
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
