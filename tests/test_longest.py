"""The recipe of 524,288 tokens on a CPU.

Its four processes and one process give the first 16,384 tokens one loss.
"""

from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from data.loader import Batching, batches
from data.text.blend import cumulative_lengths
from model.registry import build_model, initial_weight
from parallel.mesh import distributed_mesh
from runtime.ranks import run_ranks
from tools.common.training import PEAK, build_trainer
from train.config.language import parse_args

RECIPE = Path(__file__).resolve().parent.parent / "configs" / "runs" / "finetune_tiny_512k.toml"
FIRST = 16_384
BOUND = 2e-6


def of_the_first_tokens(rank, world_size, arguments):
    """Return the mean loss of the first tokens of all ranks, and of two others.

    They are of one process: torch's attention over each document, and over halves.
    """
    config = parse_args(arguments)
    with distributed_mesh(config.mesh) as mesh:
        trainer = build_trainer(config, mesh, PEAK)
        ((batch,),) = islice(
            batches(trainer.train_data, Batching(global_batch_size=1, micro_batch_size=1), 0), 1
        )
        labels = batch["labels"].clone()
        labels[:, FIRST:] = -100
        total = trainer.runner.forward([trainer.task.objective.local(batch | {"labels": labels})])
        dist.all_reduce(total)
        if rank:
            return total.item() / FIRST, 0.0, 0.0
        model = build_model(trainer.config.model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(initial_weight(model.config, name, weight.shape, config.train.seed))
        cu_seqlens = [*cumulative_lengths(batch["starts"][0][:FIRST])]
        tokens, labels = batch["tokens"][:, :FIRST], labels[:, :FIRST]
        want, wrong = (
            alone(model, tokens, labels, ends) for ends in (cu_seqlens, [0, FIRST // 2, FIRST])
        )
        return total.item() / FIRST, want, wrong


def alone(model, tokens, labels, ends):
    """Return the mean loss of documents that the model reads one by one."""
    with torch.no_grad():
        logits = torch.cat([model(tokens[:, begin:end]) for begin, end in pairwise(ends)], 1)
    return F.cross_entropy(logits[0].double(), labels[0]).item()


@pytest.mark.slow
@pytest.mark.parametrize("length", [65_536, 524_288])
def test_a_long_sequence_begins_as_a_short_one(length, default_data, tmp_path):
    data = ("--data-path", str(default_data), "--tokenizer-model", f"{default_data}.model")
    arguments = [
        "--config",
        str(RECIPE),
        *data,
        "--seq-length",
        str(length),
        "--save",
        str(tmp_path / "run"),
    ]
    arguments += [
        "--init-method-std",
        "0.2",
    ]  # or attention hardly matters, and the control finds nothing
    (got, want, wrong), *others = run_ranks(of_the_first_tokens, 4, arguments)
    assert got == pytest.approx(want, rel=BOUND)
    assert abs(wrong - want) > 100 * BOUND * want  # the control: documents that are none
    assert all(other == got for other, *_ in others)
