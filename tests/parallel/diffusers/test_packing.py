"""Clips of three sizes packed into one sequence equal each clip alone: loss and every gradient."""

from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from parallel.comparison import Float64Mode
from parallel.context import Traffic
from parallel.diffusers import shard
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.diffusers.cases import (
    CASES,
    errors,
    gradients,
    inputs_of,
    loss_of_predictions,
    model_of,
)
from tests.parallel.diffusers.draws import HEADS
from tests.parallel.diffusers.video_models import wan_clip

pytest.importorskip("diffusers", reason="shards the models of diffusers")

BOUND = 1e-12
GRIDS = [(3, 3, 5), (1, 2, 2), (2, 2, 4)]
"""Frames, height and width of three clips, in tokens: 45, 4 and 16."""


def clips_of(name):
    """Three clips with their own times and texts of their own lengths."""
    clips = []
    for number, (frames, height, width) in enumerate(GRIDS):
        tokens = frames * height * width
        time = torch.tensor([100.0 + 200 * number], dtype=torch.float64)
        if name.startswith("wan"):
            clip = wan_clip(frames, height, width, torch.float64)
            clip["encoder_hidden_states"] = clip["encoder_hidden_states"][:, : 7 - number]
        else:
            batch = inputs_of(CASES[name], torch.float64)
            clip = {key: x[:1] if torch.is_tensor(x) else x for key, x in batch.items()}
            generator = torch.Generator().manual_seed(tokens)
            latents = torch.randn(1, tokens, 4, generator=generator, dtype=torch.float64)
            clip.update(hidden_states=latents, num_frames=frames, height=height, width=width)
        clip["timestep"] = time
        if name == "wan, time per token":
            clip["timestep"] = time[:, None].repeat(1, tokens)
            clip["timestep"][:, : height * width] = 0
        clips.append(clip)
    return clips


def alone(model, clips):
    return [model(**clip, return_dict=False)[0] for clip in clips]


def packed_errors(rank, world_size, cells):
    """Tensors over the bound by cell."""
    results = []
    for name, method in cells:
        with Float64Mode():
            model = model_of(CASES[name], torch.float64)
            clips = clips_of(name)
            expected = gradients(loss_of_predictions(alone(model, clips)), model)
            cp = shard(model, dist.group.WORLD, method=method)
            loss = loss_of_predictions(cp.packed(clips))
            mean = gradients(loss, model, dist.group.WORLD)
        results.append(errors(mean, expected, model, BOUND))
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_packed_clips_equal_each_alone(world_size):
    names = ("wan", "wan, time per token", "ltx")
    cells = list(product(names, ("exchange", "ring")))
    assert run_ranks(packed_errors, world_size, cells)[0] == [{}] * len(cells)


def trained(rank, world_size):
    """Checkpointing, DDP and FSDP2 around packed clips; and bytes sent beside the plan's."""
    wrong = {}
    clips = clips_of("wan")
    for way in ("checkpointed", "ddp", "fsdp"):
        with Float64Mode():
            plain = model_of(CASES["wan"], torch.float64)
            model = deepcopy(plain)
            expected = gradients(loss_of_predictions(alone(plain, clips)), plain)
            cp = shard(model, dist.group.WORLD, method="exchange")
            wrapped = model
            if way == "checkpointed":
                model.train()
                model.enable_gradient_checkpointing(checkpoint_in_float64)
            elif way == "ddp":
                wrapped = DistributedDataParallel(model)
            else:
                for block in model.blocks:
                    fully_shard(block)
                fully_shard(model)
            loss = loss_of_predictions(cp.packed(clips, wrapped))
            loss.backward()
        computed = [loss.detach()]
        for parameter in model.parameters():
            gradient = parameter.grad
            if way == "fsdp":
                gradient = gradient.full_tensor()
            elif way == "checkpointed":
                dist.all_reduce(gradient)
                gradient = gradient / world_size
            computed.append(gradient)
        wrong[way] = errors(computed, expected, plain, BOUND)
    return wrong


def checkpoint_in_float64(block, *args):
    return checkpoint(
        block, *args, use_reentrant=False, context_fn=lambda: (Float64Mode(), Float64Mode())
    )


def test_packed_clips_are_trained_as_others():
    assert run_ranks(trained, 2)[0] == {"checkpointed": {}, "ddp": {}, "fsdp": {}}


def bytes_sent(rank, world_size):
    """Bytes of a packed step's attention, and those that the plan has."""
    model = model_of(CASES["wan"])
    cp = shard(model, dist.group.WORLD, method="exchange")
    clips = clips_of("wan")
    for clip in clips:
        clip.update({key: x.float() for key, x in clip.items()})
    cp.packed(clips)
    context = cp._hooks.last_split.context
    context.transport.traffic = Traffic()
    loss_of_predictions(cp.packed(clips)).backward()

    shape = {"batch": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": 12, "element_size": 4}
    cost = context.plan.cost(rank, **shape)
    planned = len(model.blocks) * (cost.forward.total + cost.backward.total)
    return context.transport.traffic.total, planned


def test_bytes_are_those_of_the_plan():
    for sent, planned in run_ranks(bytes_sent, 3):
        assert sent == planned


def test_clips_that_cannot_be_packed_are_refused():
    model = model_of(CASES["wan"])
    cp = shard(model)
    with pytest.raises(UserError, match="has a batch of 2; give each clip as a batch of 1"):
        cp.packed([inputs_of(CASES["wan"])])
    image = {**wan_clip(1, 2, 2), "encoder_hidden_states_image": torch.randn(1, 6, 10)}
    with pytest.raises(UserError, match="encoder_hidden_states_image cannot be packed"):
        cp.packed([image])
    flux = model_of(CASES["flux"])
    with pytest.raises(UserError, match="has one modulation for all tokens"):
        shard(flux).packed([inputs_of(CASES["flux"])])
    unpacked = alone(model, [wan_clip(1, 2, 2)])[0]  # the model is in order after refusals
    assert torch.equal(cp.packed([wan_clip(1, 2, 2)])[0], unpacked)
