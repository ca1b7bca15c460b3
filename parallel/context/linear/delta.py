"""Executor of the gated delta rule over segments on several ranks. The only autograd code for it.

A segment maps its incoming state S to M S + U, and adds Q S to the outputs that it has without (kernels/delta/scan.py).
So one that continues a document is computed before S arrives: one product is left, and U + M S goes on at once, or the
map itself did earlier (schedules.py). The gradient of S is M^T dS' + Q^T dout, passed back along the chain. Only
segments in the middle of a document take that wider scan: one that begins it knows its state, one that ends it is
computed last, unless it is most of its rank.

Shapes as in ``kernels.delta.rule``, with T local positions; states in float32 (float64 for float64).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.delta import scan
from kernels.delta.rule import forgetting
from parallel.context.linear.schedules import rounds_of
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
    """As for ``select_delta_backend``; that of softmax attention, its Triton kernel too, leaves it to ``auto``."""

    def __post_init__(self) -> None:
        if self.backend == "triton" or self.backend not in scan.DELTA_BACKENDS:
            self.backend = "auto"
        self.handle = _executors.add(self)

    def forward(self, plan: Plan, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and in one row what the backward of each part of ``parts`` needs.

        These are the states before each of the part's slabs and after it and, of a wide one, Q and M.
        """
        mine, (q, _, v, _, _) = parts(plan, self.rank), tensors
        out, kept = v.new_zeros(v.shape), dict[Part, list[Tensor]]()
        scans = dict[Part, tuple[Tensor, Tensor, Tensor]]()

        def compute(part: Part, state: Tensor | None = None) -> Tensor:
            found, states = scan.scan(*part.inputs(tensors), state, backend=self.backend)
            part.put(out, found)
            kept[part] = [states]
            return states[-1]

        @cache
        def own(part: Part) -> Tensors:
            if not part.wide:
                return (compute(part),)
            scans[part] = scan.wide_scan(*part.inputs(tensors), backend=self.backend)
            return scans[part][2][-1].split([v.shape[-1], q.shape[-1]], -1)

        def meanwhile() -> None:
            for part in mine.wide:
                own(part)
            for part in mine.whole:
                compute(part)

        def enter(part: Part, state: Tensor) -> None:
            if not part.wide:
                compute(part, state)
                return
            found, reads, states = scans.pop(part)
            added, through = states.split([v.shape[-1], q.shape[-1]], -1)
            part.put(out, found + torch.einsum("bthd,bhde->bthe", reads, state))
            kept[part] = [added + through @ state, reads, through[-1]]

        self._pass(plan, own, meanwhile, enter, tensors, gradient=False)
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

        entered = dict[Part, Tensor | None]()

        @cache
        def own(part: Part) -> Tensors:
            if not part.wide:
                return (compute(part),)
            reads = saved[part][1]
            reached = torch.einsum("bthd,bthe->bhde", reads, part.of(dout).to(reads.dtype))
            if part.link.after is None:
                entered[part] = None
                return (reached,)
            return reached, saved[part][2].transpose(-1, -2)

        def meanwhile() -> None:
            for part in mine.wide:
                own(part)
            for part in mine.whole:
                compute(part)

        self._pass(plan, own, meanwhile, entered.__setitem__, tensors, gradient=True)
        for part, dfinal in entered.items():
            compute(part, dfinal)
        return found

    def _pass(
        self,
        plan: Plan,
        own: Callable[[Part], Tensors],
        meanwhile: Callable[[], None],
        enter: Callable[[Part, Tensor], None],
        tensors: Tensors,
        *,
        gradient: bool,
    ) -> None:
        """Pass states on in rounds, or their gradients back, and work ``meanwhile``, while the first are on their way.

        Args:
            own: returns the map of a part, (U, M), or (U,) of the one that begins the chain.
            enter: takes a part and its incoming state; called when what others wait for has left.
        """
        q, _, v, _, _ = tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        widths = v.shape[-1], q.shape[-1]
        placed = {part.link: part for part in parts(plan, self.rank).all}
        known, due, waits = dict[Part, Tensors](), dict[Part, Tensor](), []
        self.transport.connect_all(v.device)
        steps = rounds_of(plan, self.rank, gradient=gradient)
        if not steps:
            meanwhile()
        for index, (leaving, coming) in enumerate(steps):
            sends = [(message.peer, _onward(own, known, placed[message.source])) for message in leaving]
            receives = [
                (message.source.rank, tuple(_matrix(q, width, v, wide) for width in widths[: 2 - message.state]))
                for message in coming
            ]
            arrivals, sent = self.transport.isend_irecv(sends, receives, far=False)
            waits.append(sent)
            if index == 0:
                meanwhile()
            for part, state in due.items():
                enter(part, state)
            due.clear()
            earlier = defaultdict[Part, list[Tensors]](list)
            for message, arrival in zip(coming, arrivals, strict=True):
                found = arrival()
                for target in message.targets:
                    earlier[placed[target]].append(found)
            for part, maps in earlier.items():
                known[part] = reduce(_composed, [*maps, *([known[part]] if part in known else [])])
                if len(known[part]) == 1:
                    due[part] = known[part][0]
        for part, state in due.items():
            enter(part, state)
        for sent in waits:
            sent()


def _onward(own: Callable[[Part], Tensors], known: dict[Part, Tensors], part: Part) -> Tensors:
    """Return the map of a part and of all before it that are known."""
    return _composed(known[part], own(part)) if part in known else own(part)


def _composed(earlier: Tensors, later: Tensors) -> Tensors:
    """Return the map of two stretches in sequence, (U, M), or (U,) if the earlier begins the chain."""
    added, through = later
    found = (through @ x for x in earlier)
    return added + next(found), *found


def _matrix(q: Tensor, width: int, v: Tensor, dtype: torch.dtype) -> Tensor:
    return v.new_empty(v.shape[0], v.shape[2], q.shape[-1], width, dtype=dtype)


def _kept_shapes(part: Part, k: Tensor, v: Tensor) -> list[torch.Size]:
    """Return the shapes of what ``DeltaExecutor.forward`` keeps of a part."""
    k, v = part.of(k), part.of(v)
    states = scan.empty_states(k, v).shape
    width = k.shape[-1]
    wide = [torch.Size((*v.shape[:3], width)), torch.Size((*states[1:3], width, width))] if part.wide else []
    return [states, *wide]


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
