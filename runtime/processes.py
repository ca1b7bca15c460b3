"""Join and leave the process group: the launcher's variables, equal versions, one gloo worker, a
clean shutdown.
"""

import hashlib
import json
import os
import platform
import socket
import threading
import time
import uuid
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runtime.errors import AbsentError, LaunchError, UserError
from runtime.slurm import launched_by_srun

OWN, DIFFER = "longmesh/versions of rank {}", "longmesh/versions that differ"
"""Store keys of a rank's versions, and of what differs in all of them."""
ROOT = Path(__file__).resolve().parents[1]
NODE = "longmesh/node of rank {}"
"""Store key under which a rank puts its hostname."""
DEFAULT_TIMEOUT = timedelta(minutes=10)
HELLO, WELCOME = "longmesh/hello of rank {}", "longmesh/welcome {}"
"""Store keys of a start's ranks, and of a rank's name."""
SECONDS_TO_ANSWER = 10.0
T = TypeVar("T")


def launched_world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher.

    A task of srun without RANK gets torchrun's variables from Slurm's. Raises LaunchError: RANK,
    WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is not a number, out of range or missing, or
    contradicts Slurm's.
    """
    os.environ.update(launched_by_srun(os.environ))
    if "RANK" not in os.environ:
        if (size := _number("WORLD_SIZE", 1, least=1)) > 1:
            raise LaunchError(
                f"WORLD_SIZE is {size} and RANK is not set; torchrun sets both, or unset WORLD_SIZE"
            )
        return 1
    size = _number("WORLD_SIZE", None, least=1)
    _number("RANK", None, below=size, bound="WORLD_SIZE")
    local_size = _number("LOCAL_WORLD_SIZE", size, least=1)
    _number(
        "LOCAL_RANK",
        0,
        below=local_size,
        bound="LOCAL_WORLD_SIZE" if local_size < size else "WORLD_SIZE",
    )
    return size


def _number(
    name: str, default: int | None, *, least: int = 0, below: int | None = None, bound: str = ""
) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(
                f"RANK is set and {name} is not; torchrun sets both, or unset RANK to start alone"
            )
        return default
    top = "" if below is None else f" to {below - 1}" + (f", below {bound}" if bound else "")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (below is not None and value >= below):
        raise LaunchError(
            f"{name} is {text!r} in the environment; it must be a whole number from {least}{top}; start with "
            "torchrun, which sets it, or unset RANK to start alone"
        )
    return value


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connect to the launcher's store; return the store, this process's rank and the world size.

    Raises LaunchError: the launcher's variables are inconsistent or lack MASTER_ADDR or
    MASTER_PORT, rank 0's port is in use, what answers there is not a store, or after ``timeout``
    nothing answers or a process is missing.
    """
    launched_world_size()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise LaunchError(
                f"RANK is set and {name} is not, so that the processes cannot meet; start with torchrun, which sets "
                f"both, set {name}, or unset RANK to start alone"
            )
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", None, least=1, below=65536)
    _resolve(address)
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _look_for_store(address, port, timeout)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"MASTER_PORT is {port}, which another program on this machine uses; give another one, or start with "
                "torchrun --standalone, which finds a free one"
            ) from error
        raise AbsentError(
            f"rank {os.environ['RANK']} waited at MASTER_ADDR {address}, MASTER_PORT {port} and not all processes came "
            f"({str(error).splitlines()[0]}); check that WORLD_SIZE of them were started"
        ) from error
    store.set_timeout(timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _agreed_part(store, rank, size, timeout)
    return store, rank, size


def _agreed_part(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a part of torchrun's store that this start alone knows: it has the keys of the starts
    before, still.

    Its name is rank 0's. A rank is told under a name of its own, which no earlier start knew, until
    it has answered.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(HELLO.format(rank), own)
    if rank > 0:
        try:
            part = dist.PrefixStore(store.get(WELCOME.format(own)).decode(), store)
        except dist.DistError as error:
            raise AbsentError(
                f"rank {rank} met the launcher's store and waited in vain for rank 0"
            ) from error
        part.set(HELLO.format(rank), "")
        return part
    part, missing, welcomed = dist.PrefixStore(own, store), set(range(1, size)), set[bytes]()
    while missing := {other for other in missing if not part.check([HELLO.format(other)])}:
        for other in missing:
            if (
                store.check([HELLO.format(other)])
                and (name := store.get(HELLO.format(other))) not in welcomed
            ):
                store.set(WELCOME.format(name.decode()), own)
                welcomed.add(name)
        if time.monotonic() > deadline:
            ranks = ", ".join(str(other) for other in sorted(missing)[:8])
            raise AbsentError(
                f"rank 0 waited in vain for rank {ranks}; check that {size} processes were started"
            )
        time.sleep(0.01)
    return part


def _resolve(address: str) -> None:
    """Raise LaunchError if this machine does not know the name; torch would ask for it again and
    again, for minutes.
    """
    deadline = time.monotonic() + SECONDS_TO_ANSWER
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > deadline:
                raise LaunchError(
                    f"MASTER_ADDR is {address}, which {socket.gethostname()} does not resolve ({error.strerror}); "
                    "set MASTER_ADDR to that machine's address, or enter the name in DNS or /etc/hosts"
                ) from error
        time.sleep(1)


def _look_for_store(address: str, port: int, timeout: timedelta) -> None:
    """Wait until the store at that address answers; torch's client would wait forever for a silent
    one.

    A slow store has until ``timeout``; something that is not a store is detected within about
    SECONDS_TO_ANSWER, and so is a torchrun that is gone: it has its store before its ranks.
    """
    began = time.monotonic()
    deadline = began + timeout.total_seconds()
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"MASTER_ADDR {address}, MASTER_PORT {port}"
    while True:
        try:
            socket.create_connection((address, port), timeout=SECONDS_TO_ANSWER).close()
            break
        except OSError as error:
            gone = of_agent and isinstance(error, ConnectionRefusedError)
            if time.monotonic() > (began + SECONDS_TO_ANSWER / 2 if gone else deadline):
                raise AbsentError(
                    f"rank {os.environ['RANK']} finds nobody at {where} ({error}); check both, and that rank 0 runs"
                ) from error
        time.sleep(0.1)

    def ask() -> str:
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
            f"rank {os.environ['RANK']} is connected to {where}, which does not answer as a store of "
            f"torch.distributed ({reason or 'it is silent'}); look at rank 0, or give another MASTER_PORT "
            "if another program uses that one"
        )


def in_time(call: Callable[[], T], seconds: float) -> T | None:
    """Return what a call of a store returns; None if it fails, or takes longer, as it would for
    ever without answer.
    """
    answer: list[T] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(call())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answer[0] if answer else None


def join(
    backend: str = "gloo",
    timeout: timedelta = DEFAULT_TIMEOUT,
    store: dist.Store | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Join the launcher's processes, or those that share ``store``; with neither, form a group of
    one.

    Raises:
        LaunchError: see ``meet``.
        UserError: the launcher's processes run different code, or different versions of torch or
            Python.
    """
    use_one_worker()
    if store is None:
        launched_world_size()
    if store is None and "RANK" in os.environ:
        met, rank, world_size = meet(timeout)
        check_alike(met, rank, world_size)
        store = dist.PrefixStore("default_pg", met)
    elif store is None:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.distributed_c10d._get_default_store().set(NODE.format(rank), socket.gethostname())


def leave() -> None:
    """Destroy the process group once gloo's workers are idle. Collective; call it after the last
    collective.

    A worker releases a collective's tensors some time after the collective ends. If the interpreter
    is shutting down by then, the worker cannot take the GIL and aborts the process
    (github.com/pytorch/pytorch/issues/190489). A group's single worker works in order: once it has
    released the last tensor, it holds no other.
    """
    groups = [
        g for g in dist.distributed_c10d._world.pg_map if "gloo" in str(dist.get_backend_config(g))
    ]
    dropped = list[weakref.ref[torch.Tensor]]()
    for group in groups:
        tensor = torch.zeros(1)  # not a barrier, which keeps earlier tensors alive
        dist.all_reduce(tensor, group=group)
        dropped.append(weakref.ref(tensor))
        del tensor
    deadline = time.monotonic() + SECONDS_TO_ANSWER
    while any(tensor() is not None for tensor in dropped) and time.monotonic() < deadline:
        time.sleep(0.001)
    dist.destroy_process_group()


@contextmanager
def process_group(
    backend: str = "gloo", timeout: timedelta = DEFAULT_TIMEOUT
) -> Iterator[dist.ProcessGroup]:
    """Join the processes that torchrun started, and leave at the end of the block so that none
    aborts at exit.

    For your own scripts; without torchrun, a group of one. ``backend`` may be "cpu:gloo,cuda:nccl".
    After an error the group is destroyed only if it has one process: peers may be stuck in a
    collective, and waiting for them would hang. Yields the group of all processes; raises as
    ``meet``.
    """
    join(backend, timeout)
    group = dist.group.WORLD
    assert group is not None
    ended_well = False
    try:
        yield group
        ended_well = True
    finally:
        if ended_well or group.size() == 1:
            leave()


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the group's later collectives and point-to-point messages; a fake group
    waits for nobody.
    """
    if dist.get_backend(group) == dist.Backend.FAKE:
        return
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    for_messages: Any = group._get_backend(torch.device("cpu"))
    if hasattr(for_messages, "set_timeout"):  # the call above covers collectives only
        for_messages.set_timeout(timeout)


def use_one_worker() -> None:
    """Make every later gloo group run its collectives in one thread. Idempotent.

    torch gives a group two (seen in 2.13; no release is known to fix it), and both write the name
    of the collective that they completed to one string of the group, without a lock
    (``ProcessGroupGloo::runLoop``). Names of 16 characters or more are on the heap, so two threads
    that free one corrupt it: ALLGATHER_COALESCED, which DTensor uses, is one.
    ``init_process_group`` takes no options for gloo, so ``__init__`` is patched to set them. A
    subclass would be lost: torch returns a group's backend as the class that C++ knows.
    """
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    made_by_torch = gloo.__init__
    if getattr(made_by_torch, "one_worker", False):
        return

    def init(
        self: Any,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **settings: bool,
    ) -> None:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        devices = [
            gloo.create_device(interface=name) for name in interfaces.split(",") if interfaces
        ]

        options = gloo._Options()
        options._threads = 1
        options._timeout = timeout
        options._devices = devices or [gloo.create_default_device()]  # as torch chooses them
        for name, value in settings.items():  # enable_reconfigure, from torch 2.15 on
            setattr(options, name, value)
        made_by_torch(self, store, rank, size, options)

    init.one_worker = True  # type: ignore[attr-defined]
    gloo.__init__ = init


def sources(root: Path) -> str:
    """Return a digest of the Python files in ``root`` and in its packages, but for the tests: 8
    hexadecimal digits.
    """
    folders = sorted(
        file.parent for file in root.glob("*/__init__.py") if file.parent.name != "tests"
    )
    found = hashlib.sha256()
    for path in (
        *sorted(root.glob("*.py")),
        *(path for folder in folders for path in sorted(folder.rglob("*.py"))),
    ):
        found.update(
            f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return found.hexdigest()[:8]


def check_alike(store: dist.Store, rank: int, size: int) -> None:
    """Raise UserError on all ranks, with one line, where their versions differ; through the store
    alone. Collective.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    own = {
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "Python": python,
        "sources": sources(ROOT),
    }
    store.set(OWN.format(rank), json.dumps(own))
    if rank == 0:
        everyone = [
            json.loads(text)
            for text in store.multi_get([OWN.format(other) for other in range(size)])
        ]
        store.set(DIFFER, "; ".join(_differences(everyone)))
    if line := store.get(DIFFER).decode():
        raise UserError(f"ranks differ: {line}; start all from one checkout and one environment")


def _differences(everyone: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield, for each name, who has another value than most; rank 0 decides between two as
    frequent.
    """
    for name in sorted({name for one in everyone for name in one} - {"host"}):
        values = [one.get(name, "unknown") for one in everyone]
        usual = Counter(values).most_common(1)[0][0]
        others: dict[tuple[str, str], list[str]] = defaultdict(list)
        for rank, value in enumerate(values):
            if value != usual:
                others[value, everyone[rank]["host"]].append(str(rank))
        told = [
            f"{value} on rank {', '.join(ranks)} ({host})"
            for (value, host), ranks in others.items()
        ]
        if told:
            yield f"{name} {', '.join(told)}, and {usual} on the others"
