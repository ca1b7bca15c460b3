"""Calls before a training do not change it: an evaluation, a prediction, another training, a loss by hand."""

import pytest
import torch
import torch.distributed as dist

from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.test_trainer import environment

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


def made_trainer(folder, **others):
    """A trainer of three steps on a model of two layers, each sequence on all ranks."""
    from transformers import DataCollatorWithFlattening, TrainingArguments

    from docs.examples.finetune_text import LongTrainer, documents, made_model

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        prediction_loss_only=True,
        **others,
    )
    return LongTrainer(made_model(), arguments, DataCollatorWithFlattening(), documents(20), documents(7))


def nothing(trainer):
    pass


def evaluates(trainer):
    trainer.evaluate()


def predicts(trainer):
    trainer.predict(trainer.eval_dataset)


def predicts_what_is_refused(trainer):
    """The refusal comes after the model was prepared for it."""
    trainer.args.prediction_loss_only = False
    with pytest.raises(UserError, match="predictions are of this rank's tokens alone"):
        trainer.predict(trainer.eval_dataset)


def computes_a_loss(trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))


BEFORE = (nothing, evaluates, predicts, predicts_what_is_refused, computes_a_loss)


def weights(trainer):
    return torch.cat([x.detach().flatten().double() for x in trainer.model.parameters()])


def trained(rank, world_size, folder, calls, others):
    """The weights after each call and training, and if all ranks have the same."""
    environment(rank, world_size)
    found = []
    for call in calls:
        trainer = made_trainer(folder, **others)
        call(trainer)
        trainer.train()
        local = weights(trainer)
        every = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(every, local)
        assert all(torch.equal(x, local) for x in every), call.__name__
        found.append(local)
    return found


@pytest.mark.parametrize("others", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)], ids=["float32", "bf16"])
def test_ranks_that_evaluate_before_training_train_as_without(tmp_path, others):
    first, *rest = run_ranks(trained, 2, str(tmp_path), BEFORE, others)[0]
    for call, found in zip(BEFORE[1:], rest, strict=True):
        assert torch.equal(found, first), call.__name__


def started_by_an_evaluation(rank, world_size, folder):
    environment(rank, world_size)
    found = []
    for others in ({}, {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}):
        trainer = made_trainer(folder, **others)
        trainer.train()
        found.append(weights(trainer))
    trainer.evaluate()
    trainer.train()  # once more
    twice = weights(trainer)
    every = [torch.empty_like(twice) for _ in range(world_size)]
    dist.all_gather(every, twice)
    return found, torch.equal(*every)


def test_an_evaluation_on_start_and_a_second_training_leave_ranks_together(tmp_path):
    (without, with_start), together = run_ranks(started_by_an_evaluation, 2, str(tmp_path))[0]
    assert torch.equal(without, with_start)
    assert together


def prepared_by_others(rank, world_size, folder):
    environment(rank, world_size)
    trainer = made_trainer(folder)
    model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    model._is_accelerate_prepared = True
    with pytest.raises(UserError) as error:
        trainer.train()
    return str(error.value)


def test_a_model_whose_gradients_nothing_averages_is_not_trained(tmp_path):
    for message in run_ranks(prepared_by_others, 2, str(tmp_path)):
        assert message.startswith("the model to train is a Qwen3ForCausalLM without DDP or FSDP")
