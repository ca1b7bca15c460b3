"""The models of linear attention train as one process does, over ranks too, and go on from their checkpoints."""

import math
from pathlib import Path

import pytest

from parallel.mesh import distributed_mesh
from pretrain_gpt import build_trainer
from runtime.ranks import run_ranks
from tests.pretraining import differences, flags_of, pretrain
from tools.common.cases import cases_of
from tools.common.training import PEAK
from train import loop
from train.config.language import parse_args

BOUND = 1e-5
CONFIGS = Path(__file__).parents[1] / "configs"
CASES = """
    lasp
    dp=2 ddp none
    dp=4 zero1 none
    cp=2 lasp
    dp=2 cp=2 lasp2 zero2
"""
FIVE = ("--num-query-groups", "none", "--train-iters", "5")


def flags(kind):
    return ("--config", str(CONFIGS / f"{kind}_tiny.toml"), *FIVE)


@pytest.fixture(scope="module", params=["transnormer", "linear_transformer"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def one_process(kind, default_data, tmp_path_factory):
    """The reference: one process, all scores at once."""
    save = tmp_path_factory.mktemp("one") / "run"
    return pretrain(1, default_data, save, *flags(kind), "--attention-backend", "reference")


@pytest.mark.parametrize("case", cases_of(CASES), ids=lambda case: case.title.replace(" ", ""))
def test_ranks_in_chunks_equal_one_process(case, kind, default_data, one_process, tmp_path):
    got = pretrain(case.ranks, default_data, tmp_path / "run", *flags(kind), *case.flags)
    assert differences(got, one_process) <= BOUND
    assert one_process[0]["lm_loss"] > one_process[-1]["lm_loss"]


def test_policies_chunked_losses_and_a_resume_change_nothing(kind, default_data, one_process, tmp_path):
    """Recomputation that keeps the attention, losses and feed-forward layers in chunks, stopped and gone on."""
    memory = ("--recompute-granularity", "attention_boundary", "--loss-chunk-size", "100", "--ffn-chunk-size", "100")
    arguments = (*flags(kind), *memory, "--exit-interval", "3")
    pretrain(2, default_data, tmp_path / "run", *arguments)
    got = pretrain(2, default_data, tmp_path / "run", *arguments, "--load", str(tmp_path / "run"))
    assert differences(got, one_process) <= BOUND


def train_with_an_overflow(rank, world_size, arguments):
    """Train, keys and values 1e25 times too large in iteration 3; the iterations skipped and all norms."""
    config = parse_args(arguments)
    with distributed_mesh(config.mesh) as mesh:
        trainer = build_trainer(config, mesh, PEAK)
        plain, reduce, norms = trainer.runner.forward_backward, loop.reduce_and_clip, []
        weights = [p for name, p in trainer.runner.parameters().items() if name.endswith(("wk.weight", "wv.weight"))]

        def forward_backward(micro_batches, valid):
            before = [weight.detach().clone() for weight in weights]
            if trainer.progress.iteration == 3:
                for weight in weights:
                    weight.detach().mul_(1e25)
            loss = plain(micro_batches, valid)
            for weight, good in zip(weights, before, strict=True):
                weight.detach().copy_(good)
            return loss

        def reduced(*of):
            loss, norm = reduce(*of)
            norms.append(norm)
            return loss, norm

        trainer.runner.forward_backward = forward_backward
        loop.reduce_and_clip = reduced
        trainer.train()
    return trainer.progress.skipped_iterations, norms


@pytest.mark.parametrize("method", ["lasp", "lasp2"])
def test_an_overflow_is_a_skipped_step_on_all_ranks(method, default_data):
    def train(world_size, *more):
        arguments = flags_of(default_data, "--model-type", "transnormer", *FIVE, *more)
        return run_ranks(train_with_an_overflow, world_size, arguments)

    ((skipped, want),) = train(1)
    assert skipped == 1
    assert [math.isfinite(norm) for norm in want] == [True, True, False, True, True]
    for skipped, norms in train(2, "--context-parallel-size", "2", "--context-parallel-method", method):
        assert skipped == 1
        assert norms == pytest.approx(want, rel=BOUND, nan_ok=True)
