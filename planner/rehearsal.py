"""One rank of any mesh forward and backward in one process, on tensors that have a shape and no memory.

torch's fake process group stands for the other ranks: its collectives return at once. torch's fake tensors run every
operator's shape function; what the operators would allocate and send is recorded.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kernels.loss import LOSS_CHUNK
from parallel.context import executor
from parallel.context.geometry import _gather_order
from parallel.data import finish_gradients, set_gradient_sync
from parallel.mesh import Mesh, distributed_mesh
from parallel.offload import Offload
from planner.gpu_shapes import SHAPES, rms_norm
from planner.tape import Tapes
from runtime.errors import UserError
from runtime.processes import join
from train import assemble, host_moments
from train.assemble import hidden_states
from train.config.common import CommonConfig
from train.config.entries import DiTRunConfig
from train.ema import Ema
from train.objectives.base import Objective
from train.optim import build_optimizer

C = TypeVar("C", bound=CommonConfig)
Build = Callable[[C, Mesh], tuple[Objective, Callable[[], Sequence[nn.Module]]]]
"""A configuration and a mesh -> the objective, and what builds this rank's parts of the model."""
CAUSES = ("weights", "gathered weights", "gradients", "optimizer", "activations", "attention", "logits", "passing")
"""What a process's memory goes to: the last three are there within a forward or a backward alone."""
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


@dataclass(frozen=True)
class Rehearsal:
    """What a rank takes: bytes of memory at the peak of a step, by cause; bytes sent in a micro-batch, by link."""

    rank: int
    stage: int
    memory: dict[str, int]
    sent: dict[str, int]

    @property
    def bytes(self) -> int:
        """Return the bytes of memory together."""
        return sum(self.memory.values())


@contextmanager
def standing_for(rank: int, world_size: int, per_node: int) -> Iterator[None]:
    """Be one rank of a fake process group, on nodes of ``per_node``, until the block ends."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(min(per_node, world_size))):
        join(dist.Backend.FAKE, store=dist.HashStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it and the other hold this rank's groups and tensors
            _gather_order.cache_clear()


def rehearse(
    config: C,
    build: Build[C],
    rank: int,
    world_size: int,
    per_node: int,
    documents: Sequence[int] | None = None,
    device: str | None = None,
) -> Rehearsal:
    """Run a rank forward, backward and through its optimizer. The configuration is complete and valid.

    Args:
        documents: cumulative lengths of a micro-batch's, where they attend apart; by default one a sample.
        device: cuda or cpu, by default the run's own.

    Raises:
        UserError: attention or a pipeline stage that does not fit the rest.
        RuntimeError: shapes that do not fit each other, as torch says it.
    """
    on_cpu = replace(config.mesh, device="cpu", distributed_backend="auto")
    if config.context.attention_backend != "reference":  # the kernel need not run, or be installed, here
        backend: Any = "chunked" if getattr(config.model, "linear_attention", False) else "auto"
        config = replace(config, context=replace(config.context, attention_backend=backend))
    with standing_for(rank, world_size, per_node), distributed_mesh(on_cpu) as mesh:
        objective, parts_of = build(config, mesh)
        blank = objective.blank(config.train.micro_batch_size)
        if documents and "starts" in blank:
            blank["starts"].view(-1)[list(documents[:-1])] = True
        batch = objective.local(blank)
        entries = getattr(config.model, "vocab_size", None) or 0
        recorder = Recorder(rank, per_node, -(-entries // config.mesh.tensor_model_parallel_size))
        # The CPU takes few rows of logits at once, which are many operators for a large vocabulary.
        device = device or config.mesh.device_type
        fused = patch.object(F, "rms_norm", rms_norm) if device == "cuda" else nullcontext()
        with patch.dict(LOSS_CHUNK, cpu=LOSS_CHUNK[device]), fused, recorder.recording():
            parts = parts_of()
            averaged = isinstance(config, DiTRunConfig) and config.ema.ema_decay
            averages = Ema(averaged, parts) if averaged else None  # they lie there meanwhile
            optimizer = build_optimizer(config.optimizer, *parts)
            _micro_batch(config, mesh, parts, objective, batch, recorder)
            gradients = _gradients(config, mesh, parts)
            recorder.kind = "optimizer"
            optimizer.step()
            del averages
            return recorder.rehearsal(config, mesh, gradients)


def _micro_batch(
    config: CommonConfig,
    mesh: Mesh,
    parts: Sequence[nn.Module],
    objective: Objective,
    batch: dict[str, Tensor],
    recorder: "Recorder",
) -> None:
    """Take a micro-batch forward and backward through this rank's stages, with empty tensors from the others."""
    name, ranks, outputs = objective.first_input(config.train.micro_batch_size)[0], mesh.pp.size(), []
    hidden, peers = hidden_states(config, mesh, objective), dist.get_process_group_ranks(mesh.pp.get_group())
    recorder.kind, recorder.began = "passing", len(recorder.events)
    for stage, part in zip(config.pipeline.own(mesh.pp.get_local_rank(), ranks), parts, strict=True):
        set_gradient_sync(part, True, config.data_parallel.strategy)
        received = torch.empty_like(hidden, device=mesh.device, requires_grad=True)
        out = objective.loss_sum(part, batch if stage == 0 else batch | {name: received})
        final = stage == config.pipeline.stages(ranks) - 1
        if not final and (out.shape, out.dtype) != (hidden.shape, hidden.dtype):
            raise UserError(
                f"pipeline stage {stage} gives {list(out.shape)} {out.dtype}, and the next one takes "
                f"{list(hidden.shape)} {hidden.dtype}"
            )
        for other in [stage + 1] * (not final) + [stage - 1] * (stage > 0):
            recorder.count(hidden.nbytes, [recorder.rank, peers[other % ranks]])
        outputs.append(out)
    recorder.turned = len(recorder.events)
    while outputs:
        out = outputs.pop()
        out.backward(torch.ones_like(out))


