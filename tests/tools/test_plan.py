"""The planner's command: its table, its JSON, the file it writes, and a real profile."""

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from planner.choice import combine_prediction_and_profile
from planner.cluster import load_cluster
from runtime import progress
from runtime.ranks import run_ranks
from tests.pretraining import TINY
from tests.tools.plans import A100, MODEL, rows_of, without_launcher  # noqa: F401
from tools.common.plan_text import command, grouped, sources
from tools.common.training import PEAK, measure, shortened
from tools.plan import main
from train.config.derive import beyond_rope
from train.config.language import parse_args, validate


def test_the_table_has_the_best_first_and_says_what_was_discarded(capsys, monkeypatch):
    for seconds in ("FIRST_LOG_SECONDS", "LOG_SECONDS"):
        monkeypatch.setattr(progress, seconds, -1.0)  # every look is told
    assert (
        main(
            [
                *MODEL,
                *A100,
                "--context-parallel-size",
                "16",
                "--top",
                "4",
                "--num-query-groups",
                "1",
            ]
        )
        == 0
    )
    out, stderr = capsys.readouterr()
    assert re.search(r"searching: \w+, context 16, zero3, candidate 1 of \d+, \d s\n", stderr)
    rows = rows_of(out)
    assert [row[0] for row in rows] == list("1234")
    assert {row[-5].split()[1] for row in rows} == {"ms"}
    times = [float(row[-5].split()[0]) for row in rows]
    assert times == sorted(times)
    assert float(rows[0][-4].replace(",", "")) == pytest.approx(4096 / times[0] * 1e3, rel=1e-3)
    assert "candidates (the best 4 are shown, --top); " in out
    assert "ulysses_degree is 16 with 8 query" in out
    assert main([*MODEL, *A100]) == 0
    alone = "1 process on WallFacer's A100, 8 x 4, sequences of 4096 tokens\n1 candidate; "
    assert capsys.readouterr().out.startswith(alone)


def config_to_start(out):
    """The configuration of the command that an answer ends with."""
    words = re.search(r"start it:\n((?:.*\\\n)*.*\n)", out)[1].replace("\\\n", " ").split()
    assert words[:3] == ["torchrun", "--nproc-per-node", "8"]
    return parse_args(words[words.index("pretrain_gpt.py") + 1 :])


def test_a_million_tokens_on_eight_h100_are_answered_within_eight_seconds_with_the_command(
    capsys,
):
    began = time.process_time()  # of this process, whatever else the machine does
    assert (
        main(["Qwen3-8B", "--seq-length", "1048576", "--world-size", "8", "--cluster", "h100"]) == 0
    )
    assert time.process_time() - began < 8
    out = capsys.readouterr().out
    assert out.startswith("8 processes on H100 80GB pod, sequences of 1048576 tokens: fits\n")
    assert [row[0] for row in rows_of(out)] == ["2", "3", "4"]
    assert "\nas fast as 1, as far as predictions tell (to 1%): 2, 3, 4\n" in out
    assert "\nnote: seq_length 1048576 is 25.6 times the 40960 positions that the model" in out
    assert "the command scales rope to them; " in " ".join(out.split())
    assert (
        "error: at most 5% on published runs on this GPU that were not used for fitting; on all "
        "GPUs at most 6%\n"
    ) in out
    assert (
        "it trains from random weights; add --finetune --load RUN to begin with RUN's weights"
        in out
    )
    config = config_to_start(out)
    assert beyond_rope(config) is None, "as its note asks"
    assert (config.train.seq_length, config.train.global_batch_size) == (1048576, 1)
    assert config.context.context_parallel_method != "auto"


@pytest.mark.slow
def test_the_longest_sequence_leaves_little_and_says_so(capsys):
    assert main(["qwen3_5_9b", "--longest", "--world-size", "8", "--cluster", "h100"]) == 0
    assert (
        "tokens: fits (leaves less than the tenth of memory that an allocator may need)\n"
        in capsys.readouterr().out
    )


