"""Masks of models against the arguments of their layers; windows of one token.

Configurations of several models.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.comparison import Float64Mode
from parallel.transformers import shard
from parallel.transformers.configs import configs
from parallel.transformers.masks import Statement, disagreement, stated_mask
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import (
    ALTERNATE,
    EXPERTS,
    LENGTH,
    PACKED,
    SIZES,
    averaged,
    difference,
    model_of,
    one_process,
    tokens,
    transformers,
)

masking = pytest.importorskip("transformers.masking_utils")
PADDING = torch.zeros(1, dtype=torch.long)
CHUNKS = masking.chunked_causal_mask_function


def stated(function, size=None):
    """The mask of eleven tokens, as transformers asks for it."""
    return stated_mask(
        mask_function=function,
        q_length=11,
        kv_length=11,
        local_size=size,
        attention_mask=None,
        device="cpu",
    )


@pytest.mark.parametrize("size", [1, 6, 4096])
def test_a_mask_says_its_window_also_where_the_probe_is_shorter(size):
    mask = stated(masking.sliding_window_causal_mask_function(size), size)
    assert disagreement(mask, size) is None
    assert "but its attention is passed no window" in disagreement(mask, None)
    assert f"passed a window of {size + 1}" in disagreement(mask, size + 1)
    positions = torch.arange(11)
    distances = positions[:, None] - positions
    assert torch.equal(mask[0, 0], (distances >= 0) & (distances < size))


@pytest.mark.parametrize("size", [2, 4096])
def test_masks_that_are_no_window_are_seen(size):
    blocks = masking.or_masks(
        masking.causal_mask_function, masking.blockwise_overlay(torch.zeros(1, 11).long())
    )
    for mask in (
        stated(CHUNKS(size, PADDING), size),
        stated(masking.sliding_window_bidirectional_mask_function(size), size),
        stated(masking.sliding_window_causal_mask_function(size)),  # which does not say so
        stated(blocks),
        stated(masking.bidirectional_mask_function),
    ):
        assert disagreement(mask, size).startswith(
            "its mask is neither causal nor a sliding window"
        )


def test_a_causal_mask_agrees_with_no_window_alone():
    mask = stated(masking.causal_mask_function)
    assert disagreement(mask, None) is None
    assert "has no window, but its attention is passed a window of 6" in disagreement(mask, 6)
    assert disagreement(None, None) is None
    assert disagreement(None, 6).startswith("it passes a window of 6 but no mask")
    assert disagreement(mask + 1, None).startswith("it has a mask of its own")
    assert Statement(True, None).window is None


def phimoe(window):
    config = transformers.PhimoeConfig(
        **{
            **SIZES,
            **EXPERTS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": window,
        },
        experts_implementation="eager",
    )
    return transformers.PhimoeForCausalLM(config)


@pytest.mark.parametrize("window", [1, 6, 131072])
def test_a_window_that_a_model_has_in_its_mask_alone_is_refused(window):
    model = phimoe(window)
    config = model.config
    message = (
        rf"^model\.layers\.0\.self_attn cannot .*a window of {window}, .* attention is passed no"
    )
    with pytest.raises(UserError, match=message):
        shard(model)
    assert model.config is model.model.layers[0].self_attn.config is config
    shard(phimoe(None))


class Biased(torch.nn.Module):
    """Attention whose mask has a bias of its own, as for relative positions."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, attention_mask=None, **others):
        if attention_mask is not None:
            attention_mask = attention_mask.float() - 0.1 * torch.arange(attention_mask.shape[-1])
        return self.inner(hidden_states, attention_mask=attention_mask, **others)


def test_a_layer_that_adds_to_its_mask_is_refused():
    model = model_of("Llama", 2)
    model.model.layers[1].self_attn = Biased(model.model.layers[1].self_attn)
    with pytest.raises(
        UserError,
        match=r"^model\.layers\.1\.self_attn\.inner cannot be sharded: .*a mask of its own",
    ):
        shard(model)


NARROW = {"Mistral": {"sliding_window": 1}, "GptOss": {**ALTERNATE, "sliding_window": 1}}


def narrow(rank, world_size):
    """Errors with windows of one token, also beside full layers and with sinks."""
    errors = {}
    for family, others in NARROW.items():
        truth = one_process(family, 2, *tokens(LENGTH), PACKED, **others)
        for method in ("exchange", "zigzag"):
            with Float64Mode():
                model = model_of(family, 2, **others)
                cp = shard(model, dist.group.WORLD, method=method)
                batch = cp.batch(*tokens(LENGTH), documents=PACKED)
                loss = cp.loss(model(**batch.inputs), batch)
                loss.backward(
                    retain_graph=True
                )  # every parameter has a gradient, which DDP waits for
                assert all(parameter.grad is not None for parameter in model.parameters())
                errors[family, method] = difference(averaged(loss, model), truth)
    return errors


def test_a_window_of_one_token_is_that_of_one_process():
    for case, error in run_ranks(narrow, 2)[0].items():
        assert error < 1e-10, case


def test_a_window_without_a_token_is_refused_by_its_layer():
    model = model_of("Mistral", 2, sliding_window=0)
    with pytest.raises(
        UserError, match=r"^model\.layers\.0\.self_attn cannot .*layer 0, .*its window is 0 keys"
    ):
        shard(model)


def test_a_model_of_the_same_configuration_goes_on_as_it_was():
    config = model_of("Gemma3", 2).config
    kind = transformers.Gemma3ForCausalLM
    model, other = kind(config).eval(), kind(config).eval()
    ids = tokens(9)[0]
    before = other(ids).logits
    implementation = config._attn_implementation

    cp = shard(model)
    assert torch.equal(other(ids).logits, before)
    assert config._attn_implementation == implementation
    of_other = shard(other, method="zigzag")
    with cp.paused():
        model(ids)
        logits = of_other.gather(other(**of_other.batch(ids).inputs).logits)
        assert torch.allclose(logits, before, atol=1e-6)
    third = kind(config).eval()
    third(ids)
    model(**cp.batch(ids).inputs)


def test_parts_of_a_model_share_the_configuration_that_it_has_afterwards():
    model = model_of("Llama", 2)
    before = configs(model)
    shard(model)
    (after,) = configs(model)
    assert after is not before[0]
    assert after is model.config is model.model.config is model.model.layers[1].self_attn.config
    assert after.to_dict() == before[0].to_dict()


def test_a_sharded_model_is_saved_as_before(tmp_path):
    model = model_of("Llama", 2)
    model.save_pretrained(tmp_path / "before")
    shard(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (
        Path(tmp_path, name, "config.json").read_text() for name in ("before", "after")
    )
    assert before == after
