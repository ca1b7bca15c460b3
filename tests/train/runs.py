"""Runs of the trainer on a tiny LLaMA and made-up samples, for tests."""

from dataclasses import replace

import torch

from model.registry import architecture_of
from parallel.context import context_parallel
from parallel.mesh import MeshConfig, distributed_mesh
from runtime.errors import DataError
from runtime.ranks import run_ranks
from tests.model.models import model_config
from tests.train.tiny import TinyTask
from train.callbacks.health import RunProgress, TrainingError
from train.callbacks.metrics import METRICS, LoggingConfig, RunLog, read_metrics
from train.config.entries import Config, TrainConfig
from train.config.finalize import Final
from train.optimizers.config import OptimizerConfig
from train.resume.start import Start
from train.trainer import Trainer

LENGTH, VOCABULARY = 8, 31
MODEL = model_config(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=VOCABULARY)
PEAK = 1e9


class Samples:
    """Sample n is random tokens of seed n, of which the first (n + 1) % 5 carry no loss.

    `length` before repeats.
    """

    def __init__(self, length=20, bad=None):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index is not None and index == self.bad:
            raise DataError(f"x.bin: sample {index} is bad")
        ids = torch.randint(
            VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index or 0)
        )
        mask = torch.zeros(LENGTH)
        if index is not None:
            mask[(index + 1) % 5 :] = 1
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}


def settings(**train):
    defaults = {
        "seq_length": LENGTH,
        "global_batch_size": 4,
        "train_iters": 3,
        "eval_interval": 100,
        "eval_iters": 1,
        "seed": 5,
    }
    return Config(
        model=MODEL,
        mesh=MeshConfig(device="cpu"),
        optimizer=OptimizerConfig(lr=0.01, lr_decay_style="constant"),
        train=TrainConfig(**(defaults | train)),
        logging=LoggingConfig(log_interval=1000),
    )


def by(optimizer, config):
    """The same settings with another optimizer."""
    return replace(config, optimizer=replace(config.optimizer, optimizer=optimizer))


def run_with(rank, world_size, config, folder=None, prepare=None, valid_data=None, train_data=None):
    """Train, and return how far it came and the error that ended it, if any.

    The run is data parallel over all ranks.
    """
    if folder is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, save=str(folder)))
    with distributed_mesh(config.mesh) as mesh:
        cp = context_parallel("ring", seq_len=LENGTH)
        task = TinyTask(config, mesh, cp, train=train_data or Samples(), valid=valid_data)
        progress = RunProgress()
        start = Start(config.checkpoint, config.optimizer, architecture_of(MODEL), {}, progress)
        try:
            trainer = Trainer(
                task,
                Final(config=config, saved=config, start=start, tokenizer=None),
                peak_flops=PEAK,  # the measurement takes longer than all the rest
                open_log=lambda *_: RunLog(folder, config.logging, {}, 0) if rank == 0 else None,
            )
            if prepare is not None:
                prepare(trainer)
            trainer.train()
        except (TrainingError, RuntimeError, DataError) as error:
            return progress, f"{type(error).__name__}: {error}"
        return progress, ""


def trained(folder, world_size=1, **settings_):
    for _, error in run_ranks(run_with, world_size, settings(**settings_), folder):
        assert error == ""
    return read_metrics(folder / METRICS)


def checkpoints(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))
