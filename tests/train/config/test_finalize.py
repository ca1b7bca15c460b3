"""A run's one configuration: what is left open is decided once, and written as it was requested."""

from dataclasses import replace

import pytest

from parallel.mesh import joined_processes
from planner.choice import PLANNER
from runtime.errors import UserError
from runtime.ranks import run_ranks
from train.config import finalize as module
from train.config.finalize import finalize, validate_launch, with_method
from train.config.flags import ConfigError, write_toml
from train.config.language import parse_args, validate
from train.tasks.language import LanguageTask

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --device cpu "
    "--data-path x"
)
FLAGS += (
    " --tokenizer-model x.model --global-batch-size 4 --micro-batch-size 2 "
    "--context-parallel-size 2"
)
OPEN = (
    "--mock-data --vocab-size 100 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 256 "
)
OPEN += (
    "--device cpu --context-parallel-size 2 --context-parallel-method auto --cluster cpu "
    "--max-position-embeddings "
)
OPEN += (
    "128 --rope-scaling-type dynamic --rope-scaling-factor 2 "
    "--rope-scaling-original-max-position-embeddings "
)
OPEN += "128 --allow-changed seed"


def flagged(*more):
    return parse_args([*FLAGS.split(), *more])


def test_sizes_that_do_not_fit_the_processes_are_refused_and_the_refusal_names_the_flag_that_fits(
    tmp_path, monkeypatch
):
    (tmp_path / "config.toml").write_text("[mesh]\nfull_world_size = 4\n")
    load = ("--load", str(tmp_path))
    processes = 2
    monkeypatch.setattr(module, "launched_world_size", lambda: processes)
    validate_launch(flagged(*load), validate)
    processes = 3
    with pytest.raises(
        ConfigError,
        match=r"^context_parallel_size is 2, .*; or give --allow-resize: the run is for 4 ",
    ):
        validate_launch(flagged(*load), validate)
    for more in (
        (),
        ("--load", str(tmp_path / "none")),
        (*load, "--finetune"),
        (*load, "--global-batch-size", "5"),  # which 4 processes do not suit either
    ):
        with pytest.raises(UserError) as refused:
            validate_launch(flagged(*more), validate)
        assert "or give --allow-resize" not in str(refused.value)
    validate_launch(flagged("--allow-resize"), validate)


def finalized(rank, world_size, flags):
    config = parse_args(flags)
    with joined_processes(config.mesh):
        return config, finalize(config, LanguageTask, PLANNER)


def test_all_that_is_open_is_decided_alike_on_all_ranks_and_written_as_it_was_requested():
    (requested, final), (_, other) = run_ranks(finalized, 2, OPEN.split())
    assert final.config == other.config
    assert final.saved == other.saved
    assert final.config.context.context_parallel_method not in ("auto", "none")
    assert final.config.model.rope_scaling_seq_length == 256
    assert final.config.mesh.full_world_size == final.saved.mesh.full_world_size == 2
    assert final.saved.context == final.config.context, "the same ranks go on with the method"
    assert final.saved.model == requested.model, "another start may have another length"
    assert (final.config.checkpoint.allow_changed, final.saved.checkpoint.allow_changed) == (
        ("seed",),
        (),
    )
    assert final.start.path is None


def test_other_processes_than_the_full_number_must_fit_their_sizes():
    flags = [*OPEN.split(), "--allow-resize", "--full-world-size", "3"]
    with pytest.raises(
        RuntimeError, match="context_parallel_size is 2, which does not divide the 3 processes"
    ):
        run_ranks(finalized, 1, flags)


@pytest.mark.parametrize(
    ("full", "message"),
    [
        ("1", "context_parallel_size is 2, but this is one process"),
        ("2", "global_batch_size is .* micro_batch_size"),
    ],
)
def test_what_allow_resize_leaves_is_validated_for_these_processes(full, message):
    """As many as there were, or fewer that the planner arranges wrongly."""

    def wrong(config, processes, entries):
        return config.updated(context_parallel_size=1, micro_batch_size=3), "as the planner has it"

    requested = parse_args([*OPEN.split(), "--allow-resize", "--full-world-size", full])
    with pytest.raises(ConfigError, match=message):
        finalize(requested, LanguageTask, PLANNER._replace(mesh=wrong))


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ((), "striped"),
        (("--seq-length", "512"), "ring"),
        (("--context-parallel-size", "4"), "ring"),
    ],
)
def test_a_resumed_run_goes_on_with_its_method_on_the_same_mesh_and_length_alone(
    change, method, tmp_path
):
    earlier = flagged("--context-parallel-method", "striped")
    (tmp_path / "config.toml").write_text(write_toml(earlier))
    resumed = flagged("--context-parallel-method", "auto", "--load", str(tmp_path), *change)

    def choose(config, world_size):
        return replace(config.context, context_parallel_method="ring"), "chosen"

    assert with_method(resumed, 4, choose).context.context_parallel_method == method


@pytest.mark.parametrize(
    ("earlier_method", "method"),
    [("striped", "ring"), ("ulysses", "ulysses"), ("allgather_q", "allgather_q")],
)
def test_a_run_that_resumes_in_slices_keeps_a_method_that_takes_them(
    earlier_method, method, tmp_path
):
    earlier = flagged("--context-parallel-method", earlier_method)
    (tmp_path / "config.toml").write_text(write_toml(earlier))
    slices = ("--recompute-granularity", "full", "--layer-chunk-size", "16")
    resumed = flagged("--context-parallel-method", "auto", "--load", str(tmp_path), *slices)

    def choose(config, world_size):
        return replace(config.context, context_parallel_method="ring"), "chosen"

    assert with_method(resumed, 4, choose).context.context_parallel_method == method
