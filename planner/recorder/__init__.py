"""Record what a rank's operators on fake tensors allocate and send."""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from kernels.backends.base import SIMULATED_KERNEL, SIMULATED_SLAB
from parallel.mesh import Mesh
from parallel.offload import KEPT, MOMENTS, SEVERAL, in_slabs
from planner.recorder.events import Event, alive_after, peak_event
from planner.recorder.operators import (
    SCANS,
    SHAPES,
    SILENT,
    SLABS,
    STATEFUL,
    bytes_sent,
    is_on_real_tensors,
)
from planner.recorder.tape import Tape, key_of
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
"""Causes of a process's memory; the last three exist only within a forward or backward pass."""
INSIDE = "inside nodes"
BETWEEN = "between nodes"


@dataclass(frozen=True)
class Rehearsal:
    """Memory and traffic of one rank in a rehearsed training step."""

    rank: int
    stage: int
    memory: dict[str, int]
    """Bytes of memory at the peak of a step, keyed by cause."""
    sent: dict[str, int]
    """Bytes sent in a micro-batch, keyed by link (``INSIDE`` or ``BETWEEN``)."""
    step_sent: dict[str, int]
    """Bytes sent in the optimizer's step, keyed by link."""
    host: int
    """Bytes in host memory; for the process of a GPU, the bytes that torch pins."""

    @property
    def bytes(self) -> int:
        """Return the bytes of memory of all causes."""
        return sum(self.memory.values())


