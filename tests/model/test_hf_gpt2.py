import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from model.config import ModelConfig
from model.gpt import GPT
from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf

transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's GPT-2")

TIED = ModelConfig(
    model_type="gpt",
    num_layers=2,
    hidden_size=48,
    num_attention_heads=6,
    vocab_size=61,
    position_embedding_type="learned_absolute",
    max_position_embeddings=50,
    norm_epsilon=1e-6,
    init_method_std=0.2,  # ten times the usual, so that softmax and logits are far from flat
    untie_embeddings_and_output_weights=False,
)
CONFIGS = {
    "tied": TIED,
    "untied": dataclasses.replace(TIED, untie_embeddings_and_output_weights=True),
    "narrow feed-forward": dataclasses.replace(TIED, ffn_hidden_size=80),
}
TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def hugging_face(config, dtype=torch.float32):
    """Random weights, biases included."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_to_hf(config), attn_implementation="sdpa"))
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.5 * torch.rand(parameter.shape)
    return theirs.to(dtype)


def ours(theirs, config, dtype=torch.float32):
    model = GPT(config).to(dtype)
    model.load_state_dict(from_hf(theirs.state_dict(), config))
    return model


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_logits_and_gradients_equal_hugging_faces(config, dtype, bound):
    theirs = hugging_face(config, dtype)
    model = ours(theirs, config, dtype)
    expected, got = theirs(TOKENS).logits, model(TOKENS)
    assert expected.std() > 0.5
    assert (got - expected).abs().max() < bound

    for logits in (expected, got):
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1).flatten()).backward()
    wanted = from_hf({name: p.grad for name, p in theirs.named_parameters()}, config)
    for name, parameter in model.named_parameters():
        if name.endswith("wk.bias"):  # softmax takes no notice of it: zero, and noise in both
            assert max(parameter.grad.abs().max(), wanted[name].abs().max()) < bound, name
        else:
            assert (parameter.grad - wanted[name]).norm() < bound * wanted[name].norm(), name


@pytest.mark.parametrize("breakage", [{"norm_epsilon": 1e-3}, {"num_attention_heads": 12}])
def test_bound_sees_a_wrong_configuration(breakage):
    """Negative control: weights of the same shapes in a model that computes something else."""
    theirs = hugging_face(TIED)
    model = ours(theirs, dataclasses.replace(TIED, **breakage))
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3


def test_bound_sees_a_square_matrix_that_is_not_transposed():
    theirs = hugging_face(TIED)
    model = ours(theirs, TIED)
    with torch.no_grad():
        model.layers[0].attention.wo.weight.copy_(model.layers[0].attention.wo.weight.T.clone())
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3


def test_round_trip(config):
    theirs = hugging_face(config).state_dict()
    back = to_hf(from_hf(theirs, config), config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    full = config_from_hf(config_to_hf(config))
    assert (full, full.ffn_size) == (dataclasses.replace(config, ffn_hidden_size=config.ffn_size), config.ffn_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_is_saved(tmp_path, config, dtype):
    model = ours(hugging_face(config), config).to(dtype)
    save_hf(tmp_path / "out", config, model.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert isinstance(theirs, transformers.GPT2LMHeadModel)
    assert theirs.dtype == dtype
    expected = theirs(TOKENS).logits
    bound = 1e-5 if dtype == torch.float32 else 0.05
    assert (expected - model(TOKENS)).norm() < bound * expected.norm()
    loaded, state = load_hf(tmp_path / "out")
    assert loaded == config_from_hf(config_to_hf(config))
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())


def test_reads_what_transformers_wrote_in_shards_and_of_the_bare_model(tmp_path):
    theirs = hugging_face(TIED)
    expected = from_hf(theirs.state_dict(), TIED)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    theirs.save_pretrained(tmp_path / "bare")
    # As the hub's "gpt2" is stored: without the prefix, with the mask.
    weights = tmp_path / "bare" / "model.safetensors"
    bare = {name.removeprefix("transformer."): weight for name, weight in load_file(weights).items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 50, 50).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare, weights)
    for folder in ("shards", "bare"):
        config, state = load_hf(tmp_path / folder)
        assert config.max_position_embeddings == 50
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "relu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
        {"quantization_config": {"quant_method": "gptq"}},
        {"model_type": "gpt_neox"},
    ],
)
def test_unsupported_configurations_are_refused(change):
    with pytest.raises(ValueError, match=r"config\.json: \w+ = .* is not supported"):
        config_from_hf(config_to_hf(TIED) | change)


def test_published_configurations_are_read():
    """The hub's GPT-2 names dropout, and leaves n_inner and what was added later out."""
    hub = {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    config = config_from_hf(hub)
    assert (config.ffn_size, config.max_position_embeddings, config.norm_epsilon) == (3072, 1024, 1e-5)
    assert not config.untie_embeddings_and_output_weights
    del hub["n_positions"]
    with pytest.raises(ValueError, match="n_positions is missing; this is no gpt2's configuration"):
        config_from_hf(hub)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "rope", "max_position_embeddings": None}, "position_embedding_type is rope"),
        ({"num_query_groups": 2}, "num_query_groups is 2"),
        ({"kv_channels": 10}, "kv_channels is 10"),
    ],
)
def test_a_gpt_that_theirs_cannot_be_is_not_written(tmp_path, change, words):
    config = dataclasses.replace(TIED, **change)
    for write in (
        lambda: config_to_hf(config),
        lambda: to_hf(GPT(config).state_dict(), config),
        lambda: save_hf(tmp_path / "out", config, GPT(config).state_dict()),
    ):
        with pytest.raises(ValueError, match=f"^{words}, which Hugging Face's GPT-2 does not have; only"):
            write()
    assert not (tmp_path / "out").exists()


def test_the_table_of_positions_has_one_length(tmp_path):
    assert config_to_hf(TIED, 50)["n_positions"] == 50
    with pytest.raises(ValueError, match="max_position_embeddings is 60 and the model's table of positions has 50"):
        save_hf(tmp_path / "out", TIED, GPT(TIED).state_dict(), max_position_embeddings=60)
    assert not (tmp_path / "out").exists()


def test_state_dicts_that_do_not_fit():
    state = hugging_face(TIED).state_dict()
    with pytest.raises(ValueError, match=r"lacks transformer\.h\.1\.attn\.c_attn\.bias"):
        from_hf({name: w for name, w in state.items() if name != "transformer.h.1.attn.c_attn.bias"}, TIED)
    with pytest.raises(ValueError, match=r"unknown transformer\.h\.0\.crossattention\.q_attn\.weight"):
        from_hf(state | {"transformer.h.0.crossattention.q_attn.weight": torch.zeros(48, 48)}, TIED)
    with pytest.raises(ValueError, match=r"c_fc\.weight has shape \(48, 192\); .* \(48, 80\)"):
        from_hf(state, CONFIGS["narrow feed-forward"])
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        from_hf(state | {"lm_head.weight": torch.zeros(61, 48)}, TIED)
    with pytest.raises(ValueError, match=r"lacks lm_head"):
        from_hf({name: w for name, w in state.items() if name != "lm_head.weight"}, CONFIGS["untied"])
