"""Record what a rank's operators on fake tensors would allocate and free, in order, and what it
would send.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from kernels.backends.base import SIMULATED_KERNEL, SIMULATED_SLAB, AttentionKernel
from parallel.mesh import Mesh
from parallel.offload import KEPT, MOMENTS, SEVERAL, in_slabs
from planner.delta_cost import DeltaShape
from runtime.simulation import ALLOCATION_CAUSE, replaced
from train.config.common import CommonConfig

CAUSES = (
    "weights",
    "gathered weights",
    "gradients",
    "optimizer",
    "activations",
    "attention",
    "logits",
    "passing",
)
"""Causes of a process's memory: the last three are there within a forward or a backward alone."""
INSIDE, BETWEEN = "inside nodes", "between nodes"
_share: Callable[[int], float] = lambda n: (n - 1) / n  # noqa: E731
SENT: dict[str, tuple[int, Callable[[int], float]]] = {
    "c10d::_allgather_base_": (0, _share),
    "c10d::_reduce_scatter_base_": (1, _share),
    "c10d::allreduce_": (0, lambda n: 2 * _share(n)),
    "c10d::alltoall_base_": (1, _share),
    "c10d::send": (0, lambda n: 1.0),
    "_c10d_functional::all_gather_into_tensor": (0, lambda n: n - 1.0),
    "_c10d_functional::reduce_scatter_tensor": (0, _share),
    "_c10d_functional::all_reduce": (0, lambda n: 2 * _share(n)),
    "_c10d_functional::all_to_all_single": (0, _share),
}
"""Which argument of an operator is sent, and how much of it by each of n ranks in a ring."""
SILENT = ("c10d::recv_", "c10d::barrier", "_c10d_functional::wait_tensor")
SCANS = ("longmesh::linear_attention", "longmesh::state_attention")
"""Operators whose shape functions stand for them: their own code goes over the tokens in a loop."""
SHAPES = AttentionKernel(
    "shapes",
    lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(q[..., 0], dtype=torch.float32)),
    lambda rows, keys, *_: (
        torch.empty_like(rows.q),
        torch.empty_like(keys.k),
        torch.empty_like(keys.v),
    ),
)
"""A block's attention in the shapes and dtypes of a GPU's kernels."""


