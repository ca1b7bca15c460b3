"""Run micro-batches through the pipeline stages of each rank of pp.

A stage is a run of layers; the first stage also has what comes before the layers, the last what
comes after. Stages send hidden states forward and gradients back, one micro-batch at a time, on
torch's schedules. The loss is divided by the global number of valid tokens, so gradients are summed
over micro-batches and never rescaled.
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
    """Run a step's micro-batches through this rank's stages; its share of the loss is 0 without the
    last stage.
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
        """Build the schedule over ``parts``, the stages that ``config.own`` names.

        Args:
            first_input: the first stage's input: its key in a micro-batch, and a meta tensor like
                it.
            hidden: a meta tensor like what stages send each other.
            tied: for each parameter with copies in several stages, these stages.
        """
        super().__init__(parts, loss_sum, strategy)
        self.mesh, self.device = mesh, device
        self.name, like = first_input
        ranks, stages = mesh.size(), config.stages(mesh.size())
        self.tied = {
            name: sorted({stage % ranks for stage in of}) for name, of in (tied or {}).items()
        }
        """Ranks of pp that hold a copy, by parameter; the first one counts it."""
        self.own = config.own(mesh.get_local_rank(), ranks)
        self._valid = 1
        hidden = hidden.detach().requires_grad_()  # tells torch that gradients are sent back
        self.stages = []
        for part, number in zip(parts, self.own, strict=True):
            last = number == stages - 1
            stage = _Stage(
                _Part(part, self.name, loss_sum),
                number,
                stages,
                device,
                strategy=strategy,
                split_backward=config.splits_backward,
                input_args=(like,) if number == 0 else (hidden,),
                output_args=(
                    hidden.new_empty((), dtype=torch.float32).requires_grad_() if last else hidden,
                ),
                group=mesh.get_group(),
            )
            self.stages.append(stage)
        schedule = get_schedule_class(config.pipeline_schedule)
        loss_fn: Callable[[Tensor, Any], Tensor] = lambda loss, _: loss / self._valid  # noqa: E731
        self.schedule: Any = schedule(
            self.stages[0] if config.single else self.stages,
            micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,
        )
        self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Let NCCL connect the group by all its ranks: only two of them may send in it, where they
        share a weight.
        """
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self.mesh.get_group())

    def parameters(self) -> dict[str, nn.Parameter]:
        rank = self.mesh.get_local_rank()
        others = {name for name, holders in self.tied.items() if holders[0] != rank}
        return {
            name: parameter
            for name, parameter in super().parameters().items()
            if name not in others
        }

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
        """Run the schedule; return the micro-batches' losses, or one zero without the last stage."""
        others = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        first, losses = others.pop(self.name), list[Tensor]()
        try:
            step(
                *([first] if 0 in self.own else []),
                target=first,
                losses=losses,
                return_outputs=False,
                **others,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, UserError):  # torch wraps what a user can fix
                raise error.__cause__ from None
            raise
        for stage in self.stages:
            stage.clear_runtime_states()  # an evaluation keeps every micro-batch's activations
        if not losses:
            return torch.zeros(1, device=self.device)
        return torch.stack([loss.detach() for loss in losses])

    def _sum_copies(self, name: str, holders: Sequence[int]) -> None:
        """Sum the gradients of a parameter's copies, in one order, so that they stay equal to the
        bit.
        """
        copies = [dict(part.named_parameters()).get(name) for part in self.parts]
        own = [_local_gradient(parameter) for parameter in copies if parameter is not None]
        share = torch.stack(own).sum(0) if len(own) > 1 else own[0].contiguous()
        group, rank = self.mesh.get_group(), self.mesh.get_local_rank()
        shares = {peer: share if peer == rank else torch.empty_like(share) for peer in holders}
        peers = [peer for peer in holders if peer != rank]
        receive = [
            dist.P2POp(dist.irecv, shares[peer], group=group, group_peer=peer) for peer in peers
        ]
        send = [dist.P2POp(dist.isend, share, group=group, group_peer=peer) for peer in peers]
        for work in dist.batch_isend_irecv(receive + send) if peers else ():
            work.wait()
        total = torch.stack([shares[peer] for peer in holders]).sum(0)
        for gradient in own:
            gradient.copy_(total)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return to_local(parameter.grad)


class _Part(nn.Module):
    """A stage as torch's schedules call it: the batch's first tensor by position, the rest by name.

    It hides FSDP from the schedules, which would delay every reduction to the end of the step and
    keep whole weights until then.
    """

    def __init__(self, model: nn.Module, name: str, loss_sum: LossSum) -> None:
        super().__init__()
        self.model, self._name, self._loss_sum = model, name, loss_sum

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self._loss_sum(self.model, {self._name: x, **others})


class _Stage(PipelineStage):
    """torch's stage, but with gradients reduced by the strategy and receive buffers freed after
    use.

    torch allocates the buffers of all micro-batches at once and keeps them for the whole run.
    """

    def __init__(
        self, part: _Part, *where: Any, strategy: Strategy, split_backward: bool, **shapes: Any
    ) -> None:
        super().__init__(part, *where, **shapes)
        self._part, self._strategy, self._split_backward = part, strategy, split_backward
        self._receiving: set[tuple[str, int]] = set()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate("forward", fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate("backward", bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        if self._split_backward and self.has_backward:
            finalize_by_hand(self._part.model)
        out = super().forward_one_chunk(fwd_chunk_id, *arguments, **named)
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
            self._part.model, last_backward and not self._split_backward, self._strategy
        )
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            # torch keeps it to the step's end, and its graph would keep the stage's input
            loss.detach_()
        self._release("backward", bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        widen_gradients(self._part.model)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce at the step's end where backwards are split, since FSDP's hooks do not run then.

        torch does so for an FSDP module that it sees and that has not synchronized yet: over the
        shards and, where there are several, over the copies.
        """
        if self._split_backward:
            self.submod = self._part.model
            super().perform_reduce_grad(grad_scale_factor)
            self.submod = self._part

    def _allocate(self, direction: str, chunk: int) -> None:
        table = self._buffers(direction)
        for other in table:
            if (direction, other) not in self._receiving:
                self._release(direction, other)
        for info in table.get(chunk, []):
            info.buffer = torch.empty_like(info.buffer, device=self.device)
            # torch before 2.13 reads from the buffer, once at the first step, whether a gradient is
            # sent back
            info.buffer.requires_grad_(direction == "forward" and self.has_backward)
        self._receiving.add((direction, chunk))

    def _release(self, direction: str, chunk: int) -> None:
        for info in self._buffers(direction).get(chunk, []):
            info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)
        self._receiving.discard((direction, chunk))

    def _buffers(self, direction: str) -> dict[int, list[Any]]:
        """Return the receive buffers by micro-batch."""
        table = self.args_recv_info if direction == "forward" else self.grad_recv_info
        return {
            chunk: [info for info in infos if getattr(info, "buffer", None) is not None]
            for chunk, infos in table.items()
        }
