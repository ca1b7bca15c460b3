import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from model.config import ModelConfig
from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf
from model.llama import Llama

transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's LLaMA")

GQA = ModelConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_query_groups=2,
    vocab_size=61,
    rotary_base=5000.0,
    norm_epsilon=1e-6,
    init_method_std=0.2,  # ten times the usual, so that softmax and logits are far from flat
)
CONFIGS = {
    "gqa": GQA,
    "mha": dataclasses.replace(GQA, num_query_groups=6),
    "tied": dataclasses.replace(GQA, untie_embeddings_and_output_weights=False),
    "wide heads": dataclasses.replace(GQA, kv_channels=14),
}
TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


class ExactRotary(nn.Module):
    """Hugging Face's rotary embedding with float64 angles."""

    def __init__(self, config):
        super().__init__()
        self.frequencies = config.rotary_base ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.frequencies.repeat(2)
        return angles.cos(), angles.sin()


def hugging_face(config, dtype=torch.float32):
    """Random weights; in float64 with the two float32 islands of the original (norms, angles) widened as well."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config_to_hf(config), attn_implementation="sdpa")
    ).to(dtype)
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    if dtype == torch.float64:
        theirs.model.rotary_emb = ExactRotary(config)
        for name, module in list(theirs.named_modules()):
            if "norm" in name:
                exact = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)
                exact.weight = module.weight
                theirs.set_submodule(name, exact)
    return theirs


def ours(theirs, config, dtype=torch.float32):
    model = Llama(config).to(dtype)
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
        assert (parameter.grad - wanted[name]).norm() < bound * wanted[name].norm(), name


@pytest.mark.parametrize(
    "breakage",
    [
        {"rotary_base": 5500.0},
        {"norm_epsilon": 1e-3},
        {"num_attention_heads": 12, "num_query_groups": 4, "kv_channels": 4},
    ],
)
def test_bound_sees_a_wrong_configuration(breakage):
    """Negative control: weights of the same shapes in a model that computes something else."""
    theirs = hugging_face(GQA)
    model = ours(theirs, dataclasses.replace(GQA, **breakage))
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3


def test_round_trip(config):
    theirs = hugging_face(config).state_dict()
    back = to_hf(from_hf(theirs, config), config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    full = config_from_hf(config_to_hf(config))
    assert (full.head_dim, full.query_groups) == (config.head_dim, config.query_groups)
    assert config_from_hf(config_to_hf(full)) == full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_is_saved(tmp_path, config, dtype):
    model = Llama(config)
    model.init_weights(3)
    model.to(dtype)
    save_hf(tmp_path / "out", config, model.state_dict(), max_position_embeddings=4096)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == dtype
    assert theirs.config.max_position_embeddings == 4096
    expected = theirs(TOKENS).logits
    bound = 1e-5 if dtype == torch.float32 else 0.05
    assert (expected - model(TOKENS)).norm() < bound * expected.norm()
    loaded, state = load_hf(tmp_path / "out")
    assert loaded == config_from_hf(config_to_hf(config))
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    with pytest.raises(ValueError, match="exists"):
        save_hf(tmp_path / "out", config, model.state_dict())


@pytest.fixture
def sharded(tmp_path):
    """A folder as transformers writes it, in several shards."""
    hugging_face(GQA).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_reads_shards_that_transformers_wrote(sharded):
    config, state = load_hf(sharded)
    expected = from_hf(hugging_face(GQA).state_dict(), GQA)
    assert config_from_hf(config_to_hf(config)) == config
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "escape", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "model.bin"]
)
def test_an_index_cannot_leave_its_folder(sharded, escape):
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=names | {"lm_head.weight": escape})
    with pytest.raises(ValueError, match="no safetensors file directly in this folder"):
        load_hf(sharded)


def test_broken_folders(sharded):
    with pytest.raises(ValueError, match=r"nowhere/config\.json does not exist"):
        load_hf(sharded / "nowhere")
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shard = sharded / names["lm_head.weight"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=f"{shard.name} is not a whole safetensors file"):
        load_hf(sharded)
    save_file({name: w for name, w in _load(whole, sharded).items() if name != "lm_head.weight"}, shard)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_hf(sharded)
    shard.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        load_hf(sharded)
    index.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_hf(sharded)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match="weight_map"):
        load_hf(sharded)


def _load(contents, folder):
    path = folder / "copy"
    path.write_bytes(contents)
    return load_file(path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_dropout": 0.1},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_unsupported_configurations_are_refused(change):
    with pytest.raises(ValueError, match=r"config\.json: \w+ = .* is not supported"):
        config_from_hf(config_to_hf(GQA) | change)


def test_old_and_sparse_configurations():
    """A config.json of transformers 4 has rope_theta at the top, and leaves may be missing."""
    sparse = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "rope_theta": 7000.0,
        "rope_scaling": None,
    }
    config = config_from_hf(sparse)
    assert (config.rotary_base, config.norm_epsilon, config.query_groups) == (7000.0, 1e-6, 4)
    assert config.untie_embeddings_and_output_weights
    del sparse["intermediate_size"]
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        config_from_hf(sparse)


def test_state_dicts_that_do_not_fit():
    state = hugging_face(GQA).state_dict()
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        from_hf({name: w for name, w in state.items() if name != "lm_head.weight"}, GQA)
    with pytest.raises(ValueError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias"):
        from_hf(state | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, GQA)
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \(16, 48\); .* \(48, 48\)"):
        from_hf(state, CONFIGS["mha"])
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        from_hf(state, CONFIGS["tied"])
    with pytest.raises(ValueError, match=r"lacks layers\.1\.mlp"):
        to_hf({name: w for name, w in from_hf(state, GQA).items() if "1.mlp." not in name}, GQA)
    derived = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert from_hf(state | derived, GQA).keys() == from_hf(state, GQA).keys()
