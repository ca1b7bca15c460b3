"""The GPT of configs/gpt_tiny.toml trains as one process does on any mesh, and goes on from its checkpoints."""

from pathlib import Path

import pytest

from runtime.ranks import run_ranks
from tests.pretraining import differences, on_rank, pretrain

BOUND = 1e-5
GPT = ("--config", str(Path(__file__).parents[1] / "configs" / "gpt_tiny.toml"), "--context-parallel-size")
FIVE = ("--train-iters", "5")


@pytest.fixture(scope="module")
def one_process(default_data, tmp_path_factory):
    """The reference: one process, no context parallelism, plain SDPA."""
    save = tmp_path_factory.mktemp("one") / "run"
    return pretrain(1, default_data, save, *GPT, "1", *FIVE, "--context-parallel-method", "none")


@pytest.mark.parametrize(
    ("method", "cp", "ranks"),
    [pytest.param("zigzag", 2, 4, marks=pytest.mark.slow), ("allgather", 1, 2)],
)
def test_context_and_data_parallel_equal_one_process(method, cp, ranks, default_data, one_process, tmp_path):
    """Weights, gradients and optimizer are sharded over all ranks."""
    flags = (*GPT, str(cp), *FIVE, "--context-parallel-method", method)
    assert differences(pretrain(ranks, default_data, tmp_path / "run", *flags), one_process) <= BOUND
    assert one_process[0]["lm_loss"] > one_process[-1]["lm_loss"]


@pytest.mark.slow
def test_tensor_parallel_in_chunks_equals_one_process_and_goes_on_elsewhere(default_data, one_process, tmp_path):
    """From a checkpoint of tp 2 x cp 2, where the biases of all projections are split, to cp 2 and to tp 2 x dp 2."""
    tensor = ("--tensor-model-parallel-size", "2")
    chunks = ("--loss-chunk-size", "50", "--ffn-chunk-size", "70", "--recompute-granularity", "attention_boundary")
    save = tmp_path / "run"
    first = pretrain(4, default_data, save, *GPT, "2", *FIVE, *tensor, *chunks, "--exit-interval", "3")
    assert differences(first, one_process[:3]) <= BOUND
    for name, ranks, flags in (("cp", 2, (*GPT, "2")), ("dp", 4, (*GPT, "1", *tensor))):
        got = pretrain(ranks, default_data, tmp_path / name, *flags, *FIVE, "--load", str(save))
        assert differences(got, one_process[3:]) <= BOUND


@pytest.mark.parametrize(
    ("positions", "over"),
    [("learned", (("striped", 2), ("zigzag", 4))), pytest.param("rope", (("zigzag", 4),), marks=pytest.mark.slow)],
)
def test_a_length_that_does_not_divide_and_a_table_that_ends_with_it(positions, over, default_data, tmp_path):
    """Padding reaches up to position 255, and the table of learned ones ends at 250."""
    table = {
        "learned": ("--max-position-embeddings", "251"),
        "rope": ("--position-embedding-type", "rope", "--max-position-embeddings", "none"),
    }
    flags = ("--train-iters", "3", "--seq-length", "251", *table[positions])
    want = pretrain(1, default_data, tmp_path / "one", *GPT, "1", *flags, "--context-parallel-method", "none")
    for method, cp in over:
        got = pretrain(cp, default_data, tmp_path / method, *GPT, str(cp), *flags, "--context-parallel-method", method)
        assert differences(got, want) <= BOUND, method


def positions_from_zero(rank, world_size, arguments):
    """Train with every rank's tokens numbered from 0 instead of by their places in the whole sequence."""
    from model.gpt import GPT

    hidden = GPT.hidden
    GPT.hidden = lambda self, tokens, *_: hidden(self, tokens)
    on_rank(rank, world_size, arguments)


def test_positions_of_a_rank_alone_make_parity_fail(default_data, one_process, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.pretraining.run_ranks", lambda _, world_size, flags: run_ranks(positions_from_zero, world_size, flags)
    )
    got = pretrain(2, default_data, tmp_path / "run", *GPT, "2", *FIVE)
    assert differences(got, one_process) > 10 * BOUND


def test_striped_ranks_equal_one_process_and_a_resume_changes_no_bit_and_goes_on_elsewhere(
    default_data, one_process, tmp_path
):
    exact = ("lm_loss", "grad_norm", "learning_rate", "consumed_samples")
    flags = (*GPT, "2", *FIVE)
    whole = pretrain(2, default_data, tmp_path / "whole", *flags)
    assert differences(whole, one_process) <= BOUND
    save = tmp_path / "run"
    pretrain(2, default_data, save, *flags, "--exit-interval", "3")
    elsewhere = pretrain(1, default_data, tmp_path / "elsewhere", *GPT, "1", *FIVE, "--load", str(save))
    assert differences(elsewhere, one_process[3:]) <= BOUND
    got = pretrain(2, default_data, save, *flags, "--load", str(save))
    assert [[record[name] for name in exact] for record in got] == [
        [record[name] for name in exact] for record in whole
    ]
