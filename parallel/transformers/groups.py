"""Groups of ranks that share sequences, for the trainers of transformers and TRL.

A group consists of consecutive ranks. Each group loads its own batches, as a single process would,
and each of its ranks computes a part of every sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel.transformers.shard import Sharded, shard
from runtime.errors import UserError

Base: Any = object
"""Base class for type checkers: it stands for transformers' trainer, which is not imported here."""
REFUSED_BY_ALL = {
    "use_liger_kernel": (
        False,
        "the loss needs logits, which its forward pass does not return; set it to False",
    ),
    "model_init": (
        None,
        "a model that the trainer creates again would not be sharded; pass model instead",
    ),
    "parallelism_config": (
        None,
        "this trainer makes its own mesh; give context_parallel_size instead, and leave other "
        "dimensions to data parallelism",
    ),
    "deepspeed": (None, "gradients must be means over all processes; use DDP or FSDP2 instead"),
}
"""Trainer arguments that are refused unless they have the value given here, with the reason."""


SCORING_METHODS = ("_precompute_ref_logps", "_get_per_token_logps_and_entropies")
"""Methods of TRL's trainers whose losses need log-probabilities of whole completions."""


def needs_row_scores(classes: Sequence[type]) -> bool:
    """Return True if one of the classes is a DPO, KTO, GRPO or RLOO trainer of TRL."""
    return any(name in vars(kind) for kind in classes for name in SCORING_METHODS)


class GroupTrainer(Base):
    """A mixin whose groups of consecutive ranks load the same batches.

    Args:
        context_parallel_size: number of ranks in a group, which must divide the number of
            processes; by default all processes.
        context_parallel_method: as for ``shard``.
        context_parallel_options: further arguments of ``shard``.
    """

    model_wrapped: Any

    def __init__(
        self,
        *args: Any,
        context_parallel_size: int | None = None,
        context_parallel_method: str = "exchange",
        context_parallel_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self._group: dist.ProcessGroup | None = None
        self._size = context_parallel_size
        self._method = context_parallel_method
        self._options = dict(context_parallel_options or {})
        super().__init__(*args, **others)

    def _check_arguments(self, refused: Mapping[str, tuple[Any, str]]) -> None:
        """Raise UserError for an argument that has another value than the required one."""
        for name, (required, reason) in refused.items():
            value = getattr(self.args, name, getattr(self, name, required))
            if value != required:
                raise UserError(f"{name} is {value!r}, but {reason}")

    def _shard(self, model: nn.Module) -> Sharded:
        """Share a model's sequences between the ranks of this group."""
        return shard(model, self._group, method=self._method, **self._options)

    def create_accelerator_and_postprocess(self) -> None:
        """Make accelerate load the same data on all ranks of a group."""
        from torch.distributed.device_mesh import init_device_mesh

        super().create_accelerator_and_postprocess()
        world_size = self.accelerator.num_processes
        size = world_size if self._size is None else self._size
        self._size = size
        if size < 1 or world_size % size:
            raise UserError(
                f"context_parallel_size is {size}; give a divisor of the number of processes, "
                f"{world_size}"
            )
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise UserError(
                "train_sampling_strategy batch_rebalance gives every process its own samples, but "
                "the ranks of a group need the same; use another train_sampling_strategy"
            )
        if self.args.fsdp and not self.is_fsdp_enabled:
            raise UserError(
                "fsdp is on, but accelerate has no FSDP for these devices and would use DDP; leave "
                "out fsdp"
            )
        if self.accelerator.dispatch_batches:
            raise UserError(
                "dispatch_batches is True and would give every process its own samples, but the "
                "ranks of a group need the same; leave out dispatch_batches"
            )

        self.accelerator.dataloader_config.dispatch_batches = False
        if dist.is_initialized():
            mesh = init_device_mesh(
                self.args.device.type,
                (world_size // size, size),
                mesh_dim_names=("dp_replicate", "cp"),
            )
            self._group = mesh["cp"].get_group()
            # Replacing this function affects only accelerate's data loaders, which alone call it.
            self.accelerator._prepare_device_mesh = lambda: mesh

    def get_cp_size(self) -> int:
        """Return the size of a group, which transformers uses to divide the batch size."""
        return int(self._size or 1)

    @contextmanager
    def _prepared_for_evaluation(self) -> Iterator[None]:
        """Undo the preparation of a model that is evaluated before any training.

        accelerate marks the model as prepared, but has not wrapped it in DDP. A later training
        would trust that mark, and every process would train by itself.
        """
        if self.accelerator._models:  # already prepared for training, or by the caller
            yield
            return
        if self.is_fsdp_enabled:
            raise UserError(
                "FSDP prepares a model together with its optimizer, when training begins; evaluate "
                "after train(), or with eval_on_start=True"
            )

        model = self.model
        attributes = dict(model.__dict__)
        wrapped = self.model_wrapped
        try:
            yield
        finally:
            self.accelerator._models.clear()
            self.model_wrapped = wrapped
            for name in ("_is_accelerate_prepared", "_original_forward", "forward"):
                if name in attributes:
                    setattr(model, name, attributes[name])
                else:
                    model.__dict__.pop(name, None)

    def training_step(self, model: Any, *args: Any, **others: Any) -> Any:
        """Run one step; refuse if nothing averages gradients over the processes."""
        single = not dist.is_initialized() or dist.get_world_size() == 1
        averaged = isinstance(model, DistributedDataParallel) or self.is_fsdp_enabled
        if not single and not averaged and any(x.requires_grad for x in model.parameters()):
            raise UserError(
                f"the model to train is a {type(model).__name__} without DDP or FSDP, since it was "
                "prepared for evaluation only, and each process would train by itself; let the "
                "trainer prepare the model"
            )
        return super().training_step(model, *args, **others)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return this rank's share of the batch's FLOPs; transformers sums it over the ranks."""
        return int(super().floating_point_ops(inputs)) // self.get_cp_size()
