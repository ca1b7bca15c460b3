"""Run micro-batches through the stages of each pipeline rank.

A stage is a range of layers; the first stage also has the embedding, the last the logits and the
loss. Stages send hidden states forward and gradients back, one micro-batch at a time, in the order
of torch's schedules. The loss is divided by the global number of valid tokens, so gradients are
summed over micro-batches and never rescaled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from parallel.data import (
    LossSum,
    MicroBatch,
    Runner,
    Strategy,
    finalize_by_hand,
    set_gradient_sync,
    to_local,
    widen_gradients,
)
from parallel.pipeline.stages import PipelineConfig
from runtime.errors import UserError


class PipelineRunner(Runner):
    """Runs a step's micro-batches through this rank's stages.

    A rank without the last stage has 0 as its share of the loss.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        loss_sum: LossSum,
        strategy: Strategy,
        *,
        config: PipelineConfig,
        mesh: DeviceMesh,
        device: torch.device,
        micro_batches: int,
        first_input: tuple[str, Tensor],
        hidden: Tensor,
        tied: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Build the schedule over ``parts``, this rank's stages as in ``config.stages_of``.

        Args:
            first_input: key of the first stage's input in a micro-batch, and a meta tensor of its
                shape and dtype.
            hidden: meta tensor of the shape and dtype of the hidden states between stages.
            tied: for each parameter with several copies, the stages that have a copy.
        """
        super().__init__(parts, loss_sum, strategy)
        self.mesh = mesh
        self.device = device
        self.name, meta_input = first_input
        ranks = mesh.size()
        num_stages = config.stages(ranks)
        self.tied: dict[str, list[int]] = {}
        """Pipeline ranks that hold a copy of each parameter, keyed by parameter; only the first
        counts it in norms and totals."""
        for name, copy_stages in (tied or {}).items():
            self.tied[name] = sorted({stage % ranks for stage in copy_stages})
        self.stage_numbers = config.stages_of(mesh.get_local_rank(), ranks)
        self._valid = 1

        hidden = hidden.detach().requires_grad_()  # tells torch that gradients will be sent back
        meta_loss = hidden.new_empty((), dtype=torch.float32).requires_grad_()
        self.stages = []
        for part, number in zip(parts, self.stage_numbers, strict=True):
            stage = _Stage(
                _StageModule(part, self.name, loss_sum),
                number,
                num_stages,
                device,
                strategy=strategy,
                split_backward=config.splits_backward,
                input_args=(meta_input,) if number == 0 else (hidden,),
                output_args=(meta_loss,) if number == num_stages - 1 else (hidden,),
                group=mesh.get_group(),
            )
            self.stages.append(stage)

        def loss_fn(loss: Tensor, _: Any) -> Tensor:
            return loss / self._valid

        schedule = get_schedule_class(config.pipeline_schedule)
        self.schedule: Any = schedule(
            self.stages[0] if config.single else self.stages,
            micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,
        )
        self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Make NCCL connect all ranks of the group.

        NCCL connects a group at its first use, in which all ranks must take part. Without this
        call, the first use might be by only the two ranks that share a weight.
        """
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self.mesh.get_group())

    def parameters(self) -> dict[str, nn.Parameter]:
        parameters = super().parameters()
        for name, holders in self.tied.items():
            if holders[0] != self.mesh.get_local_rank():
                parameters.pop(name, None)
        return parameters

    def forward_backward(self, batches: Sequence[MicroBatch], valid: int) -> Tensor:
        self._valid = valid
        total = self._run(self.schedule.step, batches).double().sum()
        for name, holders in self.tied.items():
            if self.mesh.get_local_rank() in holders:
                self._sum_copies(name, holders)
        return total

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> Tensor:
        self._valid = 1
        return self._run(self.schedule.eval, batches).double().sum()

    def _run(self, step: Callable[..., Any], batches: Sequence[MicroBatch]) -> Tensor:
        """Run the schedule; return the micro-batches' losses, or 0 if another rank has the loss."""
        inputs = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        first_input = inputs.pop(self.name)
        positional = [first_input] if 0 in self.stage_numbers else []
        losses: list[Tensor] = []
        try:
            step(*positional, target=first_input, losses=losses, return_outputs=False, **inputs)
        except RuntimeError as error:
            if isinstance(error.__cause__, UserError):  # torch wraps the error
                raise error.__cause__ from None
            raise
        for stage in self.stages:
            # Without this, an evaluation would keep the activations of every micro-batch.
            stage.clear_runtime_states()
        if not losses:
            return torch.zeros(1, device=self.device)
        return torch.stack([loss.detach() for loss in losses])

    def _sum_copies(self, name: str, holders: Sequence[int]) -> None:
        """Sum the gradients of a parameter's copies, in place.

        All ranks with a copy add the shares in the order of the ranks, so the copies' gradients,
        and therefore the copies, remain equal to the bit.
        """
        gradients: list[Tensor] = []
        for part in self.parts:
            parameter = dict(part.named_parameters()).get(name)
            if parameter is not None:
                assert parameter.grad is not None
                gradients.append(to_local(parameter.grad))
        if len(gradients) > 1:
            share = torch.stack(gradients).sum(0)
        else:
            share = gradients[0].contiguous()

        group = self.mesh.get_group()
        rank = self.mesh.get_local_rank()
        shares = {rank: share}
        receives: list[dist.P2POp] = []
        sends: list[dist.P2POp] = []
        for peer in holders:
            if peer != rank:
                shares[peer] = torch.empty_like(share)
                receive = dist.P2POp(dist.irecv, shares[peer], group=group, group_peer=peer)
                receives.append(receive)
                sends.append(dist.P2POp(dist.isend, share, group=group, group_peer=peer))
        if sends:
            for work in dist.batch_isend_irecv(receives + sends):
                work.wait()

        total = torch.stack([shares[peer] for peer in holders]).sum(0)
        for gradient in gradients:
            gradient.copy_(total)


