"""A diffusion transformer trains on any mesh as in one process, and resumes to the bit.

It refuses what cannot be.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import pretrain_dit
from model.dit import DiT
from model.registry import architecture_of
from runtime.ranks import run_ranks
from tests.chaos.__main__ import tensors
from tests.endings import apart, end, refusal
from tests.parity.cases import DIFFUSION, REFERENCE, chosen_cases
from tests.parity.run import GRADIENTS, compare, equal, trained
from tests.pretraining import DIT, curve, dit_on_rank, pretrain_digits
from tools.common.cases import case_of, cases_of
from train.callbacks.metrics import METRICS, read_metrics
from train.checkpoint import drafts
from train.checkpoint.api import load_model
from train.checkpoint.search import saved_iterations
from train.config.diffusion import load_config

NOWHERE = Path("digits")
CHOSEN = tuple(cases_of("cp=3 exchange joined=4\n ring pp=2|tp=2"))
EXACT = (
    "diffusion_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "consumed_tokens",
    "validation_loss",
)


@pytest.fixture(scope="module")
def one_process():
    """The reference: one process, plain SDPA."""
    return trained("dit", REFERENCE, NOWHERE, iterations=2)


@pytest.mark.parametrize(
    "case",
    [
        *CHOSEN,
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in chosen_cases(DIFFUSION)
            if case not in CHOSEN
        ),
    ],
    ids=lambda case: case.title.replace(" ", ""),
)
def test_losses_and_gradients_equal_one_process(case, one_process):
    row = compare(trained("dit", case, NOWHERE, iterations=2), one_process)
    assert row.within, row
    largest = max(gradient.abs().max() for gradient in one_process.tensors["gradients"].values())
    assert largest > 1e6 * GRADIENTS


RANKS, MESH = 2, ("--context-parallel-size", "2", "--train-iters", "4", "--micro-batch-size", "4")
"""Processes that share each sample."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    save = tmp_path_factory.mktemp("whole") / "run"
    pretrain_digits(RANKS, save, *MESH)
    return save


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    save = tmp_path_factory.mktemp("stopped") / "run"
    pretrain_digits(RANKS, save, *MESH, "--exit-interval", "2")
    return save


def loaded(save, iteration, section):
    """Weights, or their averages, of a checkpoint."""
    config = load_config(save / "config.toml").model
    model = DiT(config)
    load_model(save / f"iter_{iteration:07d}", model, architecture_of(config), section=section)
    return model.state_dict()


def test_stopped_and_resumed_changes_no_bit_nor_do_the_averages(uninterrupted, stopped, tmp_path):
    save = tmp_path / "run"
    shutil.copytree(stopped, save)
    pretrain_digits(RANKS, save, *MESH, "--load", str(save))
    assert curve(save, *EXACT) == curve(stopped, *EXACT) + curve(uninterrupted, *EXACT)[2:]
    for section in ("model", "ema"):
        assert equal(loaded(save, 4, section), loaded(uninterrupted, 4, section))
    weights, averages = (loaded(save, 4, section) for section in ("model", "ema"))
    assert all(not torch.equal(weights[name], averages[name]) for name in weights), (
        "averages lie behind"
    )


def killed_in_a_save(rank, world_size, arguments, iteration):
    """Train; the first rank is killed when it has written this iteration's shards."""
    plain = drafts.write_manifest

    def write_manifest(folder, *args, **more):
        if f"{iteration:07d}" in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(folder, *args, **more)

    drafts.write_manifest = write_manifest
    dit_on_rank(rank, world_size, arguments)


def test_with_muon_a_run_killed_in_a_save_goes_on_to_the_bit_and_so_do_the_averages(tmp_path):
    """Weights, averages, momenta and moments of the last checkpoint are those of a whole run."""
    flags = ("--train-iters", "6", "--save-interval", "2", "--optimizer", "muon")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pretrain_digits(RANKS, whole, *flags)
    arguments = [*DIT, *flags, "--save", str(killed), "--load", str(killed)]
    with pytest.raises(RuntimeError, match="rank"):
        run_ranks(killed_in_a_save, RANKS, arguments, 4)
    assert saved_iterations(killed) == [2]
    pretrain_digits(RANKS, killed, *flags, "--load", str(killed))

    assert curve(killed, *EXACT) == curve(whole, *EXACT)
    expected, actual = (tensors(run / "iter_0000006") for run in (whole, killed))
    assert equal(actual, expected)
    assert not equal(actual, tensors(whole / "iter_0000004"))
    for part in ("['ema']", "momentum_buffer", "exp_avg_sq"):
        assert any(part in name for name in actual)


