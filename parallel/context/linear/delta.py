"""Executor of the gated delta rule over segments on several ranks. The only autograd code for it.

A segment maps its incoming state S to M S + U, and adds Q S to the outputs that it has without (kernels/delta/scan.py).
So one that continues a document is computed before S arrives: one product is left, and U + M S goes on at once. The
gradient of S is M^T dS' + Q^T dout, passed back along the chain. Only segments in the middle of a document take that
wider scan: one that begins it knows its state, one that ends it is computed last, unless it is most of its rank.

Shapes as in ``kernels.delta.rule``, with T local positions; states in float32 (float64 for float64).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.delta import scan
from kernels.delta.rule import forgetting
from parallel.context.linear.segments import Segment, plan_of, segments
from parallel.context.plan import PLANS, Plan
from parallel.context.transport import Tensors, Transport
from runtime.tensors import Handles


class Part(NamedTuple):
    """Segments of a rank that one scan computes."""

    segments: tuple[Segment, ...]
    wide: bool = False
    """True if it does not wait for the incoming state."""

    @property
    def link(self) -> Segment:
        """Return the only segment of a part that states enter or leave."""
        return self.segments[0]

    def of(self, x: Tensor) -> Tensor:
        """Return the part's tokens of x ``[B, T, ...]``."""
        found = [x[:, segment.tokens] for segment in self.segments]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Copy the part's tokens into x."""
        pieces = values.split([segment.length for segment in self.segments], 1)
        for segment, piece in zip(self.segments, pieces, strict=True):
            x[:, segment.tokens] = piece

    def inputs(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, g and beta, with gates that forget between documents."""
        q, k, v, g, beta = map(self.of, tensors)
        bounds = tuple(accumulate((segment.length for segment in self.segments), initial=0))
        return q, k, v, forgetting(g, bounds), beta


class Parts(NamedTuple):
    """Parts of a rank in the order of its work."""

    first: tuple[Part, ...]
    """Segments that begin a document which goes on elsewhere."""
    wide: tuple[Part, ...]
    whole: tuple[Part, ...]
    """One part of all documents that no other rank has tokens of; none if there is none."""
    last: tuple[Part, ...]
    """Segments that end a document and wait for its state."""

    @property
    def all(self) -> tuple[Part, ...]:
        """Return all parts."""
        return self.first + self.wide + self.whole + self.last


@lru_cache(maxsize=256)
def parts(plan: Plan, rank: int) -> Parts:
    """Return the parts of a rank, without padding, whatever that holds."""
    found = defaultdict[str, list[Part]](list)
    whole = []
    for segment in segments(plan)[rank]:
        if segment.start >= plan.seq_len:
            continue
        if segment.before is None and segment.after is None:
            whole.append(segment)
        elif segment.before is None:
            found["first"].append(Part((segment,)))
        elif segment.after is not None or segment.length > plan.local_len // 2:
            found["wide"].append(Part((segment,), wide=True))
        else:
            found["last"].append(Part((segment,)))
    if whole:
        found["whole"].append(Part(tuple(whole)))
    return Parts(*(tuple(found[name]) for name in Parts._fields))


@dataclass(eq=False)
class DeltaExecutor:
    """The gated delta rule of one rank, for any plan of one geometry whose ranks hold consecutive tokens."""

    transport: Transport
    rank: int
    backend: str = "auto"
    """As for ``select_delta_backend``; softmax attention's other backends leave it to ``auto``."""

    def __post_init__(self) -> None:
        if self.backend not in scan.DELTA_BACKENDS:
            self.backend = "auto"
        self.handle = _executors.add(self)

    def forward(self, plan: Plan, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and in one row what the backward of each part of ``parts`` needs.

        These are the states before each of the part's slabs and after it and, of a wide one, Q and M.
        """
        mine, v = parts(plan, self.rank), tensors[2]
        out, kept = v.new_zeros(v.shape), dict[Part, list[Tensor]]()

        def compute(part: Part, state: Tensor | None = None) -> Tensor:
            found, states = scan.scan(*part.inputs(tensors), state, backend=self.backend)
            part.put(out, found)
            kept[part] = [states]
            return states[-1]

        maps = dict[Part, tuple[Tensor, Tensor, Tensor]]()

        def meanwhile() -> None:
            for part in mine.wide:
                maps[part] = scan.wide_scan(*part.inputs(tensors), backend=self.backend)
            for part in mine.whole:
                compute(part)

        def enter(part: Part, state: Tensor) -> Tensor:
            if not part.wide:
                return compute(part, state)
            found, reads, states = maps.pop(part)
            added, through = states.split([v.shape[-1], state.shape[-2]], -1)
            states = added + through @ state
            part.put(out, found + torch.einsum("bthd,bhde->bthe", reads, state))
            kept[part] = [states, reads, through[-1]]
            return states[-1]

        ready = {part: compute(part) for part in mine.first}
        self._pass(mine, ready, enter, meanwhile, tensors, reverse=False)
        row = [x.flatten() for part in mine.all for x in kept[part]]
        return out, torch.cat(row) if row else v.new_empty(0, dtype=torch.promote_types(v.dtype, torch.float32))

    def backward(self, plan: Plan, dout: Tensor, kept: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Return dq, dk, dv, dg and dbeta in the dtypes of the inputs."""
        mine = parts(plan, self.rank)
        shapes = {part: _kept_shapes(part, *tensors[1:3]) for part in mine.all}
        left = iter(kept.split([shape.numel() for several in shapes.values() for shape in several]))
        saved = {part: [next(left).view(shape) for shape in several] for part, several in shapes.items()}
        found = [x.new_zeros(x.shape) for x in tensors]

        def compute(part: Part, dfinal: Tensor | None = None) -> Tensor:
            taken = part.of(dout), dfinal, *part.inputs(tensors), saved[part][0]
            *gradients, dstate = scan.backward(*taken, backend=self.backend)
            for dx, gradient in zip(found, gradients, strict=True):
                part.put(dx, gradient)
            return dstate

        def reached(part: Part) -> Tensor:
            reads = saved[part][1]
            return torch.einsum("bthd,bthe->bhde", reads, part.of(dout).to(reads.dtype))

        ends = [part for part in mine.wide if part.link.after is None]
        ready = {part: compute(part) for part in mine.last} | {part: reached(part) for part in ends}
        own, entered = dict[Part, Tensor](), dict[Part, Tensor | None](dict.fromkeys(ends))

        def meanwhile() -> None:
            own.update((part, reached(part)) for part in mine.wide if part not in ready)
            for part in mine.whole:
                compute(part)

        def enter(part: Part, dfinal: Tensor) -> Tensor | None:
            entered[part] = dfinal
            return own[part] + saved[part][2].transpose(-1, -2) @ dfinal if part.wide else None

        self._pass(mine, ready, enter, meanwhile, tensors, reverse=True)
        for part, dfinal in entered.items():
            compute(part, dfinal)
        return found

    def _pass(
        self,
        mine: Parts,
        ready: dict[Part, Any],
        enter: Callable[[Part, Tensor], Tensor | None],
        meanwhile: Callable[[], None],
        tensors: Tensors,
        *,
        reverse: bool,
    ) -> None:
        """Pass states on in rounds, or (``reverse``) their gradients back, and work ``meanwhile``.

        Args:
            ready: states of the parts that need no other; the rest are added.
            enter: takes a part and its incoming state, returns the one that it ends with.
        """
        rounds = defaultdict[int, tuple[list[Part], list[Part]]](lambda: ([], []))
        for part in sorted((part for part in mine.all if part not in mine.whole), key=lambda part: part.link.start):
            *_, depth, left, before, after = part.link
            place, source, target = (left, after, before) if reverse else (depth, before, after)
            if target is not None:
                rounds[place][0].append(part)
            if source is not None:
                rounds[place - 1][1].append(part)
        q, _, v, _, _ = tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        self.transport.connect_all(v.device)
        waits = []
        if not rounds:
            meanwhile()
        for index, number in enumerate(sorted(rounds)):
            leaving, coming = rounds[number]
            sends: list[tuple[int, Tensors]] = [(_peer(part, reverse), (ready[part],)) for part in leaving]
            states = [v.new_empty(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=wide) for _ in coming]
            peers = [_peer(part, not reverse) for part in coming]
            receives: list[tuple[int, Tensors]] = [(peer, (state,)) for peer, state in zip(peers, states, strict=True)]
            arrivals, sent = self.transport.isend_irecv(sends, receives, far=False)
            waits.append(sent)
            if index == 0:
                meanwhile()
            for part, arrival in zip(coming, arrivals, strict=True):
                ready[part] = enter(part, arrival()[0])
        for sent in waits:
            sent()


def _kept_shapes(part: Part, k: Tensor, v: Tensor) -> list[torch.Size]:
    """Return the shapes of what ``DeltaExecutor.forward`` keeps of a part."""
    k, v = part.of(k), part.of(v)
    states = scan.empty_states(k, v).shape
    width = k.shape[-1]
    wide = [torch.Size((*v.shape[:3], width)), torch.Size((*states[1:3], width, width))] if part.wide else []
    return [states, *wide]


def _peer(part: Part, before: bool) -> int:
    peer = part.link.before if before else part.link.after
    assert peer is not None
    return peer


# One op for the whole attention, with handles for executor and plan, as in parallel/context/executor.py.
_executors: Handles[DeltaExecutor] = Handles()


@torch.library.custom_op("longmesh::delta_attention", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: int, plan: Tensor
) -> tuple[Tensor, Tensor]:
    executor = _executors[handle]
    found = plan_of("attend_delta", plan, executor.transport.geometry)
    with torch.autocast(q.device.type, enabled=False):
        return executor.forward(found, q, k, v, g, beta)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: int, plan: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.library.get_ctx().new_dynamic_size()  # the plan's
    return v.new_empty(v.shape), v.new_empty(kept, dtype=torch.promote_types(v.dtype, torch.float32))


@torch.library.custom_op("longmesh::delta_attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor, kept: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: int, plan: Tensor
) -> list[Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        return _executors[handle].backward(PLANS[plan], dout, kept, q, k, v, g, beta)


@_backward_op.register_fake
def _(
    dout: Tensor, kept: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: int, plan: Tensor
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.handle, ctx.plan = inputs  # the handle keeps the plan alive
    ctx.executor = _executors[ctx.handle]  # keep it alive until the backward
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 7
    found = torch.ops.longmesh.delta_attention_backward(dout, *ctx.saved_tensors, ctx.handle, ctx.plan)
    return *found, None, None


_forward_op.register_autograd(_gradients, setup_context=_save)
