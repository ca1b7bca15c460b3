"""Messages of a pipeline's ranks in two steps and an evaluation can all end.

They join what belongs together.
"""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

from parallel.pipeline.schedule import PipelineRunner, _Stage
from planner.rehearsal import fake_process_group
from tests.parallel.context.communicators import Group, Noted, Part, play
from tests.parallel.pipeline.test_schedule import SCHEDULES

Purpose = tuple[str, int, int]
"""The direction of a message, the stage that takes it, and its micro-batch."""
PIPELINES = [config for name, (config, _) in SCHEDULES.items() if name != "uneven"]
MESSAGES = {
    "fwd_recv": ("forward", 0),
    "fwd_send": ("forward", 1),
    "bwd_recv": ("back", 0),
    "bwd_send": ("back", -1),
}
"""Their direction, and the stage that takes them from the one that posts them."""
VERSION = TorchVersion(torch.__version__)
VOTES = 0 if VERSION >= "2.14" else 4 if VERSION >= "2.12" else 2
"""Messages between two stages before the first step and before the evaluation, by torch's version.
"""


class Links(Noted):
    """The messages of torch's schedules and ours.

    One that is posted alone has a communicator of its two ranks.
    """

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.group = rank, Group(tuple(range(size)), 0)

    def alone(self, what, tensor, peer):
        return self.post(
            Group((min(self.rank, peer), max(self.rank, peer)), 0), part(what, tensor, peer)
        )

    def isend(self, x, dst=None, group=None, tag=0, group_dst=0):
        return self.alone("send", x, group_dst if dst is None else dst)

    def irecv(self, x, src=None, group=None, tag=0, group_src=0):
        if x.dtype == torch.int32:
            x.fill_(1)  # the stages' vote that shapes are known
        return self.alone("receive", x, group_src if src is None else src)

    def all_reduce(self, x, group):
        super().all_reduce(x, self.group)

    def batch_isend_irecv(self, operations):
        parts = (
            part(
                "send" if operation.op == self.isend else "receive",
                operation.tensor,
                operation.group_peer,
            )
            for operation in operations
        )
        return [self.post(self.group, *parts)]


def part(what, tensor, peer):
    """A message, told from others of its size by its purpose."""
    return Part(what, peer, getattr(tensor, "purpose", tensor.nbytes))


class GpuRunner(PipelineRunner):
    """A runner that connects its group as on a GPU."""

    def _connect(self, device):
        with patch.object(torch, "zeros", lambda *size, device: torch.empty(*size, device="meta")):
            super()._connect(torch.device("cuda"))


def purposeful(name):
    """Let a stage's messages know their purpose."""
    method, (direction, ahead) = getattr(_Stage, f"get_{name}_ops"), MESSAGES[name]

    def noted(self, chunk):
        operations = method(self, chunk)
        for operation in operations:
            operation.tensor.purpose = (direction, self.stage_index + ahead, chunk)
        return operations

    return patch.object(_Stage, f"get_{name}_ops", noted)


def computed(part, batch):
    out = batch["x"] * torch.stack([*part.values()]).prod(0)
    return out.sum() if "last" in part else out


def timeline(rank, size, config, micro_batches, tied):
    """The operations of a rank.

    The first and the last stage share a weight if ``tied``. No step makes a group.
    """
    links, last = Links(rank, size), config.stages(size) - 1
    posts = {
        name: getattr(links, name) for name in ("isend", "irecv", "batch_isend_irecv", "all_reduce")
    }
    names = [
        ["last" if s == last else "first", *["shared"] * (tied and s in (0, last))]
        for s in config.stages_of(rank, size)
    ]
    like = torch.empty(2, 4, device="meta")
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(rank, size, 8))
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
        for context in (
            *(patch.multiple(module, **posts) for module in (dist, dist.distributed_c10d)),
            *map(purposeful, MESSAGES),
        ):
            stack.enter_context(context)
        runner = GpuRunner(
            [
                nn.ParameterDict({name: torch.ones(4) for name in stage_names})
                for stage_names in names
            ],
            computed,
            "ddp",
            config=config,
            mesh=mesh,
            device=torch.device("cpu"),
            micro_batches=micro_batches,
            first_input=("x", like),
            hidden=like,
            tied={"shared": (0, last)} if tied else None,
        )
        batches = [{"x": torch.ones(2, 4)} for _ in range(micro_batches)]
        groups = dist.distributed_c10d._world.group_count
        for _ in range(2):
            runner.forward_backward(batches, 1)
        runner.forward(batches)
        assert dist.distributed_c10d._world.group_count == groups
    return links.operations


def posted(size, config, micro_batches, tied):
    return [timeline(rank, size, config, micro_batches, tied) for rank in range(size)]


@pytest.mark.parametrize("config", PIPELINES, ids=lambda config: config.pipeline_schedule)
def test_every_schedule_ends(config):
    for size, rounds, tied in (
        (2, 1, False),
        (2, 2, True),
        (3, 2, False),
        (3, 1, True),
        (4, 2, False),
        (4, 1, True),
    ):
        messages = (5 * rounds * size + VOTES) * (config.stages(size) - 1) + 4 * tied
        assert play(posted(size, config, rounds * size, tied)) == size + 2 * messages


def changed(timeline, purpose, instead):
    """Post another message in the place of one, or none."""
    operations = []
    for operation, index in timeline:
        parts_kept = [
            message_part
            for message_part in operation.parts
            if instead or message_part.size != purpose
        ]
        parts = tuple(
            message_part._replace(size=instead) if message_part.size == purpose else message_part
            for message_part in parts_kept
        )
        operations.append((operation._replace(parts=parts), index))
    assert operations != timeline
    return operations


@pytest.mark.parametrize("config", PIPELINES, ids=lambda config: config.pipeline_schedule)
def test_a_message_that_is_lost_or_in_the_place_of_another_is_found(config):
    timelines = posted(3, config, 6, tied=True)
    play(timelines)
    for rank, purpose, other in (
        (0, ("forward", 1, 2), ("forward", 1, 3)),
        (1, ("back", 1, 1), ("back", 1, 2)),
    ):
        for instead in (None, other):
            broken = [
                changed(rank_timeline, purpose, instead) if rank == changed_rank else rank_timeline
                for changed_rank, rank_timeline in enumerate(timelines)
            ]
            with pytest.raises(AssertionError, match=r"wait for ever: rank \d in Operation"):
                play(broken)


@pytest.mark.skipif(VOTES == 2, reason="before 2.12 torch's own first operation is of all ranks")
def test_a_group_in_which_only_two_of_three_send_must_be_connected(monkeypatch):
    monkeypatch.setattr(GpuRunner, "_connect", lambda *_: None)
    with pytest.raises(AssertionError, match=r"not connected: only \[0, 2\]"):
        play(posted(3, SCHEDULES["GPipe"][0], 3, tied=True))
