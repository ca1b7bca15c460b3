"""Trainers of transformers and TRL over four ranks against one process.

Losses, evaluation, checkpoints, refusals.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from parallel.transformers.batch import IGNORED
from parallel.transformers.trainer import _arguments
from runtime.errors import UserError
from runtime.ranks import run_ranks

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


def losses(trainer, name="loss"):
    return torch.tensor(
        [entry[name] for entry in trainer.state.log_history if name in entry], dtype=torch.float64
    )


def on_one_machine(world_size):
    """Set the variable of torchrun's that says how many ranks a machine has.

    Without it accelerate takes ranks for those of as many machines.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)


def alone(trainer_class):
    """The trainer as it is, with nothing of ours."""

    class Alone(trainer_class):
        def __init__(self, *args, context_parallel_size, **others):
            super().__init__(*args, **others)

    return Alone


def shifted_after_cutting(trainer_class):
    """Wrong: each rank shifts its own part of the labels."""

    class Wrong(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            sharded = self.context_parallel
            batch = sharded.batch(**_arguments(inputs))
            uncut = batch.context.shard(inputs["labels"], 1, IGNORED)
            labels = torch.cat([uncut[:, 1:], uncut.new_full((1, 1), IGNORED)], 1)
            wrong = type(batch)(batch.inputs, labels, batch.context, batch.whole)
            return sharded.loss(model(**batch.inputs), wrong, num_items_in_batch)

    return Wrong


def text(rank, world_size, folder, sizes):
    """Losses of training and evaluation for each size of groups.

    Those after going on at step 3, and of FSDP2, come last.
    """
    on_one_machine(world_size)
    from transformers import Trainer

    from docs.examples import finetune_text

    def logged(name, size, **others):
        trainer = finetune_text.trained(f"{folder}/{name}", world_size, size, kind, **others)
        assert {isinstance(x, DTensor) for x in trainer.model.parameters()} == {"fsdp" in others}
        return losses(trainer), losses(trainer, "eval_loss")

    kind = finetune_text.LongTrainer if world_size > 1 else alone(Trainer)
    histories = [logged(size, size) for size in sizes]
    if world_size > 1:
        histories.append(logged("resumed", sizes[0], resume=f"{folder}/{sizes[0]}/checkpoint-3"))
        with pytest.raises(
            UserError, match="fsdp is on, but accelerate has no FSDP for these devices"
        ):
            logged("fsdp", 2, fsdp=True)
        fsdp_on_cpus()
        fsdp = {
            "fsdp": True,
            "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        }
        histories += [
            logged("fsdp", 2, resume=resume, **fsdp)
            for resume in (None, f"{folder}/fsdp/checkpoint-3")
        ]
    return histories


def fsdp_on_cpus():
    """Let accelerate take its FSDP here, which it leaves out where there is no GPU."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    plain_init = AcceleratorState.__init__

    def with_plugin(self, *args, fsdp_plugin=None, **others):
        plain_init(self, *args, fsdp_plugin=fsdp_plugin, **others)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_plugin


def evaluated(checkpoint):
    """The mean loss of all tokens but each document's first, by the model that a checkpoint has."""
    from transformers import AutoModelForCausalLM

    from docs.examples.finetune_text import documents

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    every = [torch.tensor([row["input_ids"]]) for row in documents(7)]
    with torch.no_grad():
        total = sum(
            F.cross_entropy(model(x).logits[0, :-1], x[0, 1:], reduction="sum") for x in every
        )
    return float(total) / sum(x.shape[1] - 1 for x in every)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, (2,)), pytest.param(4, (2, 4, 1), marks=pytest.mark.slow)]
)
def test_transformers_trainer_has_the_losses_of_one_process_and_its_checkpoints_are_whole(
    ranks, sizes, tmp_path
):
    everywhere = run_ranks(text, ranks, str(tmp_path / "ranks"), sizes)
    ((expected, _),) = run_ranks(text, 1, str(tmp_path / "one"), (1,))[0]
    for rank in everywhere:
        assert len(rank) == len(sizes) + 3
        for run_losses, evaluations in rank:
            assert len(run_losses) == 6
            torch.testing.assert_close(run_losses, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(evaluations, everywhere[0][0][1], rtol=0, atol=1e-5)
    for size in sizes:
        for step, loss in zip((3, 6), everywhere[0][0][1].tolist(), strict=True):
            assert evaluated(tmp_path / f"ranks/{size}/checkpoint-{step}") == pytest.approx(
                loss, abs=1e-5
            )
        assert len(list(Path(tmp_path, f"ranks/{size}").rglob("*.safetensors"))) == 2


def chats(rank, world_size, folder, runs):
    """Losses by each kind of trainer, in so many steps, of the model or of adapters."""
    on_one_machine(world_size)
    from peft import LoraConfig
    from trl import SFTTrainer

    from docs.examples import finetune_chats

    run_losses = []
    for kind, steps, adapters in runs:
        base = SFTTrainer if kind is alone else finetune_chats.LongTrainer
        model = kind(base) if kind else base
        others = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapters else {}
        trainer = finetune_chats.trained(
            folder, world_size, min(2, world_size), model, steps, **others
        )
        assert (
            all("lora" in name for name, x in trainer.model.named_parameters() if x.requires_grad)
            == adapters
        )
        run_losses.append(losses(trainer))
    return run_losses


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_packed_chats_of_trl_have_the_losses_of_one_process(ranks, tmp_path):
    pytest.importorskip("trl", reason="the extra dev has it")
    pytest.importorskip("peft", reason="the extra dev has it")
    runs = (None, 8, False), (None, 6, True), (shifted_after_cutting, 3, False)
    rank_losses, adapters, wrong = run_ranks(chats, ranks, str(tmp_path), runs)[0]
    expected, of_adapters = run_ranks(
        chats, 1, str(tmp_path), ((alone, 8, False), (alone, 6, True))
    )[0]
    assert len(rank_losses) == 8
    torch.testing.assert_close(rank_losses, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(adapters, of_adapters, rtol=0, atol=1e-5)
    assert adapters[0] - adapters[-1] > 0.01  # they learn
    assert (wrong - expected[:3]).abs()[
        1:
    ].min() > 1e-3  # the first is of a model that knows nothing


@pytest.mark.parametrize(
    ("field", "arguments", "others"),
    [
        ("label_smoothing_factor", {"label_smoothing_factor": 0.1}, {}),
        ("average_tokens_across_devices", {"average_tokens_across_devices": False}, {}),
        ("compute_metrics", {}, {"compute_metrics": print}),
        ("context_parallel_size is 2", {}, {"context_parallel_size": 2}),
        ("train_sampling_strategy", {"train_sampling_strategy": "batch_rebalance"}, {}),
        ("dispatch_batches", {"accelerator_config": {"dispatch_batches": True}}, {}),
    ],
)
def test_arguments_that_change_the_loss_or_the_samples_are_refused(
    field, arguments, others, tmp_path
):
    from transformers import TrainingArguments

    from docs.examples.finetune_text import LongTrainer, made_model

    with pytest.raises(UserError, match=f"^{field}"):
        LongTrainer(
            made_model(),
            TrainingArguments(tmp_path, use_cpu=True, report_to="none", **arguments),
            **others,
        )


@pytest.mark.parametrize(
    "lengths",
    [
        {"seq_lengths": [[2, 1], [3]]},
        {"seq_lengths": [2, 1, 3]},
        {"cu_seq_lens_q": torch.tensor([0, 2, 3, 6])},
    ],
)
def test_documents_are_read_from_lengths(lengths):
    ids = torch.arange(6)[None]
    assert _arguments({"input_ids": ids, "labels": ids, **lengths})["documents"] == [2, 1, 3]
    assert "documents" not in _arguments(
        {"input_ids": ids, "labels": ids, "position_ids": ids, **lengths}
    )


def test_a_batch_with_more_or_less_is_refused():
    ids = torch.arange(6)[None]
    for batch in ({"input_ids": ids}, {"input_ids": ids, "labels": ids, "pixel_values": ids}):
        with pytest.raises(
            UserError, match="but needs input_ids and labels, and may have only position_ids"
        ):
            _arguments(batch)
