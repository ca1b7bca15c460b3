"""Refused models: the message names the layer and the reason, and the model is left as it was."""

import pytest
import torch
from torch import nn

from parallel.context import make_plan
from parallel.transformers import shard
from parallel.transformers.configs import configs
from parallel.transformers.probe import probe
from parallel.transformers.shard import _check_settings
from runtime.errors import UserError
from tests.parallel.transformers.families import SIZES, model_of, tokens, transformers

MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "attn_layer_indices": [1],
}
CHUNKED = {
    "attn_temperature_tuning": False,
    "layer_types": ["chunked_attention"] * 3,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 9,
}
ITS_OWN = "it mixes tokens, but not through the attention"


def made(name, config=None, **others):
    """A model of SIZES by the names of its class and configuration."""
    values = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, **others}
    return getattr(transformers, name)(
        getattr(transformers, config or name.replace("ForCausalLM", "Config"))(**values)
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: made("Gemma2ForCausalLM"),
            r"^model\.layers\.0\.self_attn cannot be sharded: layer 0, .*softcap 50",
        ),
        (
            lambda: made("Llama4ForCausalLM", "Llama4TextConfig", **CHUNKED),
            (
                r"model\.layers\.0\.self_attn cannot .* chunked_attention, "
                r"but must be full attention or a sliding window"
            ),
        ),
        (
            lambda: made("Llama4ForCausalLM", "Llama4TextConfig"),
            (
                r"^Llama4TextConfig\.attn_temperature_tuning is set: "
                r"each rank would scale queries by a count of its own tokens"
            ),
        ),
        (
            lambda: made("BambaForCausalLM", **MAMBA),
            rf"^model\.layers\.0\.mamba.* cannot be sharded: {ITS_OWN}",
        ),
        (
            lambda: made("MambaForCausalLM"),
            rf"^backbone\.layers\.0\.mixer.* cannot be sharded: {ITS_OWN}",
        ),
        (
            lambda: made("RwkvForCausalLM", attention_hidden_size=24),
            rf"^rwkv\.blocks\.0.* cannot .*: {ITS_OWN}",
        ),
        (
            lambda: made("LlamaForCausalLM", attention_dropout=0.1),
            r"^LlamaConfig\.attention_dropout is 0\.1, .*; make the model with attention_dropout=0",
        ),
        (
            lambda: nn.Linear(2, 2),
            "^Linear has no get_input_embeddings; give a causal language model",
        ),
        (
            lambda: made("LlamaModel", "LlamaConfig"),
            r"^LlamaModel cannot .*: it returns no logits for 11 tokens",
        ),
        (
            lambda: made("LlamaForSequenceClassification", "LlamaConfig"),
            (
                r"^LlamaForSeq.*: it returns logits of shape \(1, 2\) for 11 tokens, "
                r".* give a causal language model"
            ),
        ),
        (
            lambda: made("MptForCausalLM", d_model=24, n_heads=4, n_layers=2),
            (
                r"^transformer.* cannot be sharded: its forward pass of 11 tokens "
                r"without a mask failed \(AttributeError: 'None"
            ),
        ),
        (
            lambda: made("StableLmForCausalLM"),
            (
                r"^model\.layers\.0\.self_attn cannot .*: "
                r"the layers around it do not pass on keyword arguments"
            ),
        ),
        (lambda: made("GPT2LMHeadModel", "GPT2Config"), r"^GPT2Config\.attn_pdrop is 0\.1"),
        (
            lambda: made("T5ForConditionalGeneration", "T5Config"),
            "T5Config.is_encoder_decoder is set",
        ),
        (
            lambda: made("LlamaForCausalLM", output_router_logits=True),
            r"^LlamaConfig\.output_router_logits is set, but LlamaForCausalLM has no router_aux",
        ),
        (
            lambda: made("LlamaForCausalLM", is_causal=False),
            "its attention is not causal|a mask that is not causal",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_layer_and_reason(model, message):
    model = model()
    before = [config._attn_implementation for config in configs(model)]
    with pytest.raises(UserError, match=message):
        shard(model)
    assert [config._attn_implementation for config in configs(model)] == before


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        (
            "Qwen3_5",
            "striped",
            r"^model\.layers\.0\.linear_attn cannot .* layout striped .* use method zigzag",
        ),
        ("Llama", "ulysses", r"^model\.layers\.0\.self_attn cannot .* heads"),
    ],
)
def test_what_the_ranks_of_a_method_cannot_do_is_refused(family, method, message):
    with pytest.raises(UserError, match=message):
        probe(sharded(family), make_plan(method, seq_len=5, size=5))
    probe(sharded(family), make_plan("zigzag", seq_len=5, size=5))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_a_ranks_own_tokens_are_refused(kind):
    factors = {
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 30,
    }
    rope = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        **(factors if kind == "longrope" else {}),
    }
    model = made("LlamaForCausalLM", rope_parameters=rope)
    with pytest.raises(
        UserError,
        match=rf"^model\.rotary_emb has rope_type {kind}, .*; use rope_type yarn or linear",
    ):
        _check_settings(model, ranks=2)
    shard(model)  # one rank has all positions


