"""A mixin for TRL's trainers whose losses need the log-probabilities of whole completions.

class LongTrainer(ContextParallelPreferenceTrainer, DPOTrainer):  # or KTO, GRPO, RLOO
    pass

trainer = LongTrainer(model, args=args, train_dataset=pairs, context_parallel_size=2)

TRL's code is unchanged. It gets whole rows from its data loader, and the log-probabilities of whole
rows from the model, so that every rank of a group computes the loss of the group's batch. What it
gathers over processes it gets once from each group.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor

from parallel.transformers.groups import REFUSED_BY_ALL, GroupTrainer, needs_row_scores
from parallel.transformers.shard import Sharded
from runtime.errors import UserError

REFUSED = {
    "compute_metrics": (
        None,
        "a rank has only its own tokens' logits; leave it out, and use the rewards and the loss "
        "that TRL reports",
    ),
    "aux_loss_enabled": (
        False,
        "each rank would compute the router's loss from its own tokens only; set "
        "router_aux_loss_coef to 0 in the trainer's arguments",
    ),
    "_is_vlm": (
        False,
        "ranks share only text; give a tokenizer as processing_class, and a model without images",
    ),
    "eval_use_gather_object": (
        False,
        "metrics would be gathered from every rank of a group; set it to False",
    ),
    "use_vllm": (
        False,
        "every rank would get other completions; set it to False, or give them by rollout_func",
    ),
    "use_transformers_continuous_batching": (
        False,
        "it replaces the model's attention while it generates; set it to False",
    ),
    **REFUSED_BY_ALL,
}
"""Settings of a trainer that are refused unless they have the value given here, with the reason."""
GATHERING = ("gather", "gather_object")
"""Functions of accelerate that TRL's modules call by name."""


