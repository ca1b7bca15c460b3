"""Errors that every rank raises together: a failure on one rank must not leave the others waiting for it."""

import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from runtime.processes import launched_world_size, meet

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """What a rank tells the others about its exception."""

    message: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        """Keep the type of a ValueError, hence of any UserError, or an OSError; of a defect, the traceback as text."""
        text = "".join(traceback.format_exception(error))
        if not isinstance(error, (ValueError, OSError)):
            return cls(text, None)
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            # Its class is local, or its constructor takes more than the message.
            return cls(text, None)
        return cls(str(error), pickled)

    def as_error(self, rank: int) -> Exception:
        if self.pickled is None:
            return RuntimeError(f"rank {rank} failed:\n{self.message}")
        error: Exception = pickle.loads(self.pickled)
        error.add_note(f"(raised on rank {rank})")
        return error


def agree(fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``fn`` on every rank of ``group`` and return the results of all, by rank; one collective.

    ``fn`` does local work only, such as files: a collective inside it would wait for a rank that has failed already.
    Its result must pickle. Without a process group, ``fn`` alone runs.

    Raises:
        Exception: where ranks fail, the error of the lowest of them, on every rank. A ValueError (hence every
            UserError) or an OSError keeps its type and message; anything else is raised elsewhere as a
            RuntimeError with the failing rank's traceback.
    """
    if not dist.is_initialized():
        return [fn()]
    error: Exception | None = None
    mine: Any = None
    try:
        mine = fn()
    except Exception as caught:
        error = caught
        mine = _Failure.of(caught)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, answer in enumerate(everyone):
        if isinstance(answer, _Failure):
            if error is not None and rank == dist.get_rank(group):
                error.add_note(f"(raised on rank {rank})")
                raise error
            raise answer.as_error(rank) from error
    return everyone


def from_first(fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``fn`` on the first rank of ``group`` alone and return its result, or raise its error, on every rank."""
    return agree(lambda: fn() if is_first(group) else None, group)[0]  # type: ignore[return-value]


def is_first(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process is the first rank of ``group``, or alone."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block of local work that all ranks of ``group`` leave together, by its end or by one error (see ``agree``)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught

    def outcome() -> None:
        if error is not None:
            raise error

    agree(outcome, group)


@contextmanager
def one_voice(seconds: float) -> Iterator[bool]:
    """Whether this rank is the one to say why the run fails: of the ranks that get here, the first one.

    Works before the processes have joined too, over the store that they would join by. A rank that can reach no store
    speaks: better twice than not at all. On the way out the ranks wait for each other for at most ``seconds``, because
    a launcher ends the others once one has gone, and the store may live in any of them.
    """
    store: dist.Store | None = None
    size, first = 1, True
    with suppress(RuntimeError, ValueError):
        size = dist.get_world_size() if dist.is_initialized() else launched_world_size()
        if size > 1:
            store = _store(seconds)
            first = store.add("failed ranks", 1) == 1
    yield first
    deadline = time.monotonic() + seconds
    # The store breaks off when the rank that holds it leaves, and that one has seen all others here.
    with suppress(RuntimeError):
        if store is not None:
            store.add("ranks that spoke or need not", 1)
            while store.add("ranks that spoke or need not", 0) < size and time.monotonic() < deadline:
                time.sleep(0.02)


def _store(seconds: float) -> dist.Store:
    """The store of the process group or, before there is one, of the launcher."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return meet(timedelta(seconds=seconds))[0]


@contextmanager
def cpu_group(group: dist.ProcessGroup | None = None) -> Iterator[dist.ProcessGroup | None]:
    """``group`` (default: all ranks) where it carries CPU tensors, else a gloo group of all ranks for the while.

    Collective. A run initialised with the backend "cpu:gloo,cuda:nccl" never needs the second one. Yields None where
    no process group is initialised.

    Raises:
        ValueError: ``group`` is a part of the ranks and carries no CPU tensors.
    """
    if not dist.is_initialized():
        yield None
        return
    group = group or dist.group.WORLD
    if "gloo" in str(dist.get_backend_config(group)):
        yield group
        return
    if group is not dist.group.WORLD:
        # A twin of a part could be made by its members alone (use_local_synchronization), but torch names such groups
        # by how many each rank has, so that ranks in unequal numbers of groups wait for one another for ever.
        raise ValueError("the group has no CPU backend; make it with new_group(ranks, backend='gloo')")
    gloo = dist.new_group(backend="gloo")
    try:
        yield gloo
    finally:
        dist.destroy_process_group(gloo)
