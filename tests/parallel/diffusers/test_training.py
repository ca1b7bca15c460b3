"""Training sharded transformers: checkpointing, adapters, DDP, FSDP2, clips of two sizes."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from parallel.comparison import Float64Mode
from parallel.diffusers import shard
from runtime.ranks import run_ranks
from tests.parallel.diffusers.cases import (
    CASES,
    errors,
    gradients,
    inputs_of,
    loss_of,
    model_of,
)
from tests.parallel.diffusers.video_models import wan_clip

pytest.importorskip("diffusers", reason="shards the models of diffusers")

BOUND = 1e-12
RECOMPUTED = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64Mode())}
"""Autograd computes blocks again without the mode that is set around the forward."""


def two_clips(model, inputs):
    """The loss of two forwards of different sizes, both before the backward."""
    return loss_of(model, inputs) + 0.5 * loss_of(model, wan_clip(2, 2, 4, torch.float64))


def by_the_model(model):
    """Checkpointing of diffusers."""
    model.train()
    model.enable_gradient_checkpointing(lambda block, *args: checkpoint(block, *args, **RECOMPUTED))
    return model


def by_wrappers(model):
    """Checkpointing around the blocks, as FSDP's users apply it."""
    blocks = set(getattr(model, "blocks", None) or model.transformer_blocks)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, context_fn=RECOMPUTED["context_fn"]),
        check_fn=lambda module: module in blocks,
    )
    return model


def lora(model):
    """Trained adapters on a frozen model."""
    from peft import LoraConfig

    torch.manual_seed(5)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


def fused(model):
    """Projections fused after the model was sharded: other processors."""
    model.fuse_qkv_projections()
    return model


WAYS = {
    "plain": lambda model: model,
    "checkpointed by the model": by_the_model,
    "checkpointed by wrappers": by_wrappers,
    "adapted": lora,
    "fused": fused,
}


def trained(rank, world_size):
    """Tensors over the bound by way of training; Wan with a time for each token."""
    wrong = {}
    for way, change in WAYS.items():
        with Float64Mode():
            case = CASES["wan, time per token"]
            inputs = inputs_of(case, torch.float64)
            plain = change(model_of(case, torch.float64))
            expected = gradients(two_clips(plain, inputs), plain)

            model = model_of(case, torch.float64)
            shard(model, dist.group.WORLD, method="ulysses")
            model = change(model)
            mean = gradients(two_clips(model, inputs), model, dist.group.WORLD)
        wrong[way] = errors(mean, expected, model, BOUND)
    wrong["mochi"] = mochi_errors()
    return wrong


def mochi_errors():
    """Wrapped blocks that all get a trained rotary table, which is cut in the first one."""
    with Float64Mode():
        case = CASES["mochi"]
        inputs = inputs_of(case, torch.float64)
        plain = model_of(case, torch.float64)
        expected = gradients(loss_of(plain, inputs), plain)
        model = by_wrappers(model_of(case, torch.float64))
        shard(model, dist.group.WORLD, method="ring")
        mean = gradients(loss_of(model, inputs), model, dist.group.WORLD)
    return errors(mean, expected, plain, BOUND)


def test_ways_of_training_give_the_gradients_of_one_process():
    pytest.importorskip("peft")
    assert run_ranks(trained, 2)[0] == {way: {} for way in (*WAYS, "mochi")}


def clips_of_groups(rank, world_size):
    """Two groups of two ranks, each with its own clip: DDP and FSDP2 against both clips alone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    clips = [wan_clip(3, 3, 5, torch.float64), wan_clip(2, 2, 4, torch.float64)]
    group, clip = groups[rank // 2], clips[rank // 2]
    wrong = {}
    for wrapping in ("ddp", "fsdp"):
        with Float64Mode():
            plain = model_of(CASES["wan"], torch.float64)
            model = deepcopy(plain)
            elements = sum(other["hidden_states"].numel() for other in clips)
            loss = sum(loss_of(plain, other, sum_only=True) for other in clips) / elements
            expected = gradients(loss, plain)

            cp = shard(model, group, method="ring")
            if wrapping == "ddp":
                wrapped = DistributedDataParallel(model)
            else:
                for block in model.blocks:
                    fully_shard(block)
                wrapped = fully_shard(model)
            loss_sum = loss_of(wrapped, clip, sum_only=True)
            mean = cp.loss(loss_sum, clip["hidden_states"].numel())
            mean.backward()
        computed = [mean.detach()]
        for parameter in model.parameters():
            gradient = parameter.grad
            computed.append(gradient.full_tensor() if wrapping == "fsdp" else gradient)
        wrong[wrapping] = errors(computed, expected, plain, BOUND)
    return wrong


def test_clips_of_different_sizes_weigh_by_their_elements():
    results = run_ranks(clips_of_groups, 4)
    assert results == [{"ddp": {}, "fsdp": {}}] * 4


def uses(rank, world_size):
    """Paused, copied, gathered and removed."""
    case = CASES["wan"]
    inputs = inputs_of(case)
    model = model_of(case)
    alone = loss_of(model, inputs).item()
    cp = shard(model, dist.group.WORLD, method="ulysses")
    copied = deepcopy(model)

    outputs = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    shared = loss_of(model, inputs).item()
    features = cp.gather(outputs[0])
    with cp.paused():
        paused = loss_of(model, inputs).item()
        with torch.no_grad():
            difference = (features - outputs[1]).abs().max().item()
    handle.remove()

    other_clip = wan_clip(2, 1 + rank, 4)
    only_rank_0 = loss_of(copied, other_clip).item() if rank == 0 else None
    cp.remove()
    removed = loss_of(model, inputs).item()
    shard(model, dist.group.WORLD, method="ring")
    again = loss_of(model, inputs).item()
    sent = cp.batch({"latents": torch.full((2, 3), float(rank)), "fps": 24 + rank})
    return {
        "losses": [alone, shared, paused, removed, again],
        "gathered": difference,
        "copied": only_rank_0,
        "sent": (sent["latents"].tolist(), sent["fps"]),
    }


def test_a_model_is_paused_copied_and_made_plain_again():
    results = run_ranks(uses, 2)
    for result in results:
        assert result["losses"] == pytest.approx([result["losses"][0]] * 5, rel=1e-6)
        assert result["gathered"] < 1e-5
        assert result["sent"] == ([[0.0] * 3] * 2, 24)
    assert results[0]["copied"] > 0


def checked(rank, world_size):
    """The report of a right model, and of one whose ranks have other weights."""
    case = CASES["hunyuan"]
    model = model_of(case)
    cp = shard(model, dist.group.WORLD, method="ring")
    inputs = inputs_of(case)
    right = cp.check(DistributedDataParallel(model), inputs, loss_of)
    if rank == 1:
        with torch.no_grad():
            model.transformer_blocks[0].ff.net[2].weight.mul_(1.01)
    return right, cp.check(model, inputs, loss_of)


def test_a_model_is_compared_with_one_process_module_by_module():
    (right, wrong), other = run_ranks(checked, 2)
    assert (right, wrong) == other
    assert right.right, str(right)
    assert not wrong.right
    rows = {row.module for row in right.rows}
    assert {"x_embedder.proj", "transformer_blocks.0.attn.to_q", "proj_out"} <= rows
