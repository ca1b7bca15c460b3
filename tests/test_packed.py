"""Packed documents train as each document alone does, on every kind of mesh.

What is between them is zero.
"""

import threading
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch

from data.loader import IGNORE_INDEX
from kernels.ops import causal_convolution, delta_rule
from model.parts.delta import OneDevice
from parallel.context import plan
from runtime.ranks import run_ranks
from tests.compositions import PACKED
from tests.packed import (
    GRADIENTS,
    LOSS,
    TINY,
    alone,
    as_it_is,
    assert_equal,
    over_ranks,
    steps_on_rank,
    validation_on_rank,
    write_packed,
)
from tests.pretraining import carried_on
from tools.common.training import Records, trainer_of
from train.config.language import load_config
from train.tasks.language import LanguageTask

WINDOWS = "--window-size 9,0 --softmax-type learnable"
LOCAL = "--window-size 9,0 --window-attn-skip-freq 2 --rotary-base-local 90"
FACTORS = (
    "--embedding-multiplier 3 --attention-multiplier 0.2 --residual-multiplier 0.4 "
    "--logits-scaling 1.5"
)
KINDS = {
    "llama": "",
    "windows": f"--window-attn-skip-freq 2 {WINDOWS}",
    "gemma3": f"--model-type gemma3 --query-pre-attn-scalar 5 {LOCAL}",
    "olmo3": f"--model-type olmo3 {LOCAL}",
    "smollm3": "--model-type smollm3 --no-rope-freq 2",
    "granite": f"--model-type granite {FACTORS}",
    "gpt": "--model-type gpt --max-position-embeddings 61",
    "transnormer": "--model-type transnormer",
    "hybrid": "--model-type transnormer --softmax-every 2",
    "hybrid_windows": f"--model-type transnormer --softmax-every 2 {WINDOWS}",
    "linear": "--model-type linear_transformer",
    "delta": (
        "--model-type qwen3_5 --softmax-every 2 --linear-num-key-heads 2 --linear-num-value-heads 4"
    ),
    "olmo": "--model-type olmo_hybrid --softmax-every 2 --linear-value-head-dim 12",
    "kda": "--model-type olmo_hybrid --softmax-every 2 --linear-gate per_channel",
    "deep": "--model-type gpt --max-position-embeddings 61 --num-layers 4",
}
CP = "--context-parallel-size 2 --context-parallel-method"
PP = "--pipeline-model-parallel-size 2 --micro-batch-size 1"


@pytest.fixture(scope="module")
def flags(default_data, tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("packed"), Path(f"{default_data}.model"))


@pytest.fixture(scope="module")
def want(flags):
    """The step of a kind of model with every document alone."""
    return cache(lambda kind: alone([*flags, *KINDS[kind].split()]))


@pytest.fixture(scope="module")
def step(flags):
    """The step of a row of PACKED; all of as many ranks in one go, the nightly ones apart."""

    @cache
    def steps(ranks, slow):
        rows = [row for row in PACKED if (row.case.ranks, row.slow) == (ranks, slow)]
        runs = [[*flags, *KINDS[kind].split(), *case.flags] for kind, case, _ in rows]
        return {row[:2]: steps[0] for row, steps in zip(rows, over_ranks(ranks, runs), strict=True)}

    return lambda kind, case, slow: steps(case.ranks, slow)[kind, case]


@pytest.mark.parametrize(
    ("kind", "case", "slow"),
    [
        pytest.param(
            *row, marks=pytest.mark.slow if row.slow else (), id=f"{row.kind} {row.case.title}"
        )
        for row in PACKED
    ],
)
def test_a_packed_step_is_that_of_its_documents_alone(kind, case, slow, step, want):
    assert_equal(step(kind, case, slow), want(kind))