def _slab_back(inputs: tuple[Tensor, ...], dout: Tensor, leaving: Tensor, *_: Any) -> Tensor:
    """Take what a delta rule's backward works in, and return a state's gradient; both empty."""
    q, v = inputs[0], inputs[2]
    shape = DeltaShape(q.shape[2], v.shape[2], q.shape[3], v.shape[3], 1)
    leaving.new_empty(shape.workspace(*v.shape[:2]) // 4, dtype=torch.float32)
    return torch.empty_like(leaving)


SLABS = (lambda *_: None, _slab_back)
"""A delta rule in the shapes of its kernels."""


class Tape(NamedTuple):
    """Effects of an operator's call, with storages numbered from its first one."""

    events: list[tuple[int, int]]
    kinds: list[str]
    sizes: list[int]
    sent: "Counter[str]"
    outs: list[tuple[Any, ...]]
    """Each output's storage, shape, strides, dtype and device."""
    spec: Any
    held: list[Tensor]
    """Arguments besides fake tensors, held so that no other has its identity."""


def key_of(func: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return a call's key: calls of equal keys do the same. Fake tensors count by their layout."""
    from torch._subclasses.fake_tensor import FakeTensor

    def one(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            return x.shape, x.stride(), x.dtype
        return id(x) if isinstance(x, Tensor) else (type(x), x)

    return func, *map(one, leaves)


@dataclass(frozen=True)
class Rehearsal:
    """Resources of a rank: bytes of memory at the peak of a step, by cause; bytes sent in a
    micro-batch, by link.

    ``host`` are the bytes in host memory: of a GPU's process those that torch pins.
    """

    rank: int
    stage: int
    memory: dict[str, int]
    sent: dict[str, int]
    host: int

    @property
    def bytes(self) -> int:
        """Return the bytes of memory together."""
        return sum(self.memory.values())


class Recorder(TorchDispatchMode):
    """Record what fake tensors would allocate and free, in order, and what a rank would send.

    Softmax attention is run by its own code, round by round; a call is kept, to replay it. What
    takes no fake tensor, such as the number of a plan, is computed.
    """

    def __init__(
        self, rank: int, per_node: int, entries: int = 0, tell: Callable[[str], None] | None = None
    ) -> None:
        """Set up for a rank that has ``entries`` of the vocabulary, by whose width logits are
        known.

        ``tell`` is told how far it is.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()
        self.kind, self.sent = "weights", Counter[str]()
        self.events: list[tuple[int, int]] = []
        """(number of a storage, bytes more or less)"""
        self._kinds, self._sizes = list[str](), list[int]()
        self._numbers = WeakIdKeyDictionary()
        self._tapes: dict[Any, Tape] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.rank = rank
        self.kept: dict[int, int] = {}
        """Bytes of the storages that forwards left for their backwards."""
        self._per_node, self._paused, self._entries = per_node, False, entries
        self._resized = set[int]()
        self.doing, self._operators, self._tell = "building the model", 0, tell
        self.layer = ""
        """Words of the layer that a pass has reached, after a comma; empty outside the layers."""

    def begin(self, doing: str) -> None:
        """Name what is done from here on, before any layer is reached."""
        self.doing, self.layer = doing, ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make every tensor a fake one, and record what happens to it, until the block ends."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        shapes, resize = "_propagate_tensor_meta_non_cached", torch.UntypedStorage.resize_
        asked = getattr(ShardingPropagator, shapes)

        def unrecorded(
            *args: Any,
        ) -> Any:  # it makes tensors as large as those of all ranks together
            self._paused = True
            try:
                return asked(*args)
            finally:
                self._paused = False

        def resized(
            storage: torch.UntypedStorage, size: int
        ) -> None:  # so FSDP frees and allocates whole weights
            resize(storage, size)
            if (number := self._numbers.get(storage)) is not None:
                self._resized.add(number)
                self._set(number, size)

        with (
            replaced(ShardingPropagator, shapes, unrecorded),
            replaced(torch.UntypedStorage, "resize_", resized),
            SIMULATED_KERNEL.set_to(SHAPES),
            SIMULATED_SLAB.set_to(SLABS),
            self._fake,
            self,
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._library.custom_ops import OPDEFS
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operators on local tensors
        if self._paused:
            return func(*args, **kwargs)
        self._operators += 1
        if self._tell is not None:
            self._tell(f"{self.doing}{self.layer}, {self._operators:,} operators so far")
        if func.namespace == "longmesh" and not func.name().startswith(SCANS):
            return self._by_its_code(func, OPDEFS[func.name()]._init_fn, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        meta, to = any(x.is_meta for x in tensors) or not tensors, kwargs.get("device")
        stays = (
            to.type == "meta" if meta and to else bool(tensors)
        )  # not what to_empty and factories make
        if stays and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional") and not func.name().startswith(SILENT):
            from torch.distributed._tools.fake_collectives import CollectiveOp

            argument, part = SENT[func.name().partition(".")[0]]
            ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
            count = part(len(ranks)) * sum(x.nbytes for x in tree_leaves(args[argument]))
            self.count(
                count,
                [self.rank, ranks[args[2]]] if func.name().startswith("c10d::send") else ranks,
            )
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if (
                isinstance(x, FakeTensor)
                and x.device.type != "meta"
                and x.untyped_storage() not in self._numbers
            ):
                kind = ALLOCATION_CAUSE.value or self.kind
                logits = kind == "passing" and x.dim() > 1 and x.shape[-1] == self._entries
                self._made(x.untyped_storage(), "logits" if logits else kind)
        return out

    def _by_its_code(self, func: Any, code: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator's own code, or replay an earlier call with the same layouts, as each
        layer has.

        A call can be replayed if it leaves nothing but its outputs behind.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        leaves = tree_leaves((args, kwargs))
        key = key_of(func, leaves)
        first, start, sent = len(self._sizes), len(self.events), Counter(self.sent)
        if (tape := self._tapes.get(key)) is not None:
            self._kinds += tape.kinds
            self._sizes += tape.sizes
            self.events += [(first + number, change) for number, change in tape.events]
            self.sent += tape.sent
            outs = [
                torch.empty_strided(*like, dtype=dtype, device=device)
                for _, *like, dtype, device in tape.outs
            ]
            for x, (number, *_) in zip(outs, tape.outs, strict=True):
                self._follow(x.untyped_storage(), first + number)
            return tree_unflatten(outs, tape.spec)
        kind, self.kind = self.kind, "attention"
        try:
            with self:
                out = code(*args, **kwargs)
        finally:
            self.kind = kind
        outs, spec = tree_flatten(out)
        alive = [number for number in range(first, len(self._sizes)) if self._sizes[number]]
        numbers = [
            self._numbers.get(x.untyped_storage(), -1) if isinstance(x, FakeTensor) else -1
            for x in outs
        ]
        if sorted(numbers) == alive:
            self._tapes[key] = Tape(
                [
                    (number - first, change)
                    for number, change in self.events[start:]
                    if number >= first
                ],
                self._kinds[first:],
                self._sizes[first:],
                self.sent - sent,
                [
                    (n - first, x.shape, x.stride(), x.dtype, x.device)
                    for n, x in zip(numbers, outs, strict=True)
                ],
                spec,
                [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, FakeTensor)],
            )
        return out

    def _made(self, storage: torch.UntypedStorage, kind: str) -> None:
        number = len(self._sizes)
        self._kinds.append(kind)
        self._sizes.append(0)
        self._set(number, storage.nbytes())
        self._follow(storage, number)

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        self._numbers[storage] = number
        weakref.finalize(storage, partial(self._set, number, 0)).atexit = False

    def _set(self, number: int, size: int) -> None:
        self.events.append((number, size - self._sizes[number]))
        self._sizes[number] = size

    def count(self, count: float, ranks: Collection[int]) -> None:
        """Count bytes that this rank sends among ``ranks``; a group that leaves a node sends
        between nodes.
        """
        self.sent[INSIDE if len({rank // self._per_node for rank in ranks}) == 1 else BETWEEN] += (
            round(count)
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count storages that the block makes and leaves as activations kept for a backward."""
        first = len(self._sizes)
        yield
        self.kept |= {
            number: size for number, size in enumerate(self._sizes) if size and number >= first
        }

    def _alive(self, end: int) -> dict[int, int]:
        """Return the bytes of each storage after so many events."""
        sizes: dict[int, int] = {}
        for number, change in self.events[:end]:
            sizes[number] = sizes.get(number, 0) + change
        return {number: size for number, size in sizes.items() if size}

    def rehearsal(
        self, config: CommonConfig, mesh: Mesh, gradients: Sequence[Tensor], ran: int, gpu: bool
    ) -> Rehearsal:
        """Return what the rank takes and sends; ``ran`` micro-batches were taken through it.

        The optimizer's state is there from the start; so are, where one micro-batch stands for
        several, gradients, whole or a shard, of earlier ones, and the activations of others in a
        pipeline. What lies in host memory is not there.
        """
        own = {self._numbers[x.untyped_storage()] for x in gradients}
        single, offload = config.pipeline.single, config.recompute.recompute_offload
        micro_batches = config.train.micro_batches(mesh.dp.size()) if single else 1
        at_end = self._alive(len(self.events))
        early = {n for n in at_end if self._kinds[n] == "optimizer"} | (
            own if micro_batches > 1 else set()
        )
        moved = {n for n, kind in enumerate(self._kinds) if kind in (KEPT, MOMENTS)}
        kept = {n: size for n, size in self.kept.items() if n not in moved | self._resized}
        skipped = early | moved
        live, peaks = 0, [0]
        for number, change in self.events:
            live += 0 if number in skipped else change
            peaks.append(live)
        at_peak, memory = self._alive(peaks.index(max(peaks))), Counter[str]()
        for n, size in (
            {n: at_peak[n] for n in at_peak.keys() - skipped} | {n: at_end[n] for n in early}
        ).items():
            held = n in kept and self._kinds[n] != "logits"
            kind = (
                "gathered weights"
                if n in self._resized
                else "activations"
                if held
                else self._kinds[n]
            )
            memory["gradients" if n in own else kind] += size
        ranks, stage = mesh.pp.size(), mesh.pp.get_local_rank()
        flying = int(config.pipeline.in_flight(stage, ranks, micro_batches)) if single else 1
        if not offload:
            memory["activations"] += round((flying - 1) * sum(kept.values()))
        there = {
            kind: [at_end[n] for n in at_end if self._kinds[n] == kind] for kind in (KEPT, MOMENTS)
        }
        host = in_slabs(there[KEPT] * flying, SEVERAL) + (in_slabs if gpu else sum)(there[MOMENTS])
        if config.data_parallel.strategy == "zero1" and micro_batches > 1:
            memory["gradients"] *= (
                mesh.dp_cp.size() // config.data_parallel.num_distributed_optimizer_instances
            )
        return Rehearsal(
            self.rank,
            stage,
            dict(memory),
            {link: count // ran for link, count in self.sent.items()},
            host,
        )
