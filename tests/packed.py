"""Samples that hold several documents, one step over any mesh, and the documents alone.

They are for the tests of packing.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.loader import IGNORE_INDEX, Batch, Batching, batches
from data.text.blend import cumulative_lengths
from data.text.megatron import build_datasets
from data.tokenizer import load_tokenizer
from kernels.loss import cross_entropy_sum
from model.registry import build_model
from runtime.ranks import run_ranks
from runtime.watchdog import Watchdog
from tests.data.text.corpora import write_documents
from tests.parallel.tiny import gradients_of
from tools.common.training import Records, trainer_of
from train.batches import sum_over_ranks
from train.callbacks.validation import Validation
from train.config.language import parse_args
from train.tasks.language import LanguageTask

VOCABULARY, LENGTH, ROWS = 1024, 61, 4
"""The length is divisible by no number of ranks."""
TINY = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --init-method-std 0.1 --seq-length
    {LENGTH} --device cpu
    --global-batch-size {ROWS} --micro-batch-size 2 --lr 1e-2 --lr-warmup-iters 1 --split 70,30,0
    --eval-iters 1 --eval-interval 1000 --log-interval 1000 --reset-attention-mask
    --reset-position-ids
""".split()


def write_packed(folder, tokenizer, seed=1, longest=50):
    """Write documents of 1 to ``longest`` random tokens, each with an end.

    Return the flags that name them.
    """
    eod = load_tokenizer(str(tokenizer)).eod
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest, (80,), generator=generator).tolist()
    ids = [
        torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    prefix = write_documents(folder / "packed", [[*document, eod] for document in ids])
    return ["--data-path", prefix, "--tokenizer-model", str(tokenizer)]


@dataclass
class Step:
    """The loss of one step, its gradients by parameter, in full, and how many tokens carry loss."""

    loss: float
    gradients: dict[str, Tensor]
    valid: int

    def difference(self, other):
        """Return the largest relative difference of any gradient.

        A key's bias, whose gradient is zero, is left out.
        """
        assert self.gradients.keys() == other.gradients.keys()
        return max(
            float((a - other.gradients[name]).norm() / other.gradients[name].norm())
            for name, a in self.gradients.items()
            if not name.endswith("wk.bias")
        )

    def equal(self, other):
        """Return whether loss and gradients are the same bits."""
        return self.loss == other.loss and all(
            torch.equal(x, other.gradients[n]) for n, x in self.gradients.items()
        )


LOSS, GRADIENTS = 1e-6, 5e-6
"""Bounds of relative differences from float64."""


def assert_equal(got, want):
    """Assert that a step is that of float64."""
    assert got.valid == want.valid
    assert abs(got.loss - want.loss) <= LOSS * want.loss
    assert got.difference(want) <= GRADIENTS


Change = Callable[[Batch], Batch]
"""Changes a micro-batch before it is sharded."""


def as_it_is(batch):
    return batch


def steps_on_rank(rank, world_size, runs, changes):
    """Return the first step of training of each run's flags, under each change."""
    steps = []
    for flags in runs:
        with trainer_of(LanguageTask, [*TINY, *flags], Records()) as trainer:
            steps.append([_step(trainer, change) for change in changes])
    return steps


def _step(trainer, change):
    step = [
        change(batch) for batch in next(batches(trainer.train_data, trainer.batches.batching, 0))
    ]
    step_batch = trainer.batches.take(
        iter([[trainer.task.objective.local(batch) for batch in step]])
    )
    loss = sum_over_ranks(
        trainer.runner.forward_backward(step_batch.micro_batches, step_batch.valid), trainer.mesh
    ).item()
    gradients = {name: x for part in trainer.runner.parts for name, x in gradients_of(part).items()}
    trainer.optimizer.zero_grad(set_to_none=True)
    return Step(loss, gradients, step_batch.valid)


def over_ranks(world_size, runs, changes=(as_it_is,)):
    """Return the steps [run][change] of ``world_size`` ranks.

    Pipeline stages have parts of the gradients.
    """

    def whole(steps):
        gradients = {name: x for step in steps for name, x in step.gradients.items()}
        return dataclasses.replace(steps[0], gradients=gradients)

    by_rank = run_ranks(steps_on_rank, world_size, runs, changes)
    return [
        [whole(steps) for steps in zip(*run, strict=True)] for run in zip(*by_rank, strict=True)
    ]


def validation_on_rank(rank, world_size, flags):
    """Return the loss over the validation samples of the weights at the start."""
    with trainer_of(LanguageTask, [*TINY, *flags], Records()) as trainer:
        validation = Validation(
            task=trainer.task,
            runner=trainer.runner,
            ema=trainer.ema,
            batches=trainer.batches,
            data=trainer.valid_data,
            log=None,
            watchdog=Watchdog(0, 0, None),
        )
        return validation.validate(0)["validation_loss"]


def alone(flags, validation=False):
    """Compute the same step, or all samples of the validation, from each document alone.

    It is in float64 and one process.
    """
    config = parse_args([*TINY, *flags])
    tokenizer = load_tokenizer(str(config.data.tokenizer_model))
    train, valid_data, _ = build_datasets(config.data, LENGTH, config.train.seed, tokenizer)
    data = valid_data if validation else train
    rows = len(data) if validation else ROWS
    (batch,) = next(batches(data, Batching(global_batch_size=rows, micro_batch_size=rows), 0))
    model = build_model(dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size))
    model.init_weights(config.train.seed)
    losses, valid = [], int((batch["labels"] != IGNORE_INDEX).sum())
    model.double()
    for tokens, labels in documents(batch):
        losses.append(cross_entropy_sum(model(tokens[None]), labels[None], IGNORE_INDEX)[0])
    loss = torch.stack(losses).sum() / valid
    loss.backward()
    return Step(loss.item(), gradients_of(model), valid)


def documents(batch):
    """Yield tokens and labels of each document of each row."""
    for tokens, labels, starts in zip(
        batch["tokens"], batch["labels"], batch["starts"], strict=True
    ):
        lengths = torch.tensor(cumulative_lengths(starts)).diff().tolist()
        yield from zip(tokens.split(lengths), labels.split(lengths), strict=True)
