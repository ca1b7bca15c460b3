"""A step of models with a delta rule over ranks is that of one process.

The ranks have any dimension, in every mode.
"""

from dataclasses import replace
from functools import cache

import pytest

from parallel.context.linear import halo
from parallel.mesh import distributed_mesh
from runtime.ranks import run_ranks
from tests.parallel import test_steps
from tests.parallel.split import check_step, config, mesh_config, plain, split_step, whole_step
from tests.parallel.test_steps import Case

DELTA = {"num_layers": 3, "softmax_every": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
QWEN3_5 = {"model_type": "qwen3_5", "kv_channels": 8, "rotary_percent": 0.5, **DELTA}
MODELS = {
    "qwen3_5": config(True, **QWEN3_5, linear_num_key_heads=2, linear_num_value_heads=4),
    "olmo_hybrid": config(model_type="olmo_hybrid", **DELTA),
    "kda": config(**QWEN3_5, linear_gate="per_channel"),
}
KINDS = tuple(MODELS)
MODELS |= {f"{kind} lora": replace(MODELS[kind], lora_rank=3, lora_alpha=4.5) for kind in KINDS}
test_steps.MODELS.update(MODELS)
POLICIES = ("full", "selective", "attention_boundary")
CASES = {
    2: [
        *(
            Case(kind, "zigzag", 1, 2, policy=policy)
            for kind, policy in zip(KINDS, POLICIES, strict=True)
        ),
        *(
            Case(kind, "ring", 2, 1, policy=policy)
            for kind, policy in zip(KINDS, reversed(POLICIES), strict=True)
        ),
        *(Case(f"{KINDS[0]} lora", *mesh) for mesh in (("exchange", 1, 2), ("ring", 2, 1))),
    ],
    3: [
        Case("qwen3_5", "zigzag", 1, 3, policy="full"),
        Case("olmo_hybrid", "exchange", 1, 3, "ddp", "selective"),
        Case("kda", "exchange", 1, 3, "ddp", "selective"),
    ],
    4: [
        *(
            Case(kind, method, 2, 2, policy="full")
            for kind in KINDS
            for method in ("zigzag", "ulysses")
        ),
        *(
            Case(kind, "ring", 1, 2, strategy)
            for kind in KINDS
            for strategy in ("zero3", "zero1", "legacy_ddp")
        ),
        *(
            Case(kind, method, 1, 4)
            for kind in KINDS
            for method in ("zigzag", "exchange", "double_ring", "allgather")
        ),
        *(
            Case(kind, method, 1, 2)
            for kind in KINDS
            for method in ("wallfacer", "ulysses", "allgather")
        ),
        *(Case(f"{kind} lora", "zigzag", 2, 2) for kind in KINDS),
        Case("kda", "ring", 4, 1),  # whose KV heads two ranks share
        Case("olmo_hybrid", "ulysses", 1, 2, "ddp", "full"),
        Case("kda", "double_ring", 1, 2, "zero1", "attention_boundary"),
        Case("olmo_hybrid lora", "zigzag", 1, 2, "zero2", "attention_boundary"),
    ],
}


BFLOAT16 = 2.0**-8
"""Relative rounding of 8 bits."""


@cache
def one_process(kind):
    return whole_step(MODELS[kind], plain(MODELS[kind], None))


def steps(rank, world_size, cases):
    return [step for step, _ in test_steps.steps(rank, world_size, cases)]


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_over_ranks_is_that_of_one_process(ranks):
    """Gradients relative to the largest, which is up to 0.3: 80 roundings of float32."""
    for result in run_ranks(steps, ranks, CASES[ranks]):
        for case, got in zip(CASES[ranks], result, strict=True):
            want = one_process(case.kind)
            check_step(
                got, want, case, 5e-6 * max(x.abs().max().item() for x in want.gradients.values())
            )


def halves(rank, world_size, meshes):
    """The steps in bfloat16 on each mesh."""
    results = {}
    for tp, cp in meshes:
        for kind in KINDS:
            with distributed_mesh(mesh_config(tp, cp)) as mesh:
                results[kind, tp, cp] = split_step(mesh, MODELS[kind], bf16=True)[1]
    return results


def errors(step, kind):
    """Differences of a step from that in float32.

    Of its loss, and of each gradient relative to its norm.
    """
    want = one_process(kind)
    pairs = {name: (x, want.gradients[name]) for name, x in step.gradients.items()}
    relative = {name: ((x - y).norm() / y.norm()).item() for name, (x, y) in pairs.items()}
    return abs(step.loss - want.loss), relative


def root_mean_square(values):
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def test_bfloat16_over_ranks_is_as_near_to_float32_as_in_one_process():
    """By the mean over all gradients.

    The error of a single small one can be nearly zero by luck in one process.
    """
    alone = run_ranks(halves, 1, [(1, 1)])[0]
    for (kind, tp, cp), step in run_ranks(halves, 2, [(1, 2), (2, 1)])[0].items():
        loss, over_ranks = errors(step, kind)
        _, in_one_process = errors(alone[kind, 1, 1], kind)
        assert loss < 1e-3, (kind, tp, cp)

        worst = max(over_ranks, key=over_ranks.get)
        assert over_ranks[worst] < 16 * BFLOAT16, (kind, tp, cp, worst)

        mean, limit = map(root_mean_square, (over_ranks.values(), in_one_process.values()))
        assert mean < 1.5 * limit, (kind, tp, cp)


def no_halo(patch):
    """Parts of a sequence begin with zeros."""
    patch.setattr(halo, "cut", lambda plan: ())


def test_a_lost_halo_would_be_seen():
    case = Case("olmo_hybrid", "zigzag", 1, 2)
    (got,), want = (
        run_ranks(test_steps.broken_steps, 2, [(no_halo, case)])[0],
        one_process(case.kind),
    )
    assert test_steps.difference(got, want) > 1e-4