def test_a_named_model_has_a_card_without_a_flag(capsys):
    assert main(["llama3_8b", "--seq-length", "8192"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 processes on H100 80GB pod, sequences of 8192 tokens: fits\n")
    validate(config_to_start(out), 8)


@pytest.mark.parametrize(
    ("cluster", "flags", "kernel", "error"),
    [
        ("h100", "", "cuDNN at 53%", "at most 5% on published runs"),
        (
            "h100",
            "--reset-attention-mask",
            "FlashAttention 2 at 31%",
            "no published run of .* with FlashAttention 2 to",
        ),
        ("h100", "--attention-backend aten", "FlashAttention 2 at 31%", "no published run"),
        ("h100", "--attention-backend flash_attn_3", "FlashAttention 3 at 66%", "no published run"),
        (
            "h100",
            "--attention-backend triton",
            "attention at 53%",
            "no published run of .* with attention to",
        ),
        ("h200", "", "cuDNN at 53%", "no published run of .* with cuDNN to"),
        ("gb200", "", "cuDNN at 60%", "no published run of .* with cuDNN to compare with"),
        (
            "a100",
            "--reset-attention-mask",
            "FlashAttention 2 at 55%",
            "at most 6% on published runs",
        ),
    ],
)
def test_a_plans_sources_are_those_of_the_kernel_that_runs(cluster, flags, kernel, error):
    config = parse_args(["--config", "llama3_8b", *flags.split()])
    _, rates, off, *_ = sources(config, load_cluster(cluster))
    assert f" {kernel};" in rates
    assert re.search(error, off)


@pytest.mark.parametrize(
    ("flags", "rate", "error"),
    [
        (
            ["--compile", "--context-parallel-size", "1"],
            "(1.59 times that for the layers in float8)",
            "at most 8% on published",
        ),
        ([], "(no more in float8 without --compile)", "unknown: no published run in float8"),
        (
            "--compile --context-parallel-size 1 --fp8-format e4m3 --fp8-recipe rowwise".split(),
            "(1.19 times that for the layers in float8)",
            "unknown: all published runs in float8 with recipe rowwise were used for fitting",
        ),
        (
            ["--compile", "--context-parallel-size", "2"],
            "(1.59 times that for the layers in float8)",
            "unknown: of torchtitan's runs in float8 with a context parallel size of 4 and 8, "
            "predictions are 34% and 38% too low",
        ),
        (
            ["--compile", "--config", "qwen3_5_0.8b"],
            "(1.59 times that for the layers in float8)",
            "unknown: there is no published run of such a model",
        ),
    ],
)
def test_a_plan_in_float8_has_the_error_of_runs_in_float8(flags, rate, error):
    config = parse_args(["--config", "llama3_8b", "--fp8-format", "hybrid", *flags])
    _, rates, off, command_line, *_ = sources(config, load_cluster("h100"))
    assert rate in rates
    assert error in off
    assert "--table float8" in command_line


def test_a_plan_in_float8_for_cards_without_it_is_refused(capsys):
    flags = ["--config", "llama3_8b", "--fp8-format", "hybrid", "--world-size", "8"]
    assert main([*flags, "--cluster", "a100"]) == 1
    assert "whose cards have no 8-bit matmuls; leave out --fp8-format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processes", "nodes", "each"), [(5, 1, 5), (24, 3, 8), (12, 2, 6), (11, 11, 1)]
)
def test_the_command_starts_as_many_processes_as_were_planned(processes, nodes, each):
    config = parse_args(["--config", "llama3_8b"])
    words = " ".join(command(config, config, processes, load_cluster("h100"), "FILE")).split()
    assert words[words.index("--nproc-per-node") + 1] == str(each)
    assert ("--nnodes" in words) == (nodes > 1)
    assert nodes == 1 or words[words.index("--nnodes") + 1] == str(nodes)