class Recorder(TorchDispatchMode):
    """Records the allocations of fake tensors, in order, and the messages of a rank.

    Every operator passes through `__torch_dispatch__`. A storage that it allocates gets a number
    and an event with its bytes; when Python frees the storage, a finalizer adds the opposite event.
    The peak of the running sum is the peak memory. Softmax attention is run by its own code, round
    by round; its effects are recorded once per layout and replayed for the other layers. Operators
    that have only real tensors, for example one with a plan's number, run as usual.
    """

    def __init__(
        self,
        rank: int,
        per_node: int,
        entries: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Set up for a rank.

        Args:
            entries: number of the rank's vocabulary entries; a tensor with as many columns counts
                as logits.
            on_progress: receives progress text.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()
        self.rank = rank
        self.kind = "weights"
        """One of ``CAUSES``, to which new storages are attributed."""
        self.events: list[Event] = []
        self.sent = Counter[str]()
        """Bytes sent so far in micro-batches, keyed by link (``INSIDE`` or ``BETWEEN``)."""
        self.step_sent = Counter[str]()
        """Bytes sent in the optimizer's step."""
        self.kept: dict[int, int] = {}
        """Bytes that forward passes left for backward passes, keyed by the storage's number."""
        self.doing = "building the model"
        self.layer = ""
        """Suffix of progress text with the running layer, such as ", layer 3 of 12", or empty."""
        self._kinds: list[str] = []
        self._sizes: list[int] = []
        self._numbers = WeakIdKeyDictionary()
        self._tapes: dict[Any, Tape] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._per_node = per_node
        self._paused = False
        self._entries = entries
        self._resized = set[int]()
        self._num_operators = 0
        self._on_progress = on_progress

    def begin(self, doing: str) -> None:
        """Name the current phase for the progress text, before any layer is reached."""
        self.doing = doing
        self.layer = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make all new tensors fake, and record their allocations, until the block ends."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        name = "_propagate_tensor_meta_non_cached"
        propagate = getattr(ShardingPropagator, name)
        resize = torch.UntypedStorage.resize_

        def propagate_unrecorded(*args: Any) -> Any:
            # The propagation makes tensors of the global shape, which no rank allocates.
            self._paused = True
            try:
                return propagate(*args)
            finally:
                self._paused = False

        def resize_recorded(storage: torch.UntypedStorage, size: int) -> None:
            # FSDP frees and allocates gathered weights with this call.
            resize(storage, size)
            number = self._numbers.get(storage)
            if number is not None:
                self._resized.add(number)
                self._set_size(number, size)

        with (
            replaced(ShardingPropagator, name, propagate_unrecorded),
            replaced(torch.UntypedStorage, "resize_", resize_recorded),
            SIMULATED_KERNEL.set_to(SHAPES),
            SIMULATED_SLAB.set_to(SLABS),
            self._fake,
            self,
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._library.custom_ops import OPDEFS
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on local tensors
        if self._paused:
            return func(*args, **kwargs)
        self._num_operators += 1
        if self._on_progress is not None:
            self._on_progress(f"{self.doing}{self.layer}, {self._num_operators:,} operators so far")
        if func.namespace == "longmesh" and not func.name().startswith(SCANS):
            return self._by_its_code(func, OPDEFS[func.name()]._init_fn, args, kwargs)
        if is_on_real_tensors(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional") and not func.name().startswith(SILENT):
            self.count(*bytes_sent(func, args, self.rank))
        out = func(*args, **kwargs)
        self._record_outputs(out)
        return out

    def _record_outputs(self, out: Any) -> None:
        """Record the new storages of an operator's outputs."""
        from torch._subclasses.fake_tensor import FakeTensor

        for x in tree_leaves(out):
            if not isinstance(x, FakeTensor) or x.device.type == "meta":
                continue
            if x.untyped_storage() in self._numbers:
                continue
            kind = ALLOCATION_CAUSE.value or self.kind
            if kind == "passing" and x.dim() > 1 and x.shape[-1] == self._entries:
                kind = "logits"
            self._record_storage(x.untyped_storage(), kind)

    def _by_its_code(self, func: Any, code: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator's own code, or replay an earlier call with the same layouts.

        The layers of a model make the same calls. A call can be replayed if it leaves nothing
        behind but its outputs.
        """
        leaves = tree_leaves((args, kwargs))
        key = key_of(func, leaves)
        if key in self._tapes:
            return self._replay(self._tapes[key])

        first_storage = len(self._sizes)
        first_event = len(self.events)
        sent_before = Counter(self.sent)
        kind = self.kind
        self.kind = "attention"
        try:
            with self:
                out = code(*args, **kwargs)
        finally:
            self.kind = kind
        if not func.name().startswith(STATEFUL):
            tape = self._tape_of(out, leaves, first_storage, first_event, sent_before)
            if tape is not None:
                self._tapes[key] = tape
        return out

    def _replay(self, tape: Tape) -> Any:
        """Record the effects of an earlier call again; return new outputs with the same layouts."""
        first_storage = len(self._sizes)
        self._kinds += tape.kinds
        self._sizes += tape.sizes
        self.events += [(first_storage + number, change) for number, change in tape.events]
        self.sent += tape.sent
        outs = []
        for number, shape, strides, dtype, device in tape.outs:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            self._follow(out.untyped_storage(), first_storage + number)
            outs.append(out)
        return tree_unflatten(outs, tape.spec)

    def _tape_of(
        self,
        out: Any,
        leaves: Sequence[Any],
        first_storage: int,
        first_event: int,
        sent_before: "Counter[str]",
    ) -> Tape | None:
        """Return the effects of a call since it began; None if it cannot be replayed."""
        from torch._subclasses.fake_tensor import FakeTensor

        outs, spec = tree_flatten(out)
        alive = [number for number in range(first_storage, len(self._sizes)) if self._sizes[number]]
        numbers = []
        for x in outs:
            number = -1
            if isinstance(x, FakeTensor):
                number = self._numbers.get(x.untyped_storage(), -1)
            numbers.append(number)
        if sorted(numbers) != alive:
            return None

        events = []
        for number, change in self.events[first_event:]:
            if number >= first_storage:
                events.append((number - first_storage, change))
        descriptions = []
        for number, x in zip(numbers, outs, strict=True):
            descriptions.append((number - first_storage, x.shape, x.stride(), x.dtype, x.device))
        real_tensors = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                real_tensors.append(leaf)
        return Tape(
            events,
            self._kinds[first_storage:],
            self._sizes[first_storage:],
            self.sent - sent_before,
            descriptions,
            spec,
            real_tensors,
        )

    def _record_storage(self, storage: torch.UntypedStorage, kind: str) -> None:
        number = len(self._sizes)
        self._kinds.append(kind)
        self._sizes.append(0)
        self._set_size(number, storage.nbytes())
        self._follow(storage, number)

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        """Record when a storage is freed."""
        self._numbers[storage] = number
        weakref.finalize(storage, partial(self._set_size, number, 0)).atexit = False

    def _set_size(self, number: int, size: int) -> None:
        self.events.append((number, size - self._sizes[number]))
        self._sizes[number] = size

    def count(self, num_bytes: float, ranks: Collection[int]) -> None:
        """Count bytes that this rank sends in a group, within a node or between nodes."""
        num_nodes = len({rank // self._per_node for rank in ranks})
        link = INSIDE if num_nodes == 1 else BETWEEN
        sent = self.step_sent if self.kind == "optimizer" else self.sent
        sent[link] += round(num_bytes)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the storages that the block leaves behind as activations for a backward pass."""
        first_storage = len(self._sizes)
        yield
        for number in range(first_storage, len(self._sizes)):
            if self._sizes[number]:
                self.kept[number] = self._sizes[number]

    def rehearsal(
        self,
        config: CommonConfig,
        mesh: Mesh,
        gradients: Sequence[Tensor],
        num_micro_batches: int,
        on_gpu: bool,
    ) -> Rehearsal:
        """Return the memory and traffic of the rank, after ``num_micro_batches`` were run.

        A real step has more memory in use than the rehearsed one. The optimizer's state exists from
        the start. If one micro-batch stands for several, the gradients of earlier ones (whole or a
        shard) exist too and, in a pipeline, the activations of others in flight. Storages in host
        memory do not count.
        """
        stage = mesh.pp.get_local_rank()
        micro_batches = 1
        in_flight = 1
        if config.pipeline.single:
            micro_batches = config.train.micro_batches(mesh.dp.size())
            in_flight = int(config.pipeline.in_flight(stage, mesh.pp.size(), micro_batches))

        # Storages that are alive from the start of a step, and those in host memory.
        at_end = alive_after(self.events)
        gradient_numbers = {self._numbers[x.untyped_storage()] for x in gradients}
        from_start = {number for number in at_end if self._kinds[number] == "optimizer"}
        if micro_batches > 1:
            from_start |= gradient_numbers
        on_host = {number for number, kind in enumerate(self._kinds) if kind in (KEPT, MOMENTS)}

        at_peak = alive_after(self.events[: peak_event(self.events, from_start | on_host)])
        alive = {
            number: size
            for number, size in at_peak.items()
            if number not in from_start and number not in on_host
        }
        alive |= {number: at_end[number] for number in from_start}

        # A storage that a forward pass leaves is an activation, unless it is on the host or is a
        # gathered weight.
        activations = {
            number: size
            for number, size in self.kept.items()
            if number not in on_host and number not in self._resized
        }
        memory = Counter[str]()
        for number, size in alive.items():
            cause = self._cause(number, activations)
            if number in gradient_numbers:
                cause = "gradients"
            memory[cause] += size

        # The rehearsal runs fewer micro-batches than a step has. Those in flight hold activations
        # too, and with zero1 their accumulation keeps whole gradients instead of shards.
        if not config.recompute.recompute_offload:
            memory["activations"] += round((in_flight - 1) * sum(activations.values()))
        if config.data_parallel.strategy == "zero1" and micro_batches > 1:
            copies = config.data_parallel.num_distributed_optimizer_instances
            memory["gradients"] *= mesh.dp_cp.size() // copies

        sent = {link: num_bytes // num_micro_batches for link, num_bytes in self.sent.items()}
        host = self._host_bytes(at_end, in_flight, on_gpu)
        return Rehearsal(self.rank, stage, dict(memory), sent, dict(self.step_sent), host)

    def _host_bytes(self, at_end: dict[int, int], in_flight: int, on_gpu: bool) -> int:
        """Return the bytes of host memory, counting whole slabs (large blocks) if it is pinned."""
        activations = []
        moments = []
        for number, size in at_end.items():
            if self._kinds[number] == KEPT:
                activations.append(size)
            elif self._kinds[number] == MOMENTS:
                moments.append(size)
        host = in_slabs(activations * in_flight, SEVERAL)
        if on_gpu:
            return host + in_slabs(moments)
        return host + sum(moments)

    def _cause(self, number: int, activations: Collection[int]) -> str:
        """Return the cause of a storage's memory."""
        if number in self._resized:
            return "gathered weights"
        if number in activations and self._kinds[number] != "logits":
            return "activations"
        return self._kinds[number]
