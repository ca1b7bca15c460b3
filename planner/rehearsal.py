"""Rehearse one rank of any mesh: a training step in one process, on tensors without memory.

torch's fake process group stands for the other ranks: its collectives return at once. torch's fake
tensors run every operator's shape function. The operators' allocations and messages are recorded.

The code of the model, the strategy and the attention runs as in training, so a rehearsal shows what
formulas cannot know: a tensor that lives too long, or an unnecessary message. It takes seconds,
while the search's formulas (planner/step_memory.py) take milliseconds; tests compare the two.
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
"""Builds a task from a configuration and a mesh, for example the task's class."""
ROUNDS = 3
"""Maximum number of rounds of a pipeline schedule to rehearse: later rounds add no memory."""


class _Waiting(NamedTuple):
    """Tensors of a micro-batch that a stage keeps for the rest of its backward pass."""

    received: Tensor | None
    """Output of the previous stage; None on the first stage, which takes tokens."""
    out: Tensor
    gradient: Tensor | None = None
    groups: Any = None
    """Subgraphs for the weights' gradients, which torch returns after the backward pass to the
    input, with the gradients from which they start.
    """


@contextmanager
def fake_process_group(rank: int, world_size: int, per_node: int) -> Iterator[None]:
    """Within the block, act as one rank of a fake process group with ``per_node`` ranks per node.

    LOCAL_WORLD_SIZE is set meanwhile, since the mesh reads the number of ranks per node from it.
    """
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
            # Both caches hold this rank's groups and tensors.
            _clear_sharding_prop_cache()
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
    cu_seqlens: Sequence[int] | None = None,
    device: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Rehearsal:
    """Rehearse a rank's forward pass, backward pass and optimizer step.

    The configuration must be complete and valid.

    Args:
        cu_seqlens: cumulative lengths of a micro-batch's documents, if tokens attend only within
            documents; by default each sample is one document.
        device: ``cuda`` or ``cpu``; by default the device of the run.
        on_progress: receives progress text.

    Raises:
        UserError: the attention or a pipeline stage does not fit the rest of the model.
        RuntimeError: shapes do not fit each other; the message is torch's.
    """
    on_cpu = replace(config.mesh, device="cpu", distributed_backend="auto")
    if config.context.attention_backend != "reference":
        # The kernel need not run, or be installed, here.
        backend: Any = "chunked" if config.model.linear_attention else "auto"
        config = config.updated(attention_backend=backend)
    device = device or config.mesh.device_type
    with fake_process_group(rank, world_size, per_node), distributed_mesh(on_cpu) as mesh:
        task = build(config, mesh)
        batch = _blank_batch(task, cu_seqlens)
        vocab_size = getattr(config.model, "vocab_size", None) or 0
        local_entries = -(-vocab_size // config.mesh.tensor_model_parallel_size)
        recorder = Recorder(rank, per_node, local_entries, on_progress)
        norm = _FusedNorm.apply if device == "cuda" else F.rms_norm
        with SIMULATED_DEVICE.set_to(device), replaced(F, "rms_norm", norm), recorder.recording():
            parts = task.build_parts(initialize=False)
            # Keep the averages of the weights alive during the step, so that their memory counts.
            averages = Ema(config.ema_decay, parts) if config.ema_decay else None
            optimizer = build_optimizer(config.optimizer, *parts, portable=True, mesh=mesh)
            recorder.kind = "passing"
            num_micro_batches = _pass_through(task, parts, batch, recorder)
            gradients = _gradients(config, mesh, parts)
            recorder.kind = "optimizer"
            recorder.begin("the optimizer's step")
            optimizer.step()
            del averages
            rehearsal = recorder.rehearsal(
                config, mesh, gradients, num_micro_batches, device == "cuda"
            )
    if device == "cuda":
        rehearsal.memory["passing"] = rehearsal.memory.get("passing", 0) + WORKSPACES
    return rehearsal


def _blank_batch(task: Task[C], cu_seqlens: Sequence[int] | None) -> dict[str, Tensor]:
    """Return this rank's shard of a micro-batch of zeros, with these documents."""
    blank = task.objective.blank(task.config.train.micro_batch_size)
    if cu_seqlens and "starts" in blank:
        blank["starts"].view(-1)[list(cu_seqlens[:-1])] = True
    return task.objective.local(blank)


def _pass_through(
    task: Task[C], parts: Sequence[Any], batch: dict[str, Tensor], recorder: Recorder
) -> int:
    """Run the stages' forward and backward passes; return the number of micro-batches.

    One micro-batch is enough for a rank with one stage. An interleaved schedule needs several, in
    its order, since the order decides how much memory is alive at once.

    Raises:
        UserError: a stage's output is not the input of the next one.
    """
    config = task.config
    pp = task.mesh.pp
    local_stages = config.pipeline.stages_of(pp.get_local_rank(), pp.size())
    part_of = dict(zip(local_stages, parts, strict=True))
    for part in parts:
        _name_layers(part, recorder)
    num_micro_batches, actions, runner = _schedule(task, parts)

    waiting: dict[tuple[int, int], _Waiting] = {}
    for stage, action, index in actions:
        part = part_of[stage]
        direction = "forward" if action == "F" else "backward"
        recorder.begin(f"{direction} of micro-batch {index + 1} of {num_micro_batches}")
        if action == "F":
            waiting[stage, index] = _forward(task, stage, part, batch, recorder)
            continue

        # Gradients are reduced over ranks with the last micro-batch.
        is_last = action == "B" and index == num_micro_batches - 1
        set_gradient_sync(part, is_last, config.data_parallel.strategy)
        if action == "I":
            waiting[stage, index] = _backward_to_input(stage, part, waiting.pop((stage, index)))
            continue

        _backward(part, waiting.pop((stage, index)))
        if config.pipeline.splits_backward:
            widen_gradients(part)
    if runner is not None:
        for pipeline_stage in runner.stages:
            pipeline_stage.perform_reduce_grad(1)
    return num_micro_batches


def _schedule(
    task: Task[C], parts: Sequence[Any]
) -> tuple[int, Iterable[tuple[int, str, int]], Any]:
    """Return the number of micro-batches, the actions of this rank, and the pipeline's runner.

    An action is a stage, a letter and the number of a micro-batch. The letter is F (forward),
    B (backward), I (backward to the input only) or W (backward to the weights only). Only an
    interleaved schedule has a runner.
    """
    config = task.config
    rank = task.mesh.pp.get_local_rank()
    pp_size = task.mesh.pp.size()
    if config.pipeline.single:
        stages = list(config.pipeline.stages_of(rank, pp_size))
        forwards = [(stage, "F", 0) for stage in stages]
        backwards = [(stage, "B", 0) for stage in reversed(stages)]
        return 1, forwards + backwards, None

    micro_batches = config.train.micro_batches(task.mesh.dp.size())
    rounds = max(1, micro_batches // pp_size)
    count = min(rounds, ROUNDS) * micro_batches // rounds
    runner: Any = task.build_runner(parts, count)
    actions = []
    for entry in runner.schedule.pipeline_order[rank]:
        if entry:
            actions.append(
                (entry.stage_index, entry.computation_type.value, entry.microbatch_index)
            )
    return count, actions, runner


def _forward(
    task: Task[C], stage: int, part: nn.Module, batch: dict[str, Tensor], recorder: Recorder
) -> _Waiting:
    """Run a stage's forward pass, and count the bytes that it exchanges with its neighbours."""
    config = task.config
    pp_size = task.mesh.pp.size()
    hidden = task.hidden_states  # shape and dtype of the tensors between stages
    input_name, _ = task.objective.first_input(config.train.micro_batch_size)
    with recorder.forward():
        received = None
        if stage > 0:
            received = torch.empty_like(hidden, device=task.mesh.device, requires_grad=True)
            batch = batch | {input_name: received}
        out = task.objective.loss_sum(part, batch)

    # Stages exchange hidden states: this stage must send the shape and dtype that the next expects.
    is_last = stage == config.pipeline.stages(pp_size) - 1
    if not is_last and (out.shape, out.dtype) != (hidden.shape, hidden.dtype):
        raise UserError(
            f"pipeline stage {stage} returns {list(out.shape)} {out.dtype}, but the next stage "
            f"takes {list(hidden.shape)} {hidden.dtype}; make the stage return hidden states of "
            "this shape and dtype"
        )

    # The output goes to the next stage, and later the gradient of the input to the one before.
    peers = dist.get_process_group_ranks(task.mesh.pp.get_group())
    if not is_last:
        recorder.count(hidden.nbytes, [recorder.rank, peers[(stage + 1) % pp_size]])
    if stage > 0:
        recorder.count(hidden.nbytes, [recorder.rank, peers[(stage - 1) % pp_size]])
    return _Waiting(received, out)


def _backward(part: nn.Module, waiting: _Waiting) -> None:
    """Run a stage's backward pass, or only the weights' part if the input's has already run."""
    out = waiting.out
    if waiting.groups is None:
        gradient = waiting.gradient
        if gradient is None:
            gradient = torch.ones_like(out)
        out.backward(gradient)
    else:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(part.parameters(), waiting.groups)


def _name_layers(part: nn.Module, recorder: Recorder) -> None:
    """Report to the recorder which layer a forward or backward pass has reached."""
    layers: Any = part.layers
    num_layers = part.config.num_layers  # type: ignore[union-attr]
    first = min(int(number) for number, _ in layers.named_children())

    def name(layer: int) -> None:
        """Name the layer that is running; 0 is outside the layers."""
        recorder.layer = f", layer {layer} of {num_layers}" if layer else ""

    def on_enter(layer: int, x: Tensor) -> None:
        name(layer)
        if layer == first + 1 and x.requires_grad:
            x.register_hook(lambda _: name(0))  # the backward pass leaves the layers

    def on_leave(layer: int, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: name(layer))  # the backward pass reaches this layer
        name(0)

    for number, module in layers.named_children():
        layer = int(number) + 1
        module.register_forward_pre_hook(lambda _, args, layer=layer: on_enter(layer, args[0]))
        module.register_forward_hook(lambda _, args, out, layer=layer: on_leave(layer, out))


def _backward_to_input(stage: int, part: nn.Module, waiting: _Waiting) -> _Waiting:
    """Run a stage's backward pass to its input only, as torch's schedules do.

    The input of the first stage needs no gradient, so the weights' part does everything there.
    """
    # Imported here: the import takes a second, because of torch.compile.
    from torch.distributed.pipelining._backward import stage_backward_input

    gradient = torch.ones_like(waiting.out)
    groups = None
    if stage > 0:
        _, groups = stage_backward_input(
            [waiting.out], [gradient], [waiting.received], part.parameters()
        )
    return waiting._replace(gradient=gradient, groups=groups)


def _gradients(config: CommonConfig, mesh: Mesh, parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return this rank's shards of all gradients.

    Raises RuntimeError if a trained parameter has no gradient, as the training step does.
    """
    gradients = []
    for part in parts:
        finish_gradients(part, mesh.dp_cp, config.data_parallel.strategy)
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                gradients.append(getattr(gradient, "_local_tensor", gradient))
            elif parameter.requires_grad:
                raise RuntimeError(f"no gradient reached {name}: part of the model is not trained")
    return gradients


class _FusedNorm(torch.autograd.Function):
    """torch.nn.functional.rms_norm with the memory of a GPU's kernel.

    The kernel keeps its input and one number per token. On a CPU torch composes the norm from
    several operators, which keep four times as much.
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