def _gradients(config: CommonConfig, mesh: Mesh, parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return this rank's shards of all gradients; a parameter without one is an error, as in the loop."""
    found: list[Any] = []
    for part in parts:
        finish_gradients(part, mesh.dp_cp, config.data_parallel.strategy)
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise RuntimeError(f"no gradient reached {name}: part of the model is not trained")
            found += [] if parameter.grad is None else [parameter.grad]
    return [getattr(gradient, "_local_tensor", gradient) for gradient in found]


class Recorder(Tapes):
    """Record what fake tensors would allocate and free, in order, and what a rank would send.

    Softmax attention is run by its own code, round by round. What takes no fake tensor, such as the number of a plan,
    is computed.
    """

    def __init__(self, rank: int, per_node: int, entries: int = 0) -> None:
        """Set up for a rank that has ``entries`` of the vocabulary, by whose width logits are known."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.rank = rank
        self.began = self.turned = 0
        """Where in the events the forward began and ended."""
        self._per_node, self._paused, self._entries = per_node, False, entries
        self._resized = set[int]()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make every tensor a fake one, and record what happens to it, until the block ends."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        shapes, resize = "_propagate_tensor_meta_non_cached", torch.UntypedStorage.resize_
        asked = getattr(ShardingPropagator, shapes)

        def unrecorded(*args: Any) -> Any:  # it makes tensors as large as those of all ranks together
            self._paused = True
            try:
                return asked(*args)
            finally:
                self._paused = False

        def resized(storage: torch.UntypedStorage, size: int) -> None:  # so FSDP frees and allocates whole weights
            resize(storage, size)
            if (number := self._numbers.get(storage)) is not None:
                self._resized.add(number)
                self._set(number, size)

        def elsewhere(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def called(*args: Any) -> Tensor:
                kind, self.kind = self.kind, "host memory"
                try:
                    return made(*args)
                finally:
                    self.kind = kind

            return called

        with (
            patch.object(Offload, "buffer", elsewhere(Offload.buffer)),
            patch.object(host_moments, "on_host", elsewhere(host_moments.on_host)),
            patch.object(ShardingPropagator, shapes, unrecorded),
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(executor, "select_backend", lambda *_: SHAPES),
            patch.object(assemble, "init_parameters", lambda part, device, _: part.to_empty(device=device)),
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
        if func.namespace == "longmesh" and not func.name().startswith(SCANS):
            return self._by_its_code(func, OPDEFS[func.name()]._init_fn, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        meta, to = any(x.is_meta for x in tensors) or not tensors, kwargs.get("device")
        stays = to.type == "meta" if meta and to else bool(tensors)  # not what to_empty and factories make
        if stays and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional") and not func.name().startswith(SILENT):
            self._communication(func, args)
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, FakeTensor) and x.device.type != "meta" and x.untyped_storage() not in self._numbers:
                logits = self.kind == "passing" and x.dim() > 1 and x.shape[-1] == self._entries
                self._made(x.untyped_storage(), "logits" if logits else self.kind)
        return out

    def _communication(self, func: Any, args: Any) -> None:
        from torch.distributed._tools.fake_collectives import CollectiveOp

        name = func.name().partition(".")[0]
        argument, part = SENT[name]
        ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        count = part(len(ranks)) * sum(x.nbytes for x in tree_leaves(args[argument]))
        self.count(count, [self.rank, ranks[args[2]]] if name == "c10d::send" else ranks)

    def count(self, count: float, ranks: Collection[int]) -> None:
        """Count bytes that this rank sends among ``ranks``; a group that leaves a node sends between nodes."""
        self.sent[INSIDE if len({rank // self._per_node for rank in ranks}) == 1 else BETWEEN] += round(count)

    def _alive(self, end: int) -> dict[int, int]:
        """Return the bytes of each storage after so many events."""
        sizes: dict[int, int] = {}
        for number, change in self.events[:end]:
            sizes[number] = sizes.get(number, 0) + change
        return {number: size for number, size in sizes.items() if size}

    def rehearsal(self, config: CommonConfig, mesh: Mesh, gradients: Sequence[Tensor]) -> Rehearsal:
        """Return what the rank takes and sends.

        The optimizer's state is there from the start; so are gradients, whole or a shard, of earlier micro-batches, and
        the activations of others in a pipeline. What lies in host memory is not there.
        """
        own = {self._numbers[x.untyped_storage()] for x in gradients}
        micro_batches, offload = config.train.micro_batches(mesh.dp.size()), config.recompute.recompute_offload
        at_end, before = self._alive(len(self.events)), self._alive(self.began)
        early = {n for n in at_end if self._kinds[n] == "optimizer"} | (own if micro_batches > 1 else set())
        moved = {n for n, kind in enumerate(self._kinds) if kind == "host memory"}
        known = moved | before.keys() | self._resized
        kept, skipped = {n: size for n, size in self._alive(self.turned).items() if n not in known}, early | moved
        live, peaks = 0, [0]
        for number, change in self.events:
            live += 0 if number in skipped else change
            peaks.append(live)
        at_peak, memory = self._alive(peaks.index(max(peaks))), Counter[str]()
        for n, size in ({n: at_peak[n] for n in at_peak.keys() - skipped} | {n: at_end[n] for n in early}).items():
            held = n in kept and self._kinds[n] != "logits"
            kind = "gathered weights" if n in self._resized else "activations" if held else self._kinds[n]
            memory["gradients" if n in own else kind] += size
        ranks, stage = mesh.pp.size(), mesh.pp.get_local_rank()
        if ranks > 1 and not offload:
            others = config.pipeline.in_flight(stage, ranks, micro_batches) - 1
            memory["activations"] += round(others * sum(kept.values()))
        if config.data_parallel.strategy == "zero1" and micro_batches > 1:
            memory["gradients"] *= mesh.dp_cp.size() // config.data_parallel.num_distributed_optimizer_instances
        return Rehearsal(self.rank, stage, dict(memory), dict(self.sent))
