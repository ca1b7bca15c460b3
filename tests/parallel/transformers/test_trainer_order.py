"""Calls before a training do not change it.

An evaluation, a prediction, another training, a loss by hand.
"""

import pytest
import torch
import torch.distributed as dist

from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.test_trainer import on_one_machine

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
    return LongTrainer(
        made_model(), arguments, DataCollatorWithFlattening(), documents(20), documents(7)
    )


def nothing(trainer):
    pass


def evaluates(trainer):
    trainer.evaluate()


def predicts(trainer):
    trainer.predict(trainer.eval_dataset)


def predicts_what_is_refused(trainer):
    """The refusal comes after the model was prepared for it."""
    trainer.args.prediction_loss_only = False
    with pytest.raises(UserError, match="predictions would be of this rank's tokens only"):
        trainer.predict(trainer.eval_dataset)


def computes_a_loss(trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))


BEFORE = (nothing, evaluates, predicts, predicts_what_is_refused, computes_a_loss)


def weights(trainer):
    return torch.cat([x.detach().flatten().double() for x in trainer.model.parameters()])


def together(trainer):
    """The weights, which all ranks have alike."""
    local = weights(trainer)
    every = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(every, local)
    assert all(torch.equal(x, local) for x in every)
    return local


STARTING = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}


def trained(rank, world_size, folder, others):
    """The weights after each call and training, and after one that an evaluation started.

    All trained twice.
    """
    on_one_machine(world_size)
    results = {}
    for call, more in (*((call, {}) for call in BEFORE), (nothing, STARTING)):
        trainer = made_trainer(folder, **others, **more)
        call(trainer)
        trainer.train()
        results[call.__name__, bool(more)] = together(trainer)
    trainer.evaluate()
    trainer.train()  # once more
    together(trainer)

    trainer = made_trainer(folder)
    model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    model._is_accelerate_prepared = True
    with pytest.raises(
        UserError, match=r"^the model to train is a Qwen3ForCausalLM without DDP or FSDP"
    ):
        trainer.train()
    return results


@pytest.mark.parametrize(
    "others", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)], ids=["float32", "bf16"]
)
def test_ranks_that_evaluate_before_training_or_on_start_train_as_without(tmp_path, others):
    """A model whose gradients nothing averages is refused."""
    results = run_ranks(trained, 2, str(tmp_path), others)[0]
    want = results.pop(("nothing", False))
    for call, after in results.items():
        assert torch.equal(after, want), call
