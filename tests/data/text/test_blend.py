"""Positions and bounds of the documents of samples; drawn tokens, and a run on them."""

import pytest
import torch

from data.text.blend import MockTokenizer, cumulative_lengths, positions_in_documents
from data.text.config import DataConfig
from data.text.megatron import build_datasets
from runtime.errors import DataError, UserError
from tests.data.text.corpora import EOD, document_starts
from tests.pretraining import TINY
from tools.common.runs import open_run
from tools.common.training import Records, trainer_of
from train.config.language import parse_args
from train.tasks.language import LanguageTask


def test_an_end_belongs_to_the_document_before_it_and_rows_are_apart():
    tokens = torch.tensor([[5, EOD, 6, 7, EOD], [EOD, EOD, 8, 9, 9]])
    starts = document_starts(tokens, EOD)
    assert starts.int().tolist() == [[1, 0, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert positions_in_documents(starts).tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert cumulative_lengths(starts.flatten()) == (0, 2, 5, 6, 7, 10)


FLAGS = (
    "--mock-data",
    "--device",
    "cpu",
    "--train-iters",
    "8",
    "--eval-interval",
    "4",
    "--eval-iters",
    "1",
)


def test_a_sample_is_a_function_of_the_seed_and_its_index():
    train, valid, test = build_datasets(DataConfig(mock_data=True), 64, 7, MockTokenizer(100))
    again, _, _ = build_datasets(DataConfig(mock_data=True), 64, 7, MockTokenizer(100))
    first = train[5]
    assert all(torch.equal(first[name], again[5][name]) for name in first)
    for other in (
        train[6],
        valid[5],
        test[5],
        build_datasets(DataConfig(), 64, 8, MockTokenizer(100))[0][5],
    ):
        assert not torch.equal(first["tokens"], other["tokens"])
    drawn = [samples[index]["tokens"] for samples in (train, valid, test) for index in range(4)]
    assert len(torch.stack(drawn).unique(dim=0)) == 12  # the parts share none
    assert torch.equal(first["tokens"][1:], first["labels"][:-1])
    assert int(first["tokens"].min()) >= 0
    assert int(first["tokens"].max()) < 100
    assert first["loss_mask"].sum() == 64
    assert train[None]["loss_mask"].sum() == 0


def test_a_run_on_drawn_tokens_learns():
    log = Records()
    with trainer_of(LanguageTask, [*TINY, "--vocab-size", "64", *FLAGS], log) as trainer:
        trainer.train()
    losses = [record["lm_loss"] for record in log.records if "lm_loss" in record]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "flags", [("--data-path", "a"), ("--tokenizer-model", "a.model"), ("--reset-attention-mask",)]
)
def test_drawn_tokens_go_with_no_file_and_no_documents(flags):
    with pytest.raises((DataError, UserError), match="mock_data"):
        parse_args([*TINY, *FLAGS, "--vocab-size", "64", *flags])


def test_a_run_on_drawn_tokens_is_asked_for_no_text(tmp_path):
    (tmp_path / "config.toml").write_text("[data]\nmock_data = true\n")
    with pytest.raises(
        UserError,
        match=r"mock_data is set, so the run .* on random.*name a run that was trained with",
    ):
        open_run(tmp_path)


def test_a_flag_takes_the_place_of_what_the_file_says(tmp_path, capsys):
    names, drawn, both = (tmp_path / name for name in ("names.toml", "drawn.toml", "both.toml"))
    names.write_text(
        '[data]\ndata_path = ["a"]\ntokenizer_model = "a.model"\nsft = true\nsplit = "9,1,0"\n'
    )
    drawn.write_text("[data]\nmock_data = true\n")
    both.write_text(names.read_text() + drawn.read_text().partition("\n")[2])
    config = parse_args(["--config", str(names), "--mock-data"])
    assert config.data == DataConfig(mock_data=True, split="9,1,0")
    note = f"note: --mock-data replaces data_path, tokenizer_model, sft of {names}\n"
    assert capsys.readouterr().err == note
    assert parse_args(["--config", str(drawn), "--data-path", "b"]).data == DataConfig(
        data_path=("b",)
    )
    assert capsys.readouterr().err == f"note: --data-path replaces mock_data of {drawn}\n"
    assert parse_args(["--config", str(names), "--no-mock-data"]).data.data_path == ("a",)
    assert capsys.readouterr().err == ""
    for refused in (
        (both,),
        (drawn, "--sft"),
        (drawn, "--mock-data", "--data-path", "b"),
        (names, "--mock-data", "--sft"),
    ):
        with pytest.raises(DataError, match="mock_data makes random tokens"):
            parse_args(["--config", *map(str, refused)])
