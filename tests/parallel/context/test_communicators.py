"""Every plan through the code of a GPU, without one.

Its kernels' calls are checked, and that what all ranks post can end.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from kernels import attention, cuda
from kernels.attention import select_backend
from kernels.backends import cudnn, flash_attention
from kernels.backends.base import AttentionKernel
from kernels.backends.flash_attention import FlashAttention
from kernels.gpu import Gpu
from parallel import apply
from parallel.context import executor, make_plan
from parallel.data import shard_model
from parallel.mesh import distributed_mesh
from planner.rehearsal import fake_process_group
from tests.compositions import EVERY
from tests.kernels.cuda_calls import BACKWARD, FORWARD, CudaCalls
from tests.parallel.context.communicators import (
    GpuTransport,
    Group,
    Operation,
    Part,
    Timeline,
    hybrid,
    play,
    softmax,
    states,
    timelines,
)
from tests.parity.cases import DIFFUSION, chosen_cases, flags_of
from tools.common.cases import DIMENSIONS, Case
from train.tasks.diffusion import DiffusionTask
from train.tasks.language import LanguageTask

LENGTH = 251
CU_SEQLENS = (0, 9, 100, 101, LENGTH)
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "documents": {"documents": CU_SEQLENS},
    "window": {"documents": CU_SEQLENS, "window": (60, 0)},
}
STATES = ("lasp", "lasp2")


def methods(size):
    """Every composition of this size, and heads in stages."""
    return [*(composition.named for composition in EVERY if composition.size == size), STAGES]


STAGES = ("ulysses", {"ulysses_head_chunks": 2})


def through(plan, **shape):
    """Run a plan's ranks, check its kernels' calls, and let what they post come to an end."""
    with CudaCalls() as calls:
        posted = timelines(plan, softmax(heads=2 * plan.size, **shape))
    assert play(posted) > 0 or plan.size == 1
    return calls


def taking(kind, patch):
    """Have one of ``KINDS`` taken; return its name in a configuration."""
    patch.setattr(executor, "select_backend", select_backend.__wrapped__)
    if (
        kind == "auto on Hopper"
    ):  # cuDNN, but for the shapes that it does not take, and for documents
        for module in (attention, cudnn):
            patch.setattr(module, "gpu", lambda: Gpu((9, 0), 92000))
    patch.setattr(FlashAttention, "problem", lambda backend: None)
    patch.setattr(
        flash_attention, "put", lambda impl: None
    )  # versions differ behind the same operators
    return kind.partition(" ")[0]


KINDS = ("aten", "auto on Hopper", "flash_attn_3")


@pytest.mark.parametrize(
    ("size", "each"),
    [(2, 1), (3, 1), (4, 1), (6, 1), (8, 4), pytest.param(8, 1, marks=pytest.mark.slow)],
)
def test_every_method_asks_kernels_for_what_they_take_and_ends(size, each):
    """With every option and mask, or one in ``each`` of these pairs."""
    calls = Counter[str]()
    for i, (method, options) in enumerate(methods(size)):
        for j, masked in list(enumerate(MASKS.values()))[-i % each :: each]:
            moves = ("kv", "queries")[(i + size) % 2]
            plan = make_plan(method, seq_len=LENGTH, size=size, backward=moves, **options, **masked)
            width, kv_heads = ((64, size), (100, 1), (256, 2 * size))[(i + j) % 3]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    cuda, "SMALL", (1 << 20, 0)[(i // 2 + j) % 2]
                )  # all tiles in shared launches, or none
                backend = taking(KINDS[(i + 2 * j + size) % 3], patch)
                calls += through(plan, backend=backend, kv_heads=kv_heads, width=width).calls
    assert size != 4 or {*FORWARD, *BACKWARD} == {*calls}


@pytest.mark.parametrize("method", STATES)
def test_states_travel_to_their_end(method):
    for size, cu_seqlens in ((2, None), (4, (0, 64, 100, 256))):  # one ends between two ranks
        assert (
            play(timelines(make_plan(method, seq_len=256, size=size, documents=cu_seqlens), states))
            > 0
        )


HYBRIDS = (
    ("lasp", "zigzag", {}),
    ("lasp2", "striped", {"documents": CU_SEQLENS}),
    ("lasp", "ulysses", {"layout": "zigzag"}),
    ("lasp", "exchange", {"documents": CU_SEQLENS}),
)


def mixed(state, method, masked, size):
    """The timelines of a hybrid's ranks, whose layers have these two methods."""
    inside = make_plan(method, seq_len=LENGTH, size=size, **masked)
    outside = make_plan(
        state,
        seq_len=LENGTH,
        size=size,
        multiple=inside.local_len,
        documents=masked.get("documents"),
    )
    return timelines(inside, hybrid(outside))