ELSEWHERE = "cp=4 wallfacer team=2", "dp=2 tp=2 zero1", "pp=2 virtual=2 Interleaved1F1B"


@pytest.mark.parametrize(
    "mesh", ["none", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ELSEWHERE)]
)
def test_a_checkpoint_goes_on_on_another_mesh_and_with_another_method(
    mesh, uninterrupted, stopped, tmp_path
):
    """The validation, at the end, is one of the averages."""
    save, case = tmp_path / "run", case_of(mesh)
    pretrain_digits(case.ranks, save, *MESH, *case.flags, "--load", str(stopped))
    names = ("consumed_samples", "diffusion_loss", "validation_loss")
    for got, want in zip(curve(save, *names), curve(uninterrupted, *names)[2:], strict=True):
        assert got[:2] == pytest.approx(want[:2], abs=1e-6)
    assert got[2] == pytest.approx(want[2], abs=1e-6)


@pytest.mark.slow
def test_auto_takes_a_method_and_keeps_it_when_the_run_goes_on(tmp_path):
    flags = (*MESH, "--context-parallel-method", "auto", "--exit-interval", "2")
    for _ in range(2):
        records = pretrain_digits(RANKS, tmp_path, *flags, "--load", str(tmp_path))
        method = load_config(tmp_path / "config.toml").context.context_parallel_method
        assert method not in ("auto", "none")
    assert [record["iteration"] for record in records] == [1, 2, 3, 4]


def test_averages_that_a_checkpoint_lacks_begin_as_its_weights(tmp_path):
    save, flags = tmp_path / "run", ("--train-iters", "2", "--micro-batch-size", "8")
    pretrain_digits(
        1, save, *flags, "--ema-decay", "none", "--exit-interval", "1", "--train-iters", "3"
    )
    pretrain_digits(1, save, *flags, "--ema-decay", "0.5", "--load", str(save))
    before, weights = loaded(save, 1, "model"), loaded(save, 2, "model")
    averages = loaded(save, 2, "ema")
    assert (
        read_metrics(save / METRICS)[1]["learning_rate"]
        > load_config(save / "config.toml").optimizer.min_lr
    )
    assert load_config(save / "config.toml").optimizer.lr_decay_iters is None, (
        "the checkpoint keeps its schedule"
    )
    assert all(
        torch.allclose(averages[name], (before[name] + weights[name]) / 2, atol=1e-7)
        for name in weights
    )


BAD = {
    "--patch-size 3": ("patch_size is 3", "must divide", "1, 2, 4, 8"),
    "--num-attention-heads 2 --tensor-model-parallel-size 4": (
        "tensor_model_parallel_size 4",
        "num_attention_heads 2",
    ),
    "--context-parallel-size 3": ("context_parallel_size is 3", "sizes that fit"),
    "--num-attention-heads 2 --context-parallel-size 4 --context-parallel-method ulysses": (
        "heads",
    ),
    "--patch-size 8 --context-parallel-size 4": (
        "1 patch",
        "context_parallel_size 4",
        "patch_size",
    ),
    "--latent-shape 3 8 8": ("with latents of 1 8 8", "latent_shape is 3 8 8"),
    "--num-classes 5": ("num_classes 5", "label"),
    "--objective rectified_flow --learn-sigma": ("learn_sigma", "rectified_flow"),
    "--ema-decay 1": ("ema_decay is 1",),
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 "
    "--num-virtual-stages-per-pipeline-rank 2 "
    "--pipeline-schedule InterleavedZeroBubble": ("InterleavedZeroBubble", "use Interleaved1F1B"),
    "--loss-chunk-size 8": ("loss_chunk_size is 8", "leave out --loss-chunk-size"),
    "--layer-chunk-size 8 --recompute-granularity full": ("layer_chunk_size is 8", "full, so the"),
    "--context-parallel-method striped --context-parallel-size 2": ("striped", "ring"),
    "--context-parallel-method lasp": ("lasp",),
    "--data-path nowhere": ("nowhere",),
    "--split 100,0": ("split is 100,0", "eval_iters"),
    "--global-batch-size 6": ("global_batch_size is 6", "nearest that work"),
}


def end_cases(rank, world_size, save, cases):
    return {
        flags: end(pretrain_dit.main, [*DIT, "--save", str(save), *flags.split()])
        for flags in apart(cases)
    }


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    save = tmp_path_factory.mktemp("bad") / "run"
    rank_endings = run_ranks(end_cases, 4, save, list(BAD))
    assert not save.exists(), "nothing was trained"
    return rank_endings


@pytest.mark.parametrize("flags", BAD)
def test_one_message_names_what_and_the_remedy(flags, endings):
    line = refusal([rank[flags] for rank in endings])
    for word in BAD[flags]:
        assert word in line
