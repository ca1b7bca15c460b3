"""A mixin for the trainers of transformers and TRL that splits each sequence over a group of ranks.

class LongTrainer(ContextParallelTrainer, SFTTrainer):  # or transformers' Trainer
    pass

trainer = LongTrainer(model, args, train_dataset=chats, context_parallel_size=2)

A group consists of consecutive ranks. Each group loads its own batches, as a single process would,
and each of its ranks computes a part of every sequence.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.loss import cross_entropy_sum
from parallel.transformers.batch import IGNORED, pack
from parallel.transformers.groups import REFUSED_BY_ALL, GroupTrainer, needs_row_scores
from parallel.transformers.router import real_tokens, trainer_coefficient
from runtime.errors import UserError

OTHER_LOSS = (
    "the loss here is always the mean cross entropy of all tokens with a label; use the default"
)
REFUSED = {
    "label_smoothing_factor": (0, OTHER_LOSS),
    "loss_type": ("nll", OTHER_LOSS),
    "compute_loss_func": (None, OTHER_LOSS),
    "average_tokens_across_devices": (True, OTHER_LOSS),
    "compute_metrics": (
        None,
        "a rank has only its own tokens' logits; leave it out and evaluate the loss, or call "
        "context_parallel.gather",
    ),
    **REFUSED_BY_ALL,
}
"""Trainer arguments that are refused unless they have the value given here, with the reason."""
MODEL_INPUTS = ("input_ids", "labels", "position_ids", "attention_mask")
PACKING_FIELDS = (
    "seq_lengths",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "use_cache",
)
"""Fields that collators of packed documents add; the first two are read if position ids are
missing.
"""


class ContextParallelTrainer(GroupTrainer):
    """A mixin to list before ``Trainer`` that splits each sequence over a group of ranks.

    Losses and gradients equal those of one process with the same global batch: a sum over tokens,
    divided by the number of tokens with a label in all groups and accumulated batches. A router's
    loss is that of a batch of all groups; accumulated batches add theirs up as in transformers, or
    average them as in TRL. The attribute ``context_parallel`` holds the result of ``shard``.

    Args:
        context_parallel_size: number of ranks in a group, which must divide the number of
            processes; by default all processes.
        context_parallel_method: as for ``shard``.
        context_parallel_options: further arguments of ``shard``.

    Raises UserError if an argument would change the loss, or the ranks cannot compute a layer.
    """

    loss_is_scaled_for_ga: Any = True

    def __init__(self, *args: Any, **others: Any) -> None:
        if needs_row_scores(type(self).__mro__):
            raise UserError(
                f"{type(self).__name__} needs log-probabilities of whole rows; list "
                "ContextParallelPreferenceTrainer before TRL's trainer"
            )
        super().__init__(*args, **others)
        self._check_arguments(REFUSED)
        self.context_parallel = self._shard(self.model)

    def _get_dataloader(self, *args: Any, is_training: bool = False, **others: Any) -> Any:
        """Return a loader that evaluates each sample exactly once.

        accelerate would repeat samples until all groups have full batches, and count them twice.
        """
        loader = super()._get_dataloader(*args, is_training=is_training, **others)
        groups = self.accelerator.num_processes // self.get_cp_size()
        if is_training or groups == 1:
            return loader
        if not hasattr(loader.batch_sampler, "even_batches"):
            raise UserError(
                "the dataset to evaluate has no length, so only a single group could evaluate it; "
                "give a dataset with a length, or leave out context_parallel_size"
            )
        if self.is_fsdp_enabled:
            count = loader.batch_sampler.total_length
            if count % groups:
                raise UserError(
                    f"eval_dataset makes {count} batches, but FSDP needs a multiple of the number "
                    f"of groups, {groups}; change per_device_eval_batch_size, or the number of "
                    "samples in eval_dataset"
                )
        loader.batch_sampler.even_batches = False
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Return the number of labelled tokens in the accumulated batches of all groups.

        Collective.
        """
        total = 0
        for inputs in batch_samples:
            arguments = {"documents": None, **dict.fromkeys(MODEL_INPUTS), **_arguments(inputs)}
            packed = pack(**arguments)
            total += int((packed.tokens["labels"] != IGNORED).sum())

        count = torch.tensor(total, device=device)
        if dist.is_initialized():
            dist.all_reduce(count)
        return (count // self.get_cp_size()).clamp(min=1)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the batch's share of the loss, equal on all ranks, and this rank's outputs."""
        batch = self.context_parallel.batch(**_arguments(inputs))
        output = model(**batch.inputs)
        coefficient = trainer_coefficient(self, num_items_in_batch)
        loss = self.context_parallel.loss(output, batch, num_items_in_batch, coefficient)
        return (loss, output) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, None, None]:
        """Add the loss of one batch to the evaluation.

        Only the ranks of a group wait for each other, because groups may have different numbers of
        batches.
        """
        if not prediction_loss_only:
            raise UserError(
                "predictions would be of this rank's tokens only; run the model, and call "
                "context_parallel.gather on its outputs"
            )
        with torch.no_grad(), self.compute_loss_context_manager():
            batch = self.context_parallel.batch(**_arguments(self._prepare_inputs(inputs)))
            output = model(**batch.inputs)
            loss_sum, valid = cross_entropy_sum(output.logits, batch.labels)
            if self.context_parallel.router.is_in(output):
                tokens = real_tokens(batch.context)
                self._eval_load += self.context_parallel.router.load(output, tokens)
        self._eval_sums += torch.stack([loss_sum.double(), valid.double()])
        return None, None, None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate the mean loss over tokens, whatever the number of ranks and the batch size.

        A router's loss is that of the tokens of all batches.
        """
        self._eval_sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        router = self.context_parallel.router
        self._eval_load = router.empty_load(self.args.device)
        with self._prepared_for_evaluation():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if dist.is_initialized():
            dist.all_reduce(self._eval_sums)
        loss_sum, tokens = self._eval_sums.tolist()
        router_loss = router.evaluated(self._eval_load, trainer_coefficient(self))
        output.metrics[f"{metric_key_prefix}_loss"] = loss_sum / max(tokens, 1) + router_loss
        return output

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of a group once instead of once per rank."""
        previous = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - previous
        self.state.num_input_tokens_seen = previous + added // self.get_cp_size()


def _arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a collator's batch to the arguments of ``Sharded.batch``."""
    if "labels" not in inputs or inputs.keys() - {*MODEL_INPUTS, *PACKING_FIELDS}:
        others = ", ".join((*MODEL_INPUTS[2:], *PACKING_FIELDS))
        raise UserError(
            f"a batch has {', '.join(sorted(inputs))}, but needs input_ids and labels, and may "
            f"have only {others} besides; use a data collator that makes such batches"
        )
    arguments = {name: inputs[name] for name in MODEL_INPUTS if name in inputs}
    if "position_ids" in arguments:
        return arguments

    if "seq_lengths" in inputs:
        rows = inputs["seq_lengths"]
    elif "cu_seq_lens_q" in inputs:
        rows = inputs["cu_seq_lens_q"].diff()
    else:
        return arguments
    lengths = torch.cat([torch.as_tensor(row).flatten() for row in rows])
    arguments["documents"] = lengths.tolist()
    return arguments