@pytest.mark.parametrize(("state", "method", "masked"), HYBRIDS)
def test_tokens_go_from_one_layout_to_the_other_and_back(state, method, masked):
    for size in (2, 3, 4):
        assert play(mixed(state, method, masked, size)) > 0


def with_layout(change, kernel):
    """A kernel's call that lays out its tensors in another way."""

    def called(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash_attention, "heads_first", change)
            return kernel(*args)

    return called


def wrong_kernels():
    """Backends each of which gets one thing wrong that shape functions take.

    The width that shows it stands beside each.
    """
    forward, backward, plain = (
        flash_attention.flash_forward,
        flash_attention.flash_backward,
        flash_attention.heads_first,
    )
    as_given = with_layout(lambda *some: [x.transpose(1, 2) for x in some], forward)
    turned = with_layout(
        lambda *some: [x if x.ndim == 3 else plain(x)[0] for x in some], backward
    )  # all but lse
    return {
        "heads of 100 are not padded": (100, AttentionKernel("", forward, backward)),
        "channels of q have stride 8": (64, AttentionKernel("", as_given, backward)),
        r"lse is torch.float32 \(2, 63, 8\)": (64, AttentionKernel("", forward, turned)),
    }


@pytest.mark.parametrize("words", wrong_kernels())
def test_what_a_kernel_would_refuse_is_seen(words, monkeypatch):
    plan, (width, backend) = make_plan("ring", seq_len=LENGTH, size=4), wrong_kernels()[words]
    for small in (0, 1 << 20):  # each tile alone, and in shared launches
        monkeypatch.setattr(cuda, "SMALL", small)
        through(plan, width=width, strided=True)
    monkeypatch.setattr(executor, "select_backend", lambda *_: backend)
    with pytest.raises(AssertionError, match=words):
        through(plan, width=width, strided=True)


def lost(posted, what, rank):
    """All that ranks post without the first part of a kind that one of them posts."""
    timeline = list(posted[rank])
    number = next(
        i
        for i, (operation, _) in enumerate(timeline)
        if any(part.what == what for part in operation.parts)
    )
    operation, index = timeline[number]
    first = next(part for part in operation.parts if part.what == what)
    timeline[number] = (
        operation._replace(parts=tuple(part for part in operation.parts if part is not first)),
        index,
    )
    return [*posted[:rank], timeline, *posted[rank + 1 :]]


def packed(method, width=64):
    return timelines(
        make_plan(method, seq_len=LENGTH, size=4, documents=CU_SEQLENS), softmax(width=width)
    )


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (lambda: packed("zigzag"), lambda: packed("zigzag", width=32)),
        (lambda: packed("exchange"), lambda: packed("exchange", width=32)),
        (lambda: mixed("lasp", "zigzag", {}, 4), lambda: mixed("lasp", "striped", {}, 4)),
    ],
    ids=["zigzag", "exchange", "hybrid"],
)
def test_a_message_that_is_lost_or_of_another_size_or_layout_is_found(right, wrong):
    posted = right()
    play(posted)
    others = wrong()
    for broken in (
        lost(posted, "send", 1),
        lost(posted, "receive", 1),
        [*posted[:2], others[2], posted[3]],
    ):
        with pytest.raises(AssertionError, match=r"wait for ever: rank \d in Operation"):
            play(broken)


def test_messages_of_some_alone_on_a_group_that_nobody_connected_are_found(monkeypatch):
    monkeypatch.setattr(GpuTransport, "connect_all", lambda *_: None)
    plan = make_plan(
        "lasp", seq_len=256, size=4, documents=(0, 64, 256)
    )  # rank 0 has nobody to send to
    with pytest.raises(AssertionError, match=r"not connected: only \[1, 2, 3\]"):
        play(timelines(plan, states))


def waiting(*groups):
    """Gather on each group, one after the other, waiting for each."""
    operations = []
    for group in groups:
        operation = Operation(group, (Part("all_gather", None, 4),))
        operations += [
            (operation, len(operations)),
            (operation._replace(waits=True), len(operations)),
        ]
    return operations