def without_an_end(batch):
    """Take a document's end in the first row for none."""
    (boundaries,) = batch["starts"][0, 1:].nonzero(as_tuple=True)
    starts = batch["starts"].clone()
    starts[0, 1 + boundaries[len(boundaries) // 2]] = False
    return batch | {"starts": starts}


def rows_joined(batch):
    """Let the second row go on with the last document of the first."""
    starts = batch["starts"].clone()
    starts[1:, 0] = False
    return batch | {"starts": starts}


SHARED = [
    f"{CP} zigzag",
    *(f"{KINDS[kind]} {CP} {by}" for kind, by in (("transnormer", "lasp"), ("olmo", "exchange"))),
]


@pytest.mark.parametrize(("ranks", "meshes"), [(1, [""]), (2, SHARED)])
def test_an_end_that_is_ignored_is_seen(ranks, meshes, flags):
    runs = [[*flags, *mesh.split()] for mesh in meshes]
    for plain, *controls in over_ranks(ranks, runs, (as_it_is, without_an_end, rows_joined)):
        for wrong in controls:
            assert abs(wrong.loss - plain.loss) > 10 * LOSS * plain.loss
            assert wrong.difference(plain) > 100 * GRADIENTS


LEAKS = {
    "__call__": lambda self, q, k, v, g, beta, mask=None: delta_rule(q, k, v, g, beta)[0],
    "convolve": lambda self, x, weight, mask=None: causal_convolution(x, weight),
}
"""A state, and a convolution, that cross documents."""


def leaking_on_rank(rank, world_size, runs):
    steps_by_part = {}
    for part in LEAKS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OneDevice, part, LEAKS[part])
            steps_by_part[part] = steps_on_rank(rank, world_size, runs, (as_it_is,))
    return steps_by_part


def test_a_state_or_convolution_that_crosses_documents_is_seen(flags, want):
    kinds = ("delta", "olmo")
    (steps_by_part,) = run_ranks(
        leaking_on_rank, 1, [[*flags, *KINDS[kind].split()] for kind in kinds]
    )
    for part, steps in steps_by_part.items():
        for kind, (got,) in zip(kinds, steps, strict=True):
            assert abs(got.loss - want(kind).loss) > 10 * LOSS * got.loss, part
            assert got.difference(want(kind)) > 100 * GRADIENTS, part


def second_document_alone(batch):
    """Leave loss to the second document of the first row only."""
    mine = torch.zeros_like(batch["starts"])
    mine[0] = batch["starts"][0].cumsum(0) == 2
    return batch | {"labels": batch["labels"].where(mine, IGNORE_INDEX)}


def others_changed(batch):
    """Do the same, and change every token of all other documents."""
    batch = second_document_alone(batch)
    other = batch["starts"].clone().fill_(True)
    other[0] = batch["starts"][0].cumsum(0) != 2
    return batch | {"tokens": batch["tokens"].where(~other, (batch["tokens"] + 7) % 1000)}


OTHERS = [PP, f"{KINDS['transnormer']} {CP} lasp", f"{KINDS['olmo']} {CP} zigzag"]
OTHERS += [f"{CP} {method}" for method in ("striped", "exchange", "allgather")]


@pytest.mark.parametrize(("ranks", "meshes"), [(1, [""]), (2, OTHERS)])
def test_other_documents_change_nothing_at_all(ranks, meshes, flags):
    """Loss and gradients of one document, whatever tokens the others hold: the same bits."""
    runs = [[*flags, *mesh.split()] for mesh in meshes]
    for mesh, (unchanged, changed) in zip(
        meshes, over_ranks(ranks, runs, (second_document_alone, others_changed)), strict=True
    ):
        assert unchanged.loss > 0
        assert unchanged.equal(changed), mesh


def test_one_circle_over_data_and_context_parallel_ranks_is_a_larger_context(flags, want):
    """2 x 2 ranks with a row each, and 4 ranks with both rows.

    The samples are those of any arrangement.
    """
    shared = [*flags, "--context-parallel-method", "zigzag"]
    (joined,), (large,), (apart,) = over_ranks(
        4,
        [
            [
                *shared,
                "--context-parallel-size",
                "2",
                "--micro-batch-size",
                "1",
                "--balance-over",
                "dp_cp",
            ],
            [*shared, "--context-parallel-size", "4", "--micro-batch-size", "2"],
            [*shared, "--context-parallel-size", "2", "--micro-batch-size", "1"],
        ],
    )
    assert joined.equal(large)
    for got in (joined, apart):
        assert_equal(got, want("llama"))


@pytest.mark.parametrize(("ranks", "mesh"), [(1, ""), (2, f"{CP} zigzag")])
def test_validation_counts_each_document_once_and_no_filler(ranks, mesh, flags):
    arguments = [*flags, "--eval-iters", "9", *mesh.split()]
    loss = alone(arguments, validation=True).loss
    assert (
        run_ranks(validation_on_rank, ranks, arguments) == [pytest.approx(loss, rel=LOSS)] * ranks
    )


def test_a_run_that_stops_and_goes_on_changes_no_bit(flags, tmp_path):
    """Steps are made ahead, and what was made when the run stopped is made again.

    Its folder has what was asked for.
    """
    names = ("lm_loss", "grad_norm", "consumed_tokens", "validation_loss")
    mesh = "--context-parallel-method exchange --balance-over dp_cp --micro-batch-size 1"

    arguments = [*TINY, *flags, *f"{mesh} --eval-interval 2 --eval-iters 9 --train-iters 4".split()]
    whole = carried_on(2, tmp_path / "whole", arguments, *names)
    assert [validation is not None for *_, validation in whole] == [False, True, False, True]
    carried_on(2, tmp_path / "stopped", [*arguments, "--exit-interval", "2"])
    assert carried_on(2, tmp_path / "stopped", arguments, *names) == whole
    saved_config = load_config(tmp_path / "stopped" / "config.toml")
    assert (
        saved_config.mesh.context_parallel_size,
        saved_config.mesh.balance_over,
        saved_config.train.micro_batch_size,
    ) == (1, "dp_cp", 1)


def planned_in(rank, world_size, runs):
    """Train for 4 steps with a validation each; the threads that plan, in order of their plans."""
    threads_seen, make = [], plan.rank_schedule
    for arguments in runs:
        threads = []

        def noting(*args, threads=threads):
            threads.append(threading.current_thread().name)
            return make(*args)

        plan.rank_schedule = noting
        with (
            trainer_of(LanguageTask, [*TINY, *arguments], Records()) as trainer,
            redirect_stdout(StringIO()),
        ):
            trainer.train()
        threads_seen.append(threads)
    return threads_seen


def test_no_step_but_the_first_waits_for_its_plan(flags):
    """Later steps of training and of validation have their plans in advance.

    Those of other windows and layers do, too.
    """
    steps = ["--train-iters", "4", "--eval-interval", "1", "--eval-iters", "9"]
    runs = {
        "windows": (f"{CP} exchange --recompute-granularity full", 2),
        "hybrid": (f"{CP} lasp", 1),
    }
    arguments = [
        [*flags, *steps, *KINDS[kind].split(), *mesh.split()] for kind, (mesh, _) in runs.items()
    ]
    for rank in run_ranks(planned_in, 2, arguments):
        for threads, (_, plans) in zip(rank, runs.values(), strict=True):
            # 2 micro-batches of a step; later validations may still have the plans of the first
            firsts = threads.count("MainThread")
            assert 2 * 2 * plans <= firsts <= 2 * (1 + 4) * plans
            assert threads.count("prefetch_0") == len(threads) - firsts >= (2 * 3 + 2) * plans