@pytest.mark.parametrize(
    "name", ["llama_tiny", pytest.param("transnormer_hybrid_tiny", marks=pytest.mark.slow)]
)
def test_a_named_model_whose_data_are_not_made_yet_has_their_vocabulary(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([name, "--world-size", "2", "--fits"]) == 0
    assert capsys.readouterr().err.startswith(
        "note: runs/data/stdlib.model does not exist; a vocabulary of 4096 is ass"
    )
    assert main([name, "--tokenizer-model", "mine.model"]) == 1
    assert "cannot read tokenizer mine.model" in capsys.readouterr().err


def test_json_parses_and_holds_the_same(capsys):
    assert main([*MODEL, *A100, "--context-parallel-size", "8", "--json", "--top", "3"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["rows"]) == 3
    assert plan["cluster"]["gpus_per_node"] == 8
    row = plan["rows"][0]
    assert row["predicted_seconds"] == pytest.approx(sum(row["predicted_seconds_by_part"].values()))
    assert row["measured_seconds"] is None
    assert row["attention_bytes_between_nodes"] == 0  # 8 ranks are one node


def test_the_winner_is_a_file_that_training_accepts(tmp_path):
    path = tmp_path / "new" / "best.toml"
    data = ("--data-path", "x", "--tokenizer-model", "x.model")
    assert (
        main([*MODEL, *A100, *data, "--all", "--world-size", "8", "--bf16", "--write", str(path)])
        == 0
    )
    config = parse_args(["--config", str(path)])
    validate(config, 8)
    assert config.context.context_parallel_method != "auto"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--context-parallel-size 4 --profile",
            "profile needs the 4 processes of the plan, but 1 started; use torch",
        ),
        ("--write . --top 0", "^error: --write is ., but that is a folder; give a file\n$"),
        ("--top 0", "top is 0; it must be 1 or more"),
        ("--vocab-size none", "vocab_size nor tokenizer_model.* give a model with --config FILE"),
        (
            "--longest --seq-length 4096",
            "--longest searches for the sequence length; do not pass --seq-length too",
        ),
        (
            "--fewest --world-size 4",
            "--fewest searches for the number of processes; do not pass --world-size too",
        ),
        ("--cluster none.toml", "none.toml: cannot be read"),
        ("--fits --top 3", "--top is for ranked plans, but --fits looks at one configuration"),
        (
            "--fits --context-parallel-method auto --tensor-model-parallel-size 3 --world-size 3",
            "context_parallel_method is auto, but no method suits",
        ),
        (
            "--context-parallel-size 3 --world-size 4",
            "context_parallel_size is 3, which does not divide",
        ),
    ],
)
def test_bad_input_is_one_line(flags, message, capsys):
    assert main([*MODEL, *A100, *flags.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


def seconds(text):
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


def profiled(rank, world_size, arguments, folder):
    if rank == 0:
        sys.stdout = (Path(folder) / "out").open("w", buffering=1)
    return main(arguments)


def test_a_profile_runs_the_best_and_takes_the_fastest_by_prediction_and_profile(
    default_data, tmp_path
):
    data = ("--data-path", str(default_data), "--tokenizer-model", f"{default_data}.model")
    path = tmp_path / "best.toml"
    flags = (
        "--context-parallel-size",
        "2",
        "--profile",
        "--profile-top",
        "2",
        "--profile-iters",
        "1",
    )
    arguments = [*TINY, *data, *flags, "--train-iters", "100", "--write", str(path)]
    assert run_ranks(profiled, 2, arguments, str(tmp_path)) == [0] * 2
    out = (tmp_path / "out").read_text()
    assert "profiling 2 of 2: " in out
    rows = rows_of(out)
    predicted, measured = ([seconds(row[column]) for row in rows[:2]] for column in (4, 5))
    first, second = combine_prediction_and_profile(predicted, measured)
    assert first <= second * 1.001  # the table rounds to four digits
    best = parse_args(["--config", str(path)])
    assert best.context.title in rows[0][1]
    assert best.train.train_iters == 100  # the run's own, not the profile's


def measured_twice(rank, world_size, arguments):
    config = parse_args(arguments)
    return measure([config, config], 1, peak_flops=PEAK)


@pytest.mark.slow
def test_groups_of_a_candidate_leave_nothing_to_the_next(default_data):
    """Both make groups of the same ranks, those that split heads or hold a copy of the shards."""
    data = ("--data-path", str(default_data), "--tokenizer-model", f"{default_data}.model")
    for flags in (("--ulysses-degree", "2"), ("--num-distributed-optimizer-instances", "2")):
        arguments = [
            *TINY,
            *data,
            "--context-parallel-size",
            "4",
            "--micro-batch-size",
            "4",
            *flags,
        ]
        times = run_ranks(measured_twice, 4, arguments)
        assert times[0] == times[3]
        assert len(times[0]) == 2


def test_reasons_that_differ_in_numbers_are_one():
    reasons = Counter(
        {
            "cp is 4, of 2 heads; use 2": 2,
            "tp is 3": 6,
            "cp is 16, of 2 heads; use 1": 2,
            "cp is 8, of 2": 1,
        }
    )
    reasons["cp is 32, of 2 heads; use 1"] += 1
    assert grouped(reasons) == [
        (": tp is 3", 6),
        (", such as: cp is 4, of 2 heads; use 2", 5),
        (": cp is 8, of 2", 1),
    ]


@pytest.mark.parametrize(
    "name", ["dit_s_2", pytest.param("transnormer_hybrid_tiny", marks=pytest.mark.slow)]
)
def test_other_kinds_of_models_have_plans(name, capsys):
    text = ("--vocab-size", "512") if name != "dit_s_2" else ()
    flags = ("--config", name, "--context-parallel-size", "2", "--bf16", "--num-layers", "4", *text)
    assert main([*flags, *A100, "--top", "1"]) == 0
    assert rows_of(capsys.readouterr().out)
    assert main([*flags, *A100, "--fits", "--data-path", "not_read"]) == 0
    assert "\nfits in " in capsys.readouterr().out


def test_the_profile_of_a_plan_leaves_out_that_of_the_run(tmp_path):
    config = parse_args([*TINY, "--profile", "--save", str(tmp_path)])
    assert config.profiling.profile
    assert not shortened(config, 2).profiling.profile