def test_a_circle_of_ranks_that_wait_is_found():
    first, other = Group((0, 1), 0), Group((0, 1), 1)
    assert play([waiting(first, other), waiting(first, other)]) == 4
    with pytest.raises(AssertionError, match="2 wait for ever"):
        play([waiting(first, other), waiting(other, first)])
    # a communicator's own order: messages there and back in two operations, which only one would
    # let pass
    sending, back = (
        Operation(first, (Part("send", 1, 4),)),
        Operation(first, (Part("receive", 1, 4),)),
    )
    mirrored = Operation(first, (Part("send", 0, 4),)), Operation(first, (Part("receive", 0, 4),))
    assert play([[(sending, 0), (back, 1)], [(mirrored[1], 0), (mirrored[0], 1)]]) == 4
    with pytest.raises(AssertionError, match="wait for ever"):
        play([[(sending, 0), (back, 1)], [(mirrored[0], 0), (mirrored[1], 1)]])
    apart = back._replace(group=other), mirrored[1]._replace(group=first)
    assert (
        play(
            [[(sending, 0), (apart[0], 1)], [(mirrored[0]._replace(group=other), 0), (apart[1], 1)]]
        )
        == 4
    )


def sharded(part, *args, **named):
    """Shard a part whose layers have one parameter each.

    To split all of them takes most of the time.
    """
    for layer in part.layers:
        for name, _ in [*layer.named_parameters()][1:]:
            path, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(path), attribute, None)
    shard_model(part, *args, **named)


def groups_of(kind, case):
    """Per rank of a mesh, how many groups torch has counted, and those that it is in.

    The latter are in the order they were made.

    A stage has one layer of few parameters, without values: they bring no groups of their own.
    """
    task_class = DiffusionTask if kind == DIFFUSION else LanguageTask
    layers = str(sum(case.layers) or case.pp * case.virtual)
    config = task_class.parse_args([*flags_of(kind, case, Path("none")), "--num-layers", layers])
    counts, group_timelines = [], list[Timeline]()
    for rank in range(case.ranks):
        with (
            fake_process_group(rank, case.ranks, 8),
            distributed_mesh(config.mesh) as mesh,
            patch.object(apply, "shard_model", sharded),
            patch.object(apply, "init_parameters"),
        ):
            task = task_class(config, mesh)
            task.build_runner(task.build_parts())
            world = dist.distributed_c10d._world
            counts.append(world.group_count)
            names = {
                group: name
                for group, name in world.pg_names.items()
                if group is not dist.group.WORLD
            }
            members = [
                Group(tuple(sorted(world.pg_group_ranks[group])), name)
                for group, name in names.items()
            ]
            group_timelines.append(waiting(*members))
    return counts, group_timelines


LISTS = [(kind, chosen_cases(kind)) for kind in ("llama", "transnormer", DIFFUSION)]


def all_cases():
    """Each case; large ones are slow, and those that make no group of their own.

    They differ from one before in schedules, chunks or ZeRO stages alone.

    Of 8 ranks, products of three dimensions alone are not slow.
    """
    params, covered = [], set[tuple[str, Case]]()
    for kind, case in ((kind, case) for kind, cases in LISTS for case in cases):
        mode = "ddp" if "ddp" in case.mode else "zero3"
        like = replace(
            case, mode=mode, schedule="1F1B", virtual=1, layers=(), loss_chunk=0, joined=0, chunks=1
        )
        dimensions = sum(getattr(case, name) > 1 for name in DIMENSIONS)
        slow = (kind, like) in covered or (case.ranks == 8 and (kind != "llama" or dimensions < 3))
        params.append(pytest.param(kind, case, marks=pytest.mark.slow if slow else ()))
        covered.add((kind, like))
    return params


@pytest.mark.parametrize(
    ("kind", "case"),
    all_cases(),
    ids=lambda list_item: list_item.title if isinstance(list_item, Case) else list_item,
)
def test_all_ranks_make_the_same_groups_in_an_order_that_ends(kind, case):
    """torch names a group by how many there were, or by its ranks.

    A name that differs is a rank alone at its door.
    """
    counts, case_timelines = groups_of(kind, case)
    assert len({*counts}) == 1
    assert play(case_timelines) > 0 or case.ranks == 1
