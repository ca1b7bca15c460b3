"""Megatron-LM's flags that do not exist here: accepted where they say what is so, else one line with the right word."""

import re

import pytest

from runtime.errors import UserError
from train.config import diffusion as dit_config
from train.config import language as config
from train.config.entries import Config, DiTRunConfig
from train.config.flags import config_fields
from train.config.megatron_flags import entries

OURS = {field.flag for root in (Config, DiTRunConfig) for field in config_fields(root).values()}


def test_the_table_is_whole_and_names_flags_that_exist():
    table = entries()
    assert len(table) >= 150
    assert not set(table) & OURS, "these exist by their name"
    for entry in table.values():
        assert entry.verdict in "=>!", entry
        assert entry.text, entry
        assert not entry.fits or entry.field in config_fields(Config), entry
        if entry.verdict == ">":
            named = set(re.findall(r"--[a-z][a-z0-9-]+", entry.text))
            assert named & OURS or "--config" in named, entry


@pytest.mark.parametrize("parse", [config.parse_args, dit_config.parse_args])
def test_every_flag_of_the_table_is_accepted_or_refused_by_its_own_words(parse):
    accepted = []
    for entry in entries().values():
        line = [entry.flag, *(value.replace("N", "7") for value in entry.values[:1])]
        if entry.verdict != "=":
            with pytest.raises(UserError) as caught:
                parse(line)
            assert f"unknown argument {entry.flag}; it is Megatron-LM's" in str(caught.value)
            assert entry.text in str(caught.value)
        elif not entry.fits:
            accepted.append(line)
    wanted = parse(["--train-iters", "5"])
    assert parse([*(word for line in accepted for word in line), "--train-iters", "5"]) == wanted
    assert parse([*("=".join(line) for line in accepted), "--train-iters", "5"]) == wanted


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--swiglu", None),
        ("--model-type gpt --max-position-embeddings 1024 --swiglu", "model_type is gpt; it goes with llama"),
        ("--use-distributed-optimizer --bf16 --sequence-parallel --calculate-per-token-loss", None),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy ddp", "data_parallel_sharding_strategy is ddp"),
        ("--normalization RMSNorm", None),
        ("--normalization LayerNorm", "--normalization is LayerNorm, and here it can only be RMSNorm"),
        ("--optimizer", "--optimizer has no value"),
        ("--optimizer sgd", "can only be adam"),
        ("--transformer-impl transformer_engine --use-flash-attn --use-mcore-models", None),
        ("--profile --use-pytorch-profiler", None),
        ("--fp16", "here give --bf16"),
        ("--num-experts 8", "there is no mixture of experts"),
        ("--sequence-parallel=false", "--sequence-parallel takes no value, and 'false' is given"),
        ("--swiglu=no", "--swiglu takes no value"),
        ("--attention-dropout 0.00 --hidden-dropout=0.0 --rotary-percent 1.00", None),
        ("--attention-dropout 0.1", "--attention-dropout is 0.1, and here it can only be 0"),
        ("--no-mmap-bin-files", None),
        ("--model-type transnormer --disable-bias-linear", None),
        ("--model-type linear_transformer --disable-bias-linear", "a gpt and a linear_transformer have them"),
        ("--swigl", "did you mean --swiglu? it is Megatron-LM's: its feed-forward is SwiGLU"),
        ("--fp1=1", "did you mean --fp16? it is Megatron-LM's; here give --bf16"),
        ("--no-such-flag", "unknown argument --no-such-flag; "),
    ],
)
def test_what_contradicts_is_refused(line, words):
    if words is None:
        config.parse_args(line.split())
        return
    with pytest.raises(UserError) as caught:
        config.parse_args(line.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_needs_a_kind_of_model_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="--swiglu is given and this program has no model_type"):
        dit_config.parse_args(["--swiglu"])