class _StageModule(nn.Module):
    """A stage as torch's schedules call it: with the first tensor by position, the rest by name.

    It hides FSDP from the schedules, which would delay every reduction to the end of the step and
    keep gathered weights until then.
    """

    def __init__(self, model: nn.Module, name: str, loss_sum: LossSum) -> None:
        super().__init__()
        self.model = model
        self._name = name
        self._loss_sum = loss_sum

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self._loss_sum(self.model, {self._name: x, **others})


class _Stage(PipelineStage):
    """torch's stage, with gradients reduced by the strategy and receive buffers freed after use.

    torch allocates the buffers of all micro-batches at once and keeps them for the whole run: one
    hidden state per micro-batch, which takes much memory with long sequences.
    """

    def __init__(
        self,
        stage_module: _StageModule,
        *arguments: Any,
        strategy: Strategy,
        split_backward: bool,
        **shapes: Any,
    ) -> None:
        super().__init__(stage_module, *arguments, **shapes)
        self._stage_module = stage_module
        self._strategy = strategy
        self._split_backward = split_backward
        self._receiving: set[tuple[str, int]] = set()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate("forward", fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate("backward", bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **kwargs: Any) -> Any:
        if self._split_backward and self.has_backward:
            finalize_by_hand(self._stage_module.model)
        out = super().forward_one_chunk(fwd_chunk_id, *arguments, **kwargs)
        self._release("forward", fwd_chunk_id)
        return out

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        set_gradient_sync(
            self._stage_module.model, last_backward and not self._split_backward, self._strategy
        )
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            # torch keeps the loss until the step's end; its graph would keep the stage's input.
            loss.detach_()
        self._release("backward", bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        widen_gradients(self._stage_module.model)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients at the step's end if backward passes are split into two parts.

        FSDP's hooks do not run then, so torch's stage must reduce the gradients: over the shards
        and, if there are several copies, over the copies. torch does so if its ``submod`` is an
        FSDP module that has not synchronized yet, so ``submod`` is that module during this call.
        """
        if self._split_backward:
            self.submod = self._stage_module.model
            super().perform_reduce_grad(grad_scale_factor)
            self.submod = self._stage_module

    def _allocate(self, direction: str, chunk: int) -> None:
        """Allocate the receive buffers of a micro-batch; free those that torch made beforehand."""
        buffers = self._buffers(direction)
        for other_chunk in buffers:
            if (direction, other_chunk) not in self._receiving:
                self._release(direction, other_chunk)
        for info in buffers.get(chunk, []):
            info.buffer = torch.empty_like(info.buffer, device=self.device)
            # At the first step, torch before 2.13 reads from the buffer whether to send a gradient
            # back.
            info.buffer.requires_grad_(direction == "forward" and self.has_backward)
        self._receiving.add((direction, chunk))

    def _release(self, direction: str, chunk: int) -> None:
        for info in self._buffers(direction).get(chunk, []):
            info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)
        self._receiving.discard((direction, chunk))

    def _buffers(self, direction: str) -> dict[int, list[Any]]:
        """Return the receive buffers, keyed by micro-batch."""
        table = self.args_recv_info if direction == "forward" else self.grad_recv_info
        buffers: dict[int, list[Any]] = {}
        for chunk, infos in table.items():
            buffers[chunk] = [info for info in infos if getattr(info, "buffer", None) is not None]
        return buffers
