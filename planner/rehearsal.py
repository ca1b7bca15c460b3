"""One rank of any mesh forward and backward in one process, on tensors that have a shape and no
memory.

torch's fake process group stands for the other ranks: its collectives return at once. torch's fake
tensors run every operator's shape function; what the operators would allocate and send is recorded.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.context.geometry import gather_order
from parallel.data import finish_gradients, set_gradient_sync, widen_gradients
from parallel.mesh import Mesh, distributed_mesh
from planner.recorder import Recorder, Rehearsal
from planner.workload import WORKSPACES
from runtime.errors import UserError
from runtime.processes import join
from runtime.simulation import SIMULATED_DEVICE, replaced
from train.config.common import CommonConfig
from train.ema import Ema
from train.optimizers.config import build_optimizer
from train.tasks.task import Task

C = TypeVar("C", bound=CommonConfig)
Build = Callable[[C, Mesh], Task[C]]
"""A configuration and a mesh -> the task of a run of them, such as the class of a task."""
ROUNDS = 3
"""The first rounds of micro-batches of a schedule: those after them hold no more."""


class _Waiting(NamedTuple):
    """Tensors that a stage keeps of a micro-batch for its backward, or for the backward to its
    weights.
    """

    received: Tensor | None
    """Output of the stage before; the first has tokens."""
    out: Tensor
    gradient: Tensor | None = None
    groups: Any = None
    """torch's parts of the graph that the weights' gradients are computed by, with the gradients
    that they wait with
    """


@contextmanager
def fake_process_group(rank: int, world_size: int, per_node: int) -> Iterator[None]:
    """Be one rank of a fake process group, on nodes of ``per_node``, until the block ends."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    launched = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(min(per_node, world_size))
    try:
        join(dist.Backend.FAKE, store=dist.HashStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it and the other hold this rank's groups and tensors
            gather_order.cache_clear()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if launched is not None:
            os.environ["LOCAL_WORLD_SIZE"] = launched


def rehearse(
    config: C,
    build: Build[C],
    rank: int,
    world_size: int,
    per_node: int,
    documents: Sequence[int] | None = None,
    device: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Rehearsal:
    """Run a rank forward, backward and through its optimizer. The configuration is complete and
    valid.

    Args:
        documents: cumulative lengths of a micro-batch's, where they attend apart; by default one a
            sample.
        device: cuda or cpu, by default the run's own.
        tell: is told how far it is.

    Raises:
        UserError: attention or a pipeline stage that does not fit the rest.
        RuntimeError: shapes that do not fit each other, as torch says it.
    """
    on_cpu = replace(config.mesh, device="cpu", distributed_backend="auto")
    if (
        config.context.attention_backend != "reference"
    ):  # the kernel need not run, or be installed, here
        backend: Any = "chunked" if config.model.linear_attention else "auto"
        config = config.updated(attention_backend=backend)
    with fake_process_group(rank, world_size, per_node), distributed_mesh(on_cpu) as mesh:
        task = build(config, mesh)
        blank = task.objective.blank(config.train.micro_batch_size)
        if documents and "starts" in blank:
            blank["starts"].view(-1)[list(documents[:-1])] = True
        batch = task.objective.local(blank)
        entries = getattr(config.model, "vocab_size", None) or 0
        recorder = Recorder(
            rank, per_node, -(-entries // config.mesh.tensor_model_parallel_size), tell
        )
        device = device or config.mesh.device_type
        norm = _FusedNorm.apply if device == "cuda" else F.rms_norm
        with SIMULATED_DEVICE.set_to(device), replaced(F, "rms_norm", norm), recorder.recording():
            parts = task.build_parts(initialize=False)
            averages = (
                Ema(config.ema_decay, parts) if config.ema_decay else None
            )  # they lie there meanwhile
            optimizer = build_optimizer(config.optimizer, *parts, portable=True)
            recorder.kind = "passing"
            count = _pass_through(task, parts, batch, recorder)
            gradients = _gradients(config, mesh, parts)
            recorder.kind = "optimizer"
            recorder.begin("the optimizer's step")
            optimizer.step()
            del averages
            found = recorder.rehearsal(config, mesh, gradients, count, device == "cuda")
    if device == "cuda":
        found.memory["passing"] = found.memory.get("passing", 0) + WORKSPACES
    return found


def _pass_through(
    task: Task[C], parts: Sequence[Any], batch: dict[str, Tensor], recorder: Recorder
) -> int:
    """Take one micro-batch forward and backward through the stages, and return how many were taken.

    An interleaved schedule takes several through, in its order, which decides what is there at
    once.

    Raises:
        UserError: a stage's output is not what the next one takes.
    """
    config, mesh, objective = task.config, task.mesh, task.objective
    name, ranks = objective.first_input(config.train.micro_batch_size)[0], mesh.pp.size()
    hidden, peers = task.hidden_states, dist.get_process_group_ranks(mesh.pp.get_group())
    own = dict(zip(config.pipeline.stages_of(mesh.pp.get_local_rank(), ranks), parts, strict=True))
    for part in parts:
        _name_layers(part, recorder)
    last = config.pipeline.stages(ranks) - 1
    runner: Any = None
    count = 1
    actions: Iterable[tuple[int, str, int]] = [(s, "F", 0) for s in own] + [
        (s, "B", 0) for s in reversed(own)
    ]
    if not config.pipeline.single:
        micro_batches = config.train.micro_batches(mesh.dp.size())
        rounds = max(1, micro_batches // ranks)
        count = min(rounds, ROUNDS) * micro_batches // rounds
        runner = task.build_runner(parts, count)
        order = runner.schedule.pipeline_order[mesh.pp.get_local_rank()]
        actions = [
            (one.stage_index, one.computation_type.value, one.microbatch_index)
            for one in order
            if one
        ]
    waiting: dict[tuple[int, int], _Waiting] = {}
    for stage, action, index in actions:
        part = own[stage]
        recorder.begin(
            f"{'forward' if action == 'F' else 'backward'} of micro-batch {index + 1} of {count}"
        )
        if action == "F":
            with recorder.forward():
                received = (
                    torch.empty_like(hidden, device=mesh.device, requires_grad=True)
                    if stage
                    else None
                )
                out = objective.loss_sum(
                    part, batch if received is None else batch | {name: received}
                )
            if stage != last and (out.shape, out.dtype) != (hidden.shape, hidden.dtype):
                raise UserError(
                    f"pipeline stage {stage} gives {list(out.shape)} {out.dtype}, and the next one takes "
                    f"{list(hidden.shape)} {hidden.dtype}"
                )
            for other in [stage + 1] * (stage != last) + [stage - 1] * (stage > 0):
                recorder.count(hidden.nbytes, [recorder.rank, peers[other % ranks]])
            waiting[stage, index] = _Waiting(received, out)
            del received, out
            continue
        set_gradient_sync(part, action == "B" and index == count - 1, config.data_parallel.strategy)
        at = waiting.pop((stage, index))
        if action == "I":
            waiting[stage, index] = _to_inputs(stage, part, at)
            del at
            continue
        if at.groups is None:
            at.out.backward(torch.ones_like(at.out) if at.gradient is None else at.gradient)
        else:  # its input has its gradient already
            from torch.distributed.pipelining._backward import stage_backward_weight

            stage_backward_weight(part.parameters(), at.groups)
        del at
        if config.pipeline.splits_backward:
            widen_gradients(part)
    for one in runner.stages if runner else ():
        one.perform_reduce_grad(1)
    return count


def _name_layers(part: nn.Module, recorder: Recorder) -> None:
    """Let a part's layers tell the recorder when their forward and their backward begin."""
    layers: Any = part.layers
    total = part.config.num_layers  # type: ignore[union-attr]
    first = min(int(number) for number, _ in layers.named_children())

    def name(layer: int) -> None:
        recorder.layer = f", layer {layer} of {total}" if layer else ""

    def enters(layer: int, x: Tensor) -> None:
        name(layer)
        if layer == first + 1 and x.requires_grad:
            x.register_hook(lambda _: name(0))  # the backward leaves the layers

    def leaves(layer: int, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: name(layer))  # the backward reaches this one
        name(0)

    for number, module in layers.named_children():
        layer = int(number) + 1
        module.register_forward_pre_hook(lambda _, args, layer=layer: enters(layer, args[0]))
        module.register_forward_hook(lambda _, args, out, layer=layer: leaves(layer, out))


def _to_inputs(stage: int, part: nn.Module, at: _Waiting) -> _Waiting:
    """Go back to a stage's input, as torch's schedules do: the first stage has none and waits with
    all of it.
    """
    from torch.distributed.pipelining._backward import (
        stage_backward_input,
    )  # takes a second, for torch.compile

    gradient, groups = torch.ones_like(at.out), None
    if stage:
        _, groups = stage_backward_input([at.out], [gradient], [at.received], part.parameters())
    return at._replace(gradient=gradient, groups=groups)


def _gradients(config: CommonConfig, mesh: Mesh, parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return this rank's shards of all gradients; a parameter without one is an error, as in the
    loop.
    """
    found: list[Any] = []
    for part in parts:
        finish_gradients(part, mesh.dp_cp, config.data_parallel.strategy)
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise RuntimeError(f"no gradient reached {name}: part of the model is not trained")
            found += [] if parameter.grad is None else [parameter.grad]
    return [getattr(gradient, "_local_tensor", gradient) for gradient in found]


class _FusedNorm(torch.autograd.Function):
    """torch.nn.functional.rms_norm in the shapes of a GPU's kernel, which keeps its input and a
    number a token.

    On a CPU torch composes it of operators, which keep four times as much.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        dw = None if weight is None else (grad * x).flatten(0, -2).sum(0).to(weight.dtype)
        return torch.empty_like(x), None, dw, None
