"""Configurations that are derived from a run's.

Flags of packed documents come with what they go with.
"""

from dataclasses import replace

import pytest

from runtime.errors import UserError
from tests.model.models import model_config
from tests.planner.test_search import config
from train.config import diffusion
from train.config.derive import (
    beyond_rope,
    beyond_vocabulary,
    in_one_slice,
    rope_flags,
    with_joined_ranks,
    with_vocabulary,
)
from train.config.entries import Config, DiTRunConfig
from train.config.language import parse_args, validate


def test_the_vocabulary_is_the_tokenizers_unless_another_one_is_named():
    unset = replace(config(1), model=model_config())
    assert with_vocabulary(unset, 300).model.vocab_size == 300
    assert with_vocabulary(config(1), 300) == config(1)
    assert with_vocabulary(config(1), 513) == config(1)
    assert beyond_vocabulary(512, 512) is None
    assert (
        "513 entries, but the model's vocab_size is 512; data with a token id of 512"
        in beyond_vocabulary(512, 513)
    )


@pytest.mark.parametrize(
    ("model", "length", "flags"),
    [
        ("--max-position-embeddings 40960", 1048576, "yarn 40960 25.6"),
        ("--max-position-embeddings 40960", 1000000, "yarn 40960 24.4141"),
        (
            "--rope-scaling-type linear --rope-scaling-factor 4 --max-position-embeddings 4096",
            32768,
            "linear 8",
        ),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 8 "
            "--rope-scaling-original-max-position-embeddings 8192 "
            "--max-position-embeddings 131072",
            524288,
            "llama3 8192 32 524288",
        ),
        ("--max-position-embeddings 8192", 8192, ""),
    ],
)
def test_the_flags_that_a_note_asks_for_scale_rope_as_far_as_the_sequences_go(model, length, flags):
    model_flags = [*DATA, *model.split(), "--seq-length", str(length)]
    advised = " ".join(rope_flags(parse_args(model_flags))).split()
    assert advised[1::2] == flags.split()
    assert beyond_rope(parse_args([*model_flags, *advised])) is None
    assert bool(beyond_rope(parse_args(model_flags))) == bool(flags)


DATA = ["--data-path", "runs/data/x", "--tokenizer-model", "x.model"]
GPT = "--model-type gpt --max-position-embeddings 251 --seq-length 251"
APART, JOINED = "--reset-attention-mask", "--balance-over dp_cp --reset-attention-mask"


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, f"{APART} --reset-position-ids {GPT}"),
        (1, f"--reset-position-ids {GPT}"),
        (1, f"{APART} --model-type transnormer --context-parallel-method none"),
        (4, f"{JOINED} --context-parallel-method wallfacer --context-parallel-team-size 2"),
        (1, JOINED),
    ],
)
def test_the_flags_are_independent_otherwise(processes, flags):
    validate(parse_args([*DATA, *flags.split()]), processes)


def test_a_diffusion_transformer_has_no_documents_to_join():
    with pytest.raises(UserError, match="balance_over is dp_cp"):
        diffusion.validate(diffusion.parse_args(["--balance-over", "dp_cp"]), 4)


def test_joined_ranks_are_those_of_a_larger_context_and_have_the_same_samples():
    sizes = (
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 2 "
        "--global-batch-size 16"
    )
    apart = parse_args([APART, *sizes.split()])
    apart_config = replace(apart, mesh=replace(apart.mesh, balance_over="dp_cp"))
    assert with_joined_ranks(apart, 16) == apart
    joined = with_joined_ranks(apart_config, 16)
    assert (joined.mesh.context_parallel_size, joined.train.micro_batch_size) == (8, 8)
    assert (joined.mesh.data_parallel_size(16), apart.mesh.data_parallel_size(16)) == (1, 4)
    assert joined.train.micro_batches(1) == apart.train.micro_batches(4) == 2
    assert with_joined_ranks(joined, 16) == joined
    assert with_joined_ranks(apart_config, 6) == apart_config, (
        "sizes that do not fit are left for validate to name"
    )


def test_the_samples_of_a_micro_batch_are_one_sequence_only_where_documents_attend_apart():
    sizes = ["--micro-batch-size", "3", "--seq-length", "100"]
    assert parse_args([*sizes, APART]).joined_length == 300
    assert parse_args([*sizes, "--reset-position-ids"]).joined_length == 100
    assert (Config().joined_length, DiTRunConfig().joined_length) == (1024, 256)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", None),
        ("--layer-chunk-size 511", None),
        ("--layer-chunk-size 512", 512),
        ("--layer-chunk-size 600 --context-parallel-size 2", 512),
        ("--layer-chunk-size 600 --context-parallel-size 2 --micro-batch-size 3", None),
    ],
)
def test_a_slice_of_all_tokens_is_told(flags, tokens):
    length = 1024 if "parallel" in flags else 512
    config = parse_args(
        f"--mock-data --seq-length {length} --recompute-granularity full {flags}".split()
    )
    note = in_one_slice(config)
    assert (note is None) == (tokens is None)
    if tokens is not None:
        assert f"a rank has {tokens} tokens" in note
