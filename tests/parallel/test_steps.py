"""A step of models with linear attention, of hybrids, and of those with windows and sinks.

It is over ranks of any dimension.

It is that of one process. In a hybrid, layers of softmax attention go by another method and layout.
And what is sent.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from kernels.loss import cross_entropy_sum
from model.parts.attention import Attention, HybridAttention, linear, sdpa
from parallel.context import Traffic, context_parallel
from parallel.context.config import HybridConfig
from parallel.context.linear import inside, state
from parallel.context.transport import HeadExchange, Transport
from parallel.data import DataParallelConfig, Strategy
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig
from parallel.tensor import styles as tensor_styles
from runtime.ranks import run_ranks
from tests.parallel.split import (
    GRADIENT,
    LOSS,
    VOCABULARY,
    check_step,
    config,
    difference,
    mesh_config,
    plain,
    split_step,
    whole_step,
)
from tests.parallel.tiny import gradients_of

LINEAR = ("transnormer", "linear_transformer")
WINDOWED = ("windowed", "off-by-one")
WINDOW = {"window_size": "5,0", "window_attn_skip_freq": "2", "softmax_type": "learnable"}
HYBRID = {
    "model_type": "transnormer",
    "num_query_groups": None,
    "num_layers": 3,
    "softmax_every": 2,
}
LOCAL = {
    "num_layers": 3,
    "window_size": "5,0",
    "window_attn_skip_freq": "[1,0,1]",
    "rotary_base_local": 90.0,
}
TRAINED = {"rope_scaling_original_max_position_embeddings": 8}
MODELS = {
    **{kind: config(model_type=kind, num_query_groups=None) for kind in LINEAR},
    "hybrid": config(**HYBRID),
    "windowed": config(num_layers=3, **WINDOW),
    "off-by-one": config(
        model_type="gpt", max_position_embeddings=17, window_size="5,0", softmax_type="off-by-one"
    ),
    "gemma3": config(True, model_type="gemma3", kv_channels=8, query_pre_attn_scalar=5, **LOCAL),
    "olmo3": config(
        model_type="olmo3", **LOCAL, rope_scaling_type="yarn", rope_scaling_factor=4.0, **TRAINED
    ),
    "windowed hybrid": config(**HYBRID, **{**WINDOW, "window_attn_skip_freq": None}),
}


class Case(NamedTuple):
    """A kind of model on a mesh, whose other ranks are data parallel."""

    kind: str
    method: str
    tp: int
    cp: int
    strategy: Strategy = "zero3"
    policy: str = "none"
    softmax: str = "ring"
    """Method of a hybrid's softmax layers."""
    layout: str = "auto"


# Every strategy with either way of passing states on, tp and Ulysses alone and with others.
CASES = {
    "2 ranks": [
        Case("transnormer", "lasp", 1, 2, policy="attention_boundary"),
        Case("linear_transformer", "lasp", 1, 2, "legacy_ddp", "full"),
        Case("linear_transformer", "lasp2", 1, 2, "zero2", "selective"),
        Case("transnormer", "ulysses", 1, 2, policy="attention_boundary"),
        Case("linear_transformer", "lasp", 2, 1, "ddp", "full"),
        Case("transnormer", "lasp", 2, 1, "zero1"),
        Case("hybrid", "lasp", 1, 2, policy="attention_boundary", layout="zigzag"),
        Case("hybrid", "lasp2", 1, 2, "zero1", "full", "allgather", "contiguous"),
        Case("hybrid", "ulysses", 1, 2, "zero2", softmax="ulysses", layout="contiguous"),
        Case("hybrid", "lasp", 2, 1, policy="selective"),
        *(Case(kind, "ulysses", 1, 2) for kind in WINDOWED),
        *(Case(kind, "ring", 1, 2, policy="selective") for kind in WINDOWED),
    ],
    "4 ranks, windows": [
        Case("windowed", "ulysses", 2, 2, policy="full"),
        Case("off-by-one", "striped", 1, 4, policy="attention_boundary"),
        Case("windowed", "allgather", 2, 2, policy="attention_boundary"),
        Case("windowed hybrid", "lasp2", 2, 2),
    ],
    "4 ranks": [
        Case("transnormer", "lasp", 1, 4, "ddp"),
        Case("linear_transformer", "lasp2", 1, 4),
        Case("transnormer", "lasp2", 1, 4, policy="full"),
        *(Case("transnormer", "lasp", 1, 2, strategy) for strategy in ("ddp", "zero1", "zero3")),
        *(
            Case("linear_transformer", "lasp2", 1, 2, strategy)
            for strategy in ("legacy_ddp", "zero2")
        ),
        *(Case(kind, "ulysses", 1, 4) for kind in LINEAR),
        *(Case(kind, "lasp", 4, 1) for kind in LINEAR),
        *(Case(kind, "lasp", 2, 2, policy="full") for kind in LINEAR),
        *(Case(kind, "lasp2", 2, 2, "zero1") for kind in LINEAR),
        *(Case(kind, "ulysses", 2, 2) for kind in LINEAR),
        *(
            Case("transnormer", "lasp", 2, 1, strategy)
            for strategy in ("zero3", "zero2", "legacy_ddp", "ddp")
        ),
        Case("linear_transformer", "lasp", 2, 1, "zero1", "selective"),
        *(Case("hybrid", "lasp", 1, 4, layout=layout) for layout in ("zigzag", "contiguous")),
        Case("hybrid", "lasp2", 1, 4, "ddp", "selective", "allgather", "zigzag"),
        Case("hybrid", "ulysses", 1, 4, softmax="ulysses"),
        Case("hybrid", "ulysses", 1, 2, "zero1", softmax="allgather", layout="zigzag"),
        Case("hybrid", "lasp2", 2, 2, policy="full", layout="zigzag"),
        Case("hybrid", "lasp", 2, 2, "ddp", "attention_boundary", "ulysses", "contiguous"),
        Case("hybrid", "lasp", 4, 1),
        *(Case(kind, "ulysses", 2, 2, policy="full") for kind in WINDOWED),
        *(Case(kind, "striped", 1, 4, policy="attention_boundary") for kind in WINDOWED),
        *(Case(kind, "allgather", 2, 2, policy="attention_boundary") for kind in WINDOWED),
    ],
}


