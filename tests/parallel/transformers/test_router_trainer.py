"""Trainers of transformers and TRL with a router's loss over ranks, against one process."""

from unittest.mock import patch

import pytest
import torch

from runtime.ranks import run_ranks
from tests.parallel.transformers.families import model_of
from tests.parallel.transformers.test_trainer import alone, losses, on_one_machine

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
WEIGHT = 0.2


def with_experts():
    """A model with a router's loss, for the letters of the example's text."""
    return model_of(
        "Qwen3Moe",
        2,
        torch.float32,
        vocab_size=128,
        output_router_logits=True,
        router_aux_loss_coef=WEIGHT,
    )


def loss_of_all(trainer):
    """The loss of all documents of the evaluation in one forward of transformers' own."""
    rows = [torch.tensor(row["input_ids"]) for row in trainer.eval_dataset]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    ids = torch.cat(rows)[None]
    labels = ids.masked_fill(positions == 0, -100)
    with torch.no_grad(), trainer.context_parallel.paused():
        return trainer.model.eval()(ids, position_ids=positions, labels=labels).loss.double()


def text(rank, world_size, folder, sizes):
    """Losses and evaluations for each size of groups, and the last evaluation by transformers."""
    on_one_machine(world_size)
    from transformers import Trainer

    from docs.examples import finetune_text

    kind = finetune_text.LongTrainer if world_size > 1 else alone(Trainer)
    histories = []
    for size in sizes:
        with patch.object(finetune_text, "made_model", with_experts):
            trainer = finetune_text.trained(f"{folder}/{size}", world_size, size, kind)
        expected = loss_of_all(trainer) if world_size > 1 else None
        histories.append((losses(trainer), losses(trainer, "eval_loss"), expected))
    return histories


def test_transformers_trainer_has_the_losses_of_one_process(tmp_path):
    """Its router's loss is added for every accumulated batch, as transformers does."""
    histories = run_ranks(text, 2, str(tmp_path / "ranks"), (2, 1))[0]
    ((expected, _, _),) = run_ranks(text, 1, str(tmp_path / "alone"), (1,))[0]
    assert len(expected) == 6
    for run_losses, evaluations, evaluation in histories:
        torch.testing.assert_close(run_losses, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(evaluations, histories[0][1], rtol=0, atol=1e-5)
        torch.testing.assert_close(evaluations[-1], evaluation, rtol=0, atol=1e-5)


def chats(rank, world_size, folder, sizes):
    """Losses of TRL's trainer, which has a weight of its own."""
    on_one_machine(world_size)
    from trl import SFTConfig, SFTTrainer

    from docs.examples import finetune_chats

    def config(**others):
        return SFTConfig(**others, router_aux_loss_coef=0.3)

    kind = finetune_chats.LongTrainer if world_size > 1 else alone(SFTTrainer)
    run_losses = []
    for size in sizes:
        with (
            patch.object(finetune_chats, "made_model", with_experts),
            patch.object(finetune_chats, "SFTConfig", config),
        ):
            trainer = finetune_chats.trained(f"{folder}/{size}", world_size, size, kind, 4)
        run_losses.append(losses(trainer))
    return run_losses


def test_trls_trainer_has_the_losses_of_one_process(tmp_path):
    """Its router's loss is the mean of those of the accumulated batches, with the trainer's weight.

    The model's own weight, or a sum, would be off by 0.2 or more.
    """
    pytest.importorskip("trl", reason="the extra dev has it")
    together, groups = run_ranks(chats, 2, str(tmp_path / "ranks"), (2, 1))[0]
    (expected,) = run_ranks(chats, 1, str(tmp_path / "alone"), (1,))[0]
    assert len(expected) == 4
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(groups, expected, rtol=0, atol=1e-5)
