"""--allow-resize: a run goes on with other processes, which the planner arranges; batch, samples and losses stay."""

import os
import signal

import pytest

from checkpoint.search import POINTER
from runtime.ranks import run_ranks
from tests.pretraining import flags_of, on_rank, pretrain, pretrain_digits
from train.config.language import load_config
from train.loop import Trainer

COUNTED = ("iteration", "consumed_samples", "consumed_tokens", "learning_rate")
BOUND = 2e-6
SIZES = ("--context-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "none")


def apart(got, want):
    """The largest difference of losses over the same iterations, which have the same samples."""
    assert [[record[name] for name in COUNTED] for record in got] == [
        [record[name] for name in COUNTED] for record in want
    ]
    return max(abs(a["lm_loss"] - b["lm_loss"]) for a, b in zip(got, want, strict=True))


def test_one_of_two_processes_goes_on_and_then_both(default_data, tmp_path, capsys):
    """No global_batch_size is given: the 2 of the one data-parallel rank stay."""
    flags, save = (*SIZES, "--train-iters", "3", "--num-layers", "1", "--allow-resize"), tmp_path / "run"
    began = tmp_path / "whole"
    whole = pretrain(2, default_data, began, *flags, "--save-interval", "1")
    capsys.readouterr()
    pretrain(1, default_data, save, *flags, "--load", str(began), "--ckpt-step", "1", "--exit-interval", "2")
    line = "resized from 2 to 1 process: pipeline 1 x data 1 x context 1 x tensor 1, 1 micro-batch of 2 for "
    assert f"{line}global_batch_size 2; predicted to take " in (said := capsys.readouterr().out)
    assert "note: " not in said
    kept = load_config(save / "config.toml")
    assert (kept.mesh.context_parallel_size, kept.mesh.full_world_size, kept.train.global_batch_size) == (2, 2, None)
    got = pretrain(2, default_data, save, *flags, "--load", str(save))
    assert "resized" not in capsys.readouterr().out
    assert apart(got, whole[1:]) <= BOUND


@pytest.mark.slow
def test_a_diffusion_transformer_goes_on_with_fewer(tmp_path):
    flags = ("--train-iters", "4", "--tensor-model-parallel-size", "2")
    whole = pretrain_digits(4, tmp_path / "whole", *flags)
    pretrain_digits(4, tmp_path / "run", *flags, "--exit-interval", "2")
    resizing = (*flags, "--load", str(tmp_path / "run"), "--allow-resize")
    got = pretrain_digits(3, tmp_path / "run", *resizing)
    assert [record["consumed_samples"] for record in got] == [record["consumed_samples"] for record in whole]
    assert max(abs(a["diffusion_loss"] - b["diffusion_loss"]) for a, b in zip(got, whole, strict=True)) <= BOUND


def killed_on_rank(rank, world_size, arguments, before):
    """Train; the last rank is killed before an iteration."""
    plain = Trainer.step

    def iteration(trainer, *given):
        if rank == world_size - 1 and trainer.progress.iteration == before - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(trainer, *given)

    Trainer.step = iteration
    on_rank(rank, world_size, arguments)


@pytest.mark.slow
def test_four_processes_killed_go_on_as_two_killed_go_on_as_four(default_data, tmp_path, capsys):
    flags, save = (*SIZES, "--train-iters", "10", "--save-interval", "2", "--allow-resize"), tmp_path / "run"
    whole = pretrain(4, default_data, tmp_path / "whole", *flags)
    flags += ("--load", str(save))
    for processes, before in ((4, 4), (2, 8)):  # iteration 3 is lost, and iteration 7
        with pytest.raises(RuntimeError, match=r"died without a word|reset by peer|closed by peer"):
            run_ranks(killed_on_rank, processes, flags_of(default_data, *flags, "--save", str(save)), before)
        assert (save / POINTER).read_text() == f"{before - 2}\n"
    capsys.readouterr()
    got = pretrain(4, default_data, save, *flags)
    assert f"resumed from {save / 'iter_0000006'}, 24 samples consumed" in capsys.readouterr().out
    assert apart(got, whole) <= BOUND
