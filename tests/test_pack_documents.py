"""Whole documents packed into samples train as each alone does, over any mesh.

A run goes on to the bit.
"""

import os
import signal
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.ranks import RankError, run_ranks
from tests.packed import (
    GRADIENTS,
    LOSS,
    TINY,
    alone,
    as_it_is,
    assert_equal,
    over_ranks,
    validation_on_rank,
    write_packed,
)
from tests.pretraining import carried_on, curve, on_rank
from tests.test_packed import CP, rows_joined
from train.callbacks.metrics import RunLog
from train.config.flags import write_toml
from train.config.language import parse_args, validate

CIRCLE = f"{CP} exchange --micro-batch-size 1 --balance-over dp_cp"


@pytest.fixture(scope="module")
def flags(default_data, tmp_path_factory):
    """Documents of up to 151 tokens, of which samples of 61 cut some."""
    folder = tmp_path_factory.mktemp("packed")
    return [*write_packed(folder, Path(f"{default_data}.model"), longest=150), "--pack-documents"]


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (1, ("",)),
        (2, (f"{CP} striped", f"{CP} exchange")),
        pytest.param(
            4,
            (f"{CP} zigzag --micro-batch-size 1", f"{CP} exchange", CIRCLE),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_is_that_of_its_documents_alone(ranks, meshes, flags):
    want = alone(flags)
    runs = [[*flags, *mesh.split()] for mesh in meshes]
    for mesh, (got, wrong) in zip(
        meshes, over_ranks(ranks, runs, (as_it_is, rows_joined)), strict=True
    ):
        assert_equal(got, want)
        assert "micro-batch-size 1" in mesh or wrong.difference(want) > 100 * GRADIENTS


def test_validation_counts_each_document_once_and_no_filler(flags):
    arguments = [*flags, "--eval-iters", "9", *f"{CP} zigzag".split()]
    loss = alone(arguments, validation=True).loss
    assert run_ranks(validation_on_rank, 2, arguments) == [pytest.approx(loss, rel=LOSS)] * 2


@pytest.mark.slow  # runs of one and of four processes
@pytest.mark.parametrize("more", ["", "--blend-by-length 20:0.3 61:0.5"])
def test_a_run_on_two_by_two_ranks_has_the_losses_of_one_and_goes_on_to_the_bit(
    flags, more, tmp_path, capsys
):
    names = ("lm_loss", "grad_norm", "consumed_tokens", "validation_loss")
    steps = [*TINY, *flags, *f"--eval-interval 2 --eval-iters 9 --train-iters 8 {more}".split()]
    circle = [*steps, *CIRCLE.split()]
    one_process = carried_on(1, tmp_path / "one", steps, *names)
    assert "packed documents, each by itself, cut only if too long, " in capsys.readouterr().out
    four = carried_on(4, tmp_path / "four", circle, *names)
    assert len(one_process) == 8
    for mine, theirs in zip(four, one_process, strict=True):
        assert mine[:-1] == pytest.approx(theirs[:-1], rel=5e-6)
        assert (mine[-1] or 0) == pytest.approx(theirs[-1] or 0, rel=5e-6)
    carried_on(4, tmp_path / "stopped", [*circle, "--exit-interval", "4"])
    assert carried_on(4, tmp_path / "stopped", circle, *names) == four


def killed_on_rank(rank, world_size, arguments):
    """Train until the first rank has written iteration 5, which then ends without a word."""
    write = RunLog.write

    def last(log, record):
        write(log, record)
        if record["iteration"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    RunLog.write = last
    on_rank(rank, world_size, arguments)


def test_a_killed_run_goes_on_to_the_bit(flags, tmp_path):
    """From the checkpoint of iteration 4; the record of iteration 5 is written anew."""
    steps = f"{CP} exchange --save-interval 2 --train-iters 6 --blend-by-length 61:0.5"
    killed, arguments = tmp_path / "killed", [*TINY, *flags, *steps.split()]
    with pytest.raises(RankError):
        carried_on(2, killed, arguments, body=killed_on_rank)
    assert curve(killed, "iteration") == [[1], [2], [3], [4], [5]]
    assert (killed / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    names = ("iteration", "lm_loss", "grad_norm", "consumed_tokens")
    assert carried_on(2, killed, arguments, *names) == carried_on(
        2, tmp_path / "whole", arguments, *names
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--sft --no-reset-position-ids", "sft is set"),
        ("--sft --reset-position-ids --eod-mask-loss", "eod_mask_loss does not apply to sft"),
        ("--pack-documents --sft --reset-position-ids", "pack_documents does not apply to sft"),
        (
            "--blend-by-length 9:0.5 --sft --reset-position-ids",
            "blend_by_length does not apply to sft",
        ),
        ("--pack-documents --eod-mask-loss", "eod_mask_loss does not apply to pack_documents"),
        (
            "--pack-documents --mock-data",
            "mock_data makes random tokens, so it cannot be combined with .*pack_documents",
        ),
    ],
)
def test_what_packing_does_not_go_with(more, message):
    with pytest.raises(UserError, match=message):
        validate(
            parse_args(
                [
                    "--data-path",
                    "x",
                    "--reset-attention-mask",
                    "--tokenizer-model",
                    "x",
                    *more.split(),
                ]
            ),
            1,
        )


def test_sft_sets_what_it_needs_against_a_file_but_not_against_a_flag(tmp_path):
    """A run's or an import's file names every field."""
    names = ("reset_attention_mask", "reset_position_ids")
    plain = ["--data-path", "x", "--tokenizer-model", "x"]
    file = tmp_path / "config.toml"
    file.write_text(write_toml(parse_args(plain)))
    for flags in ([*plain, "--sft"], ["--config", str(file), "--sft"]):
        config = parse_args(flags)
        assert [getattr(config.data, name) for name in names] == [True, True]
        validate(config, 1)
    file.write_text(
        '[data]\ndata_path = ["x"]\ntokenizer_model = "x"\nsft = true\nreset_position_ids = false\n'
    )
    for flags in (["--config", str(file)], [*plain, "--sft", "--no-reset-attention-mask"]):
        with pytest.raises(UserError, match="sft is set"):
            validate(parse_args(flags), 1)
    assert not parse_args(plain).data.reset_position_ids