@cache
def one_process(kind):
    model = MODELS[kind]
    attend = (
        HybridAttention(linear, sdpa)
        if model.softmax_period
        else linear
        if model.linear_attention
        else sdpa
    )
    return whole_step(model, plain(model, attend))


def steps(rank, world_size, cases):
    """The step of every case and how many states this rank sent in it to its neighbours."""
    step_records = []
    sent = []
    post = Transport.isend_irecv

    def counted(self, sends, *rest, **more):
        sent.extend(peer for peer, _ in sends)
        return post(self, sends, *rest, **more)

    Transport.isend_irecv = counted
    for case in cases:
        sent.clear()
        recompute = RecomputeConfig(recompute_granularity=case.policy)
        sharding = DataParallelConfig(data_parallel_sharding_strategy=case.strategy)
        hybrid = HybridConfig(hybrid_softmax_method=case.softmax, hybrid_softmax_layout=case.layout)
        with distributed_mesh(mesh_config(case.tp, case.cp)) as mesh:
            step = split_step(
                mesh, MODELS[case.kind], recompute, sharding, method=case.method, hybrid=hybrid
            )[1]
        step_records.append((step, len(sent)))
    return step_records


@pytest.mark.parametrize(
    "name", [*list(CASES)[:2], pytest.param("4 ranks", marks=pytest.mark.slow)]
)
def test_a_step_over_ranks_is_that_of_one_process(name):
    softmax = one_process("hybrid").gradients
    assert "layers.1.attention.wu.weight" not in softmax
    assert softmax["layers.1.attention.wk.weight"].abs().max() > 30 * GRADIENT
    for result in run_ranks(steps, int(name[0]), CASES[name]):
        for case, (got, _) in zip(CASES[name], result, strict=True):
            check_step(got, one_process(case.kind), case)


LOCAL_ROPE = ("gemma3", "olmo3")


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_with_two_ropes_and_norms_of_branches_is_that_of_one_process(ranks):
    """Relative to the largest gradient.

    Those before a norm of a branch are large where its weights are small.
    """
    tp, cp, other = (1, 3, "striped") if ranks == 3 else (2, 2, "zigzag")
    cases = [Case(kind, method, tp, cp) for kind in LOCAL_ROPE for method in ("exchange", other)]
    for result in run_ranks(steps, ranks, cases):
        for case, (got, _) in zip(cases, result, strict=True):
            want = one_process(case.kind)
            assert abs(got.loss - want.loss) < LOSS, case
            assert difference(got, want) < 2e-6 * max(
                x.abs().max().item() for x in want.gradients.values()
            ), case


PACKED = (0, 7, 8, 30, 41)
"""Documents that begin and end on any of three ranks."""


def packed_steps(rank, world_size):
    return [packed_step(rank, kind) for kind in LOCAL_ROPE]


def packed_step(rank, kind):
    """The loss and gradients of packed documents, summed over ranks.

    True stands beside them if the bytes sent are the plan's.
    """
    model_config = MODELS[kind]
    cp = context_parallel("exchange", seq_len=PACKED[-1], group=dist.group.WORLD).under(
        documents=PACKED
    )
    model = plain(model_config, cp.attend)
    tokens, positions = packed()
    cp.transport.traffic = Traffic()
    labels = cp.shard(tokens.roll(-1, 1), 1, pad_value=-100)
    loss = cross_entropy_sum(model(cp.shard(tokens, 1), cp.shard(positions, 1)), labels)[0]
    loss.backward()
    heads = {"heads": model_config.num_attention_heads, "kv_heads": model_config.query_groups}
    sent = 0
    for layer in range(model_config.num_layers):
        window = model_config.window(layer)
        plan = cp.plan if window is None else cp.plan.windowed(window)
        cost = plan.cost(rank, batch=1, element_size=4, head_dim=model_config.head_dim, **heads)
        sent += cost.forward.total + cost.backward.total
    gradients = gradients_of(model)
    for x in (loss := loss.detach(), *gradients.values()):
        dist.all_reduce(x)
    return loss.item(), gradients, cp.transport.traffic.total, sent