def sharded(family):
    """A model whose attention is already ours."""
    model = model_of(family, 2)
    shard(model)
    return model


class Shift(nn.Module):
    """A layer that adds a share of the token before, in code of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 0.1 * x.roll(1, 1))


def test_the_innermost_module_that_mixes_is_named():
    """Its code does so before it calls another, which is not to blame."""
    model = model_of("Llama", 2)
    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    with pytest.raises(UserError, match=rf"^model\.layers\.1\.mlp cannot be sharded: {ITS_OWN}"):
        shard(model)


class Count(nn.Module):
    """A layer that scales tokens by their numbers, in a count of its own."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.arange(x.shape[1])[None, :, None])


def test_a_layer_that_counts_its_tokens_itself_is_named():
    model = model_of("Llama", 2)
    model.model.layers[1].self_attn.q_proj = nn.Sequential(
        model.model.layers[1].self_attn.q_proj, Count()
    )
    message = (
        r"^model\.layers\.1\.self_attn cannot be sharded: "
        r"it counts its tokens itself instead of using position_ids"
    )
    with pytest.raises(UserError, match=message):
        shard(model)


def test_a_forward_without_its_batch_is_refused_and_a_paused_one_is_the_models_own():
    model = model_of("Llama", 2).eval()
    ids, _ = tokens(9)
    before = model(ids).logits
    cp = shard(model)
    with pytest.raises(
        UserError, match=r"layer 0, LlamaAttention: the model was called without its batch"
    ):
        model(ids)
    with cp.paused():
        assert torch.equal(model(ids).logits, before)
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert torch.allclose(model(**cp.batch(ids).inputs).logits, before, atol=1e-6)


def test_padding_that_is_given_to_the_model_is_refused():
    model = model_of("Llama", 2).eval()
    inputs = shard(model).batch(tokens(9)[0]).inputs
    every = torch.ones(1, 9)
    assert torch.equal(model(**inputs, attention_mask=every).logits, model(**inputs).logits)
    with pytest.raises(
        UserError,
        match=r"an attention_mask that is not all 1; give attention_mask to cp\.batch instead",
    ):
        model(**inputs, attention_mask=every.index_fill(1, torch.tensor([0]), 0))


def test_a_sharded_model_is_sharded_again_only_while_it_is_paused():
    model = model_of("Llama", 2).eval()
    before, cp = model.config._attn_implementation, shard(model)
    with pytest.raises(
        UserError, match="the model is sharded already; use the result of that call of shard"
    ):
        shard(model)
    with cp.paused():
        again = shard(model, method="zigzag")
    with again.paused():
        assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "lasp"},
            "^shard: method lasp passes states on, .* use one of ring, .* exchange$",
        ),
        ({"method": "lapse"}, "context_parallel_method 'lapse' does not exist"),
        (
            {"causal": False},
            "^shard: causal is False; leave out causal: layers that are not causal are refused",
        ),
        (
            {"documents": (0, 9)},
            r"^shard: documents is \(0, 9\); leave out documents: each batch has its own "
            "documents, which cp.batch takes",
        ),
    ],
)
def test_a_method_or_option_that_layers_cannot_have_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        shard(model_of("Llama", 2), **options)


@pytest.mark.parametrize("padding", [0, 3, "the model's entries", -1])
def test_padding_may_be_any_token_also_one_that_the_tokenizer_has_alone(padding):
    model = made("LlamaForCausalLM").double()
    entries = model.config.vocab_size
    model.config.pad_token_id = padding if isinstance(padding, int) else entries
    ids, labels = tokens(16)
    expected = model(ids, labels=labels).loss
    cp = shard(model)
    batch = cp.batch(ids, labels)
    torch.testing.assert_close(cp.loss(model(**batch.inputs), batch), expected, check_dtype=False)


def test_weights_that_are_not_there_cannot_be_tried():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(model_of("Llama", 2).config)
    with pytest.raises(UserError, match="the model is on the meta device"):
        shard(model)


def test_modes_and_hooks_are_left_as_they_were():
    model = model_of("Llama", 2)
    model.model.layers[0].eval()
    shard(model)
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