class GroupAccelerator:
    """An accelerator whose processes are groups: it gathers from the first rank of each.

    Its ``reduce`` sums over all ranks: TRL uses it for ratios of sums alone.
    """

    def __init__(self, accelerator: Any, size: int) -> None:
        vars(self).update(accelerator=accelerator, size=size)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["accelerator"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.accelerator, name, value)

    @property
    def num_processes(self) -> int:
        """The number of groups."""
        return int(self.accelerator.num_processes) // int(self.size)

    @property
    def process_index(self) -> int:
        """The number of this rank's group."""
        return int(self.accelerator.process_index) // int(self.size)

    def gather(self, tensors: Any) -> Any:
        """Gather tensors, or collections of them, from each group. Collective."""
        from accelerate.utils import recursively_apply

        if self.size == 1:
            return self.accelerator.gather(tensors)
        ranks = int(self.accelerator.num_processes)

        def from_first_ranks(x: Tensor) -> Tensor:
            by_rank = x.view(ranks, len(x) // ranks, *x.shape[1:])
            return by_rank[:: self.size].flatten(0, 1)

        return recursively_apply(from_first_ranks, self.accelerator.gather(tensors))

    def gather_object(self, objects: list[Any]) -> list[Any]:
        """Gather lists from each group, as one list. Collective."""
        from accelerate.utils import gather_object

        if self.size == 1:
            return list(gather_object(objects))
        by_rank = gather_object([objects])
        return [x for group in by_rank[:: self.size] for x in group]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from each group, without the samples that fill up the last batch. Collective."""
        gather = type(self.accelerator).gather_for_metrics
        return gather(self, input_data, use_gather_object)


def _check_seam() -> None:
    """Raise UserError if TRL is too old to ask models for log-probabilities."""
    import trl
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        raise UserError(
            f"TRL {trl.__version__} asks models for logits, which no rank has for whole rows; "
            "install TRL 1.16 or later"
        )


class ContextParallelPreferenceTrainer(GroupTrainer):
    """A mixin to list before TRL's DPO, KTO, GRPO or RLOO trainer that splits every row.

    Losses, metrics and gradients equal those of TRL with one process for each group. The attribute
    ``context_parallel`` holds the result of ``shard``; ``reference_parallel`` that for the
    reference model, if it is a model of its own.

    With GRPO and RLOO, ``generation_batch_size`` becomes that of the groups, which is
    ``per_device_train_batch_size * groups * steps_per_generation``. The ranks of a group must have
    the same completions: they draw the same random numbers, and ``rollout_func`` must return the
    same on all of them.

    Args:
        context_parallel_size: number of ranks in a group, which must divide the number of
            processes; by default all processes.
        context_parallel_method: as for ``shard``.
        context_parallel_options: further arguments of ``shard``.

    Raises UserError if an argument would change the loss, or the ranks cannot compute a layer.
    """

    args: Any
    accelerator: Any
    context_parallel: Any = None
    reference_parallel: Sharded | None = None

    def __init__(self, *args: Any, **others: Any) -> None:
        kinds = type(self).__mro__
        if not needs_row_scores(kinds[kinds.index(ContextParallelPreferenceTrainer) + 1 :]):
            raise UserError(
                f"{type(self).__name__} is none of TRL's DPO, KTO, GRPO and RLOO trainers; list "
                "ContextParallelTrainer before other trainers"
            )
        _check_seam()
        super().__init__(*args, **others)
        self._share_rows()
        if hasattr(self, "num_generations"):
            from accelerate.utils import set_seed

            # TRL gives each process other numbers, but a group must have the same completions.
            set_seed(self.args.seed + self.accelerator.process_index)

    def create_accelerator_and_postprocess(self) -> None:
        """Show each group as one process to TRL."""
        super().create_accelerator_and_postprocess()
        self._check_arguments(REFUSED)
        size = self.get_cp_size()
        self.accelerator = GroupAccelerator(self.accelerator, size)
        self.gather_function = self.accelerator.gather_for_metrics
        if hasattr(self.args, "generation_batch_size"):
            self._set_generation_batch(size)

    def _set_generation_batch(self, size: int) -> None:
        """Set the number of completions that are generated at once, by all groups together."""
        total = self.args.generation_batch_size // size
        if total % self.args.num_generations:
            raise UserError(
                f"num_generations is {self.args.num_generations}, but the groups generate {total} "
                "completions at once; give a divisor of per_device_train_batch_size * groups * "
                "steps_per_generation"
            )
        self.args = copy(self.args)  # another trainer may get the same arguments
        self.args.generation_batch_size = total

    def _share_rows(self) -> None:
        """Shard the model and its reference once, after TRL has prepared their heads."""
        if self.context_parallel is not None:
            return
        self._check_arguments(REFUSED)
        self.context_parallel = self._shard(self.model)
        self.context_parallel.answer_seam(trl=True)
        if self.ref_model is not None:
            self.reference_parallel = self._shard(self.ref_model)
            self.reference_parallel.answer_seam(trl=True)

    def _precompute_ref_logps(self, *args: Any, **others: Any) -> Any:
        """Compute the reference's log-probabilities of a dataset, also before training."""
        self._share_rows()
        return super()._precompute_ref_logps(*args, **others)

    def _generate(self, *args: Any, **others: Any) -> Any:
        """Generate or take completions, while the model attends by itself."""
        with self.context_parallel.paused():
            return super()._generate(*args, **others)

    def _generate_and_score_completions(self, *args: Any, **others: Any) -> Any:
        """Generate completions and compute their advantages, each completion counted once."""
        with self._gathering_groups():
            return super()._generate_and_score_completions(*args, **others)

    @contextmanager
    def _gathering_groups(self) -> Iterator[None]:
        """Let the functions that TRL's module gathers with gather once from each group."""
        methods = [vars(kind).get("_generate_and_score_completions") for kind in type(self).__mro__]
        modules = []
        for method in methods:
            module = sys.modules[method.__module__] if method else None
            if module is not None and hasattr(module, GATHERING[0]):
                modules.append(module)

        previous = [
            (module, name, getattr(module, name)) for module in modules for name in GATHERING
        ]
        for module, name, _ in previous:
            setattr(module, name, getattr(self.accelerator, name))
        try:
            yield
        finally:
            for module, name, function in previous:
                setattr(module, name, function)

    def evaluation_loop(self, *args: Any, **others: Any) -> Any:
        """Evaluate, also before any training."""
        with self._prepared_for_evaluation():
            return super().evaluation_loop(*args, **others)