def packed():
    """Tokens and positions in their documents [1, T]."""
    tokens = torch.randint(VOCABULARY, (1, PACKED[-1]), generator=torch.Generator().manual_seed(7))
    return tokens, torch.cat([torch.arange(end - start) for start, end in pairwise(PACKED)])[None]


def test_packed_documents_over_three_ranks_are_each_document_alone():
    for kind, *of_ranks in zip(LOCAL_ROPE, *run_ranks(packed_steps, 3), strict=True):
        model, tokens = plain(MODELS[kind]), packed()[0]
        parts, labels = (
            [*x.split([b - a for a, b in pairwise(PACKED)], 1)]
            for x in (tokens, tokens.roll(-1, 1))
        )
        want = sum(
            cross_entropy_sum(model(part), label)[0]
            for part, label in zip(parts, labels, strict=True)
        )
        want.backward()
        expected = gradients_of(model)
        bound = 2e-6 * max(x.abs().max().item() for x in expected.values())
        for loss, gradients, sent, planned in of_ranks:
            assert abs(loss - want.item()) < 2e-6 * want.item(), kind
            assert (
                max((gradients[name] - expected[name]).abs().max().item() for name in expected)
                < bound
            ), kind
            assert sent == planned > 0


def test_a_kept_state_is_not_passed_on_again():
    """Rank 0 of 2 sends one state per layer forward.

    A policy that computes the attention again sends it again.
    """
    policies = ("none", "attention_boundary", "full", "selective")
    first, last = run_ranks(
        steps, 2, [Case("transnormer", "lasp", 1, 2, "ddp", policy) for policy in policies]
    )
    assert [count for _, count in first] == [2, 2, 4, 4]
    assert [count for _, count in last] == [2, 2, 2, 2]


def undecayed(patch):
    """A state arrives as it left."""
    patch.setattr(state, "decayed_state", lambda carried, *_: carried)


def parts_of_the_norm(patch):
    """Each rank's part reaches the sum of squares, taken for the whole."""
    patch.setattr(
        tensor_styles.SumOverRanks,
        "backward",
        staticmethod(lambda ctx, *gradients: (gradients[0], None)),
    )


def the_first_heads_decays(patch):
    """Every tensor-parallel rank takes the decays of the first heads."""
    split = tensor_styles.PerHead._apply

    def first(self, module, mesh):
        decays = getattr(module, "log_decay", None)
        module = split(self, module, mesh)
        if decays is not None:
            module.log_decay = decays[: len(decays) // mesh.size()]
        return module

    patch.setattr(tensor_styles.PerHead, "_apply", first)


def no_way_back(patch):
    """Outputs are left in the other layout."""
    patch.setattr(inside, "relayout_out", lambda _, x: x)


def sinks_of_other_heads(patch):
    """Ranks that split heads among them take each other's sinks."""
    local = HeadExchange.local_heads
    patch.setattr(HeadExchange, "local_heads", lambda self, x: local(self, x.roll(len(x) // 2)))


def sinks_one_head_off(patch):
    """Each tensor-parallel rank takes its own, in another order."""
    own_sinks = Attention.own_sinks

    def off(self, like, sinks):
        return own_sinks(self, like, sinks).roll(1)

    patch.setattr(Attention, "own_sinks", off)


def a_window_one_off(patch):
    """A query sees one key more."""
    patch.setitem(MODELS, "windowed", replace(MODELS["windowed"], window_size="6,0"))


def broken_steps(rank, world_size, faults):
    """The step of each case with its fault."""
    results = []
    for fault, case in faults:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            results.append(steps(rank, world_size, [case])[0][0])
    return results


FAULTS = {
    4: [(undecayed, Case("transnormer", "lasp", 1, 4, "ddp"))],
    2: [
        (parts_of_the_norm, Case("transnormer", "lasp", 2, 1, "ddp")),
        (the_first_heads_decays, Case("transnormer", "lasp", 2, 1, "ddp")),
        (no_way_back, Case("hybrid", "lasp", 1, 2, "ddp", layout="zigzag")),
        (sinks_of_other_heads, Case("windowed", "ulysses", 1, 2)),
        (sinks_one_head_off, Case("windowed", "zigzag", 2, 1)),
        (a_window_one_off, Case("windowed", "ulysses", 1, 2)),
        (a_window_one_off, Case("windowed", "zigzag", 1, 2)),
    ],
}


@pytest.mark.parametrize("ranks", FAULTS)
def test_what_is_wrong_in_silence_would_be_seen(ranks):
    for (fault, case), got in zip(
        FAULTS[ranks], run_ranks(broken_steps, ranks, FAULTS[ranks])[0], strict=True
    ):
        bound = (1000 if case.kind == "windowed" else 100) * GRADIENT
        assert difference(got, one_process(case.kind)) > bound, fault
