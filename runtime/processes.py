"""Join and leave the process group.

All ranks must run equal versions, gloo gets one thread, and the group is shut down cleanly.
"""

import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.launch.rendezvous import SECONDS_TO_ANSWER, meet
from runtime.launch.variables import launched_world_size
from runtime.launch.versions import check_versions

NODE = "longmesh/node of rank {}"
"""Store key of a rank's hostname."""
DEFAULT_TIMEOUT = timedelta(minutes=10)


def join(
    backend: str = "gloo",
    timeout: timedelta = DEFAULT_TIMEOUT,
    store: dist.Store | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Join the launcher's processes, or those that share ``store``; else form a group of one.

    Raises:
        LaunchError: see ``meet``.
        UserError: the launcher's processes run different code, or different versions of torch or
            Python.
    """
    use_one_worker()
    if store is None:
        launched_world_size()
    if store is None and "RANK" in os.environ:
        launch_store, rank, world_size = meet(timeout)
        check_versions(launch_store, rank, world_size)
        store = dist.PrefixStore("default_pg", launch_store)
    elif store is None:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.distributed_c10d._get_default_store().set(NODE.format(rank), socket.gethostname())


def leave() -> None:
    """Destroy the process group once gloo's workers are idle; call after the last collective.

    Collective. A worker releases a collective's tensors some time after the collective ends. If the
    interpreter is shutting down by then, the worker cannot take the GIL and aborts the process
    (github.com/pytorch/pytorch/issues/190489). A group's single worker works in order: once it has
    released the last tensor, it has released all.
    """
    last_tensors = list[weakref.ref[torch.Tensor]]()
    for group in list(dist.distributed_c10d._world.pg_map):
        if "gloo" in str(dist.get_backend_config(group)):
            tensor = torch.zeros(1)  # not a barrier, which keeps earlier tensors alive
            dist.all_reduce(tensor, group=group)
            last_tensors.append(weakref.ref(tensor))
            del tensor

    deadline = time.monotonic() + SECONDS_TO_ANSWER
    while any(tensor() is not None for tensor in last_tensors) and time.monotonic() < deadline:
        time.sleep(0.001)
    dist.destroy_process_group()


@contextmanager
def process_group(
    backend: str = "gloo", timeout: timedelta = DEFAULT_TIMEOUT
) -> Iterator[dist.ProcessGroup]:
    """Join the processes that torchrun started until the block ends; yield the group of all.

    For your own scripts; without torchrun, a group of one. ``backend`` may be "cpu:gloo,cuda:nccl".
    After an error the group is destroyed only if it has one process: peers may be stuck in a
    collective, and waiting for them would hang. Raises the same errors as ``join``.
    """
    join(backend, timeout)
    group = dist.group.WORLD
    assert group is not None
    succeeded = False
    try:
        yield group
        succeeded = True
    finally:
        if succeeded or group.size() == 1:
            leave()


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's later collectives and point-to-point messages."""
    if dist.get_backend(group) == dist.Backend.FAKE:
        return  # the fake backend never waits
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    message_backend: Any = group._get_backend(torch.device("cpu"))
    if hasattr(message_backend, "set_timeout"):  # the call above covers only collectives
        message_backend.set_timeout(timeout)


def use_one_worker() -> None:
    """Make every later gloo group run its collectives in a single thread. Idempotent.

    torch gives a group two threads (in 2.13; no release is known to fix it). Both write the name
    of the collective that they completed to one string of the group, without a lock
    (``ProcessGroupGloo::runLoop``). Names of 16 characters or more are allocated on the heap, which
    is corrupted when two threads free the same name; DTensor's ALLGATHER_COALESCED is so long.
    ``init_process_group`` takes no options for gloo, so ``__init__`` is patched to set them.
    Subclassing the backend would not help, because torch hands a group's backend back as its C++
    class.
    """
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    torch_init = gloo.__init__
    if getattr(torch_init, "one_worker", False):
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
        if interfaces:
            devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
        else:
            devices = [gloo.create_default_device()]  # the same choice as torch makes

        options = gloo._Options()
        options._threads = 1
        options._timeout = timeout
        options._devices = devices
        for name, value in settings.items():  # the argument enable_reconfigure, from torch 2.15 on
            setattr(options, name, value)
        torch_init(self, store, rank, size, options)

    init.one_worker = True  # type: ignore[attr-defined]
    gloo.__init__ = init
