"""Uses in which something small goes wrong in silence: counts, keywords, adapters, caches."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

from parallel.comparison import Float64Mode
from parallel.diffusers import noise_like, shard
from parallel.diffusers.noise import flow_matching
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.diffusers.cases import CASES, errors, gradients, inputs_of, loss_of, model_of
from tests.parallel.diffusers.test_training import RECOMPUTED

pytest.importorskip("diffusers", reason="shards the models of diffusers")

BOUND = 1e-12


def checkpointed(model):
    model.train()
    model.enable_gradient_checkpointing(lambda block, *args: checkpoint(block, *args, **RECOMPUTED))
    return model


def lora(model, targets):
    from peft import LoraConfig

    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


def compared(name, change_inputs=None, before=None, after=None, method="ring"):
    """Tensors over the bound; ``before`` and ``after`` change the model around ``shard``."""

    def same(model):
        return model

    before, after = before or same, after or same
    with Float64Mode():
        case = CASES[name]
        inputs = inputs_of(case, torch.float64)
        if change_inputs is not None:
            inputs = change_inputs(inputs)
        plain = after(before(model_of(case, torch.float64)))
        expected = gradients(loss_of(plain, inputs), plain)
        model = before(model_of(case, torch.float64))
        shard(model, dist.group.WORLD, method=method)
        model = after(model)
        mean = gradients(loss_of(model, inputs), model, dist.group.WORLD)
    return errors(mean, expected, plain, BOUND)


def equal_masks(inputs):
    """Both samples have 5 of 7 text tokens."""
    mask = torch.zeros_like(inputs["encoder_attention_mask"])
    mask[:, :5] = 1
    return {**inputs, "encoder_attention_mask": mask}


def scaled(inputs):
    """The scale of adapters after every earlier argument, as pipelines call Flux."""
    return {**inputs, "guidance": None, "joint_attention_kwargs": {"scale": 0.5}}


def on_four(rank, world_size):
    """The first frame's tokens of HunyuanVideo lie on two ranks, and its blocks run twice."""
    return compared("hunyuan, first frame", before=checkpointed)


def on_two(rank, world_size):
    attention = ["to_q", "to_k", "to_v"]
    results = {
        "equal masks": compared("hunyuan", equal_masks),
        "scale": compared("flux", scaled, before=lambda model: lora(model, attention)),
        "adapter of the last projection": compared(
            "wan", after=lambda model: lora(model, ["proj_out", "to_q"])
        ),
        "the same before": compared("wan", before=lambda model: lora(model, ["proj_out", "to_q"])),
    }
    model = model_of(CASES["wan"])
    blocks = set(model.blocks)
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    shard(model, dist.group.WORLD, method="ring")
    references = []
    model.patch_embedding.register_forward_hook(
        lambda module, args, out: references.append(weakref.ref(out))
    )
    gc.disable()
    for _ in range(2):
        loss_of(model, inputs_of(CASES["wan"])).backward()
    results["kept"] = [reference() is not None for reference in references]
    gc.enable()
    return results


def test_a_first_frame_on_two_ranks_is_counted_once():
    assert run_ranks(on_four, 4)[0] == {}


def test_edges_equal_one_process():
    pytest.importorskip("peft")
    results = run_ranks(on_two, 2)[0]
    assert results.pop("kept") == [False, False]
    assert results == {name: {} for name in results}


def test_noise_needs_a_number_for_each_of_the_latents():
    with pytest.raises(UserError, match="noise_like got 4 latents, but 1 sample numbers"):
        noise_like(torch.zeros(4, 2), [7])
    with pytest.raises(UserError, match="1 noise levels were given for 4 latents"):
        flow_matching(torch.zeros(4, 2), torch.zeros(4, 2), torch.tensor([0.5]))
