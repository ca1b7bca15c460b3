"""Each family has Hugging Face's numbers, and reads its folders as transformers reads them."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf
from model.hf.configs import HUGGING_FACE
from model.registry import build_model
from runtime.errors import UserError, with_article
from tests.model.hf.hugging_face import (
    CONFIGS,
    GPT2,
    LLAMA,
    OLMO_HYBRID,
    QWEN3_5,
    TOKENS,
    hugging_face,
    ours,
    transformers,
)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_logits_and_gradients_equal_hugging_faces(config, dtype, bound):
    theirs = hugging_face(config, dtype)
    model = ours(theirs, config, dtype)
    if config.recurrent:
        # Theirs is float64 for both. Normalised queries of short vectors make digits scarce:
        # against it ours in float32 are off by 1.1e-4 of a gradient and 1.3e-5 of the logits at
        # most, theirs by 2.3e-4 and 3.7e-5.
        bound *= 20 if dtype == torch.float32 else 10
    expected, got = theirs(TOKENS).logits, model(TOKENS)
    assert expected.std() > 0.5
    # Norms, as of the gradients: the largest error of a single logit depends on the order in which
    # a processor's kernels add.
    assert (got - expected).norm() < bound * expected.norm()

    for logits in (expected, got):
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1).flatten()).backward()
    expected_gradients = from_hf({name: p.grad for name, p in theirs.named_parameters()}, config)
    for name, parameter in model.named_parameters():
        if (
            name.endswith("wk.bias") and config.learned_positions
        ):  # softmax takes no notice of it: noise in both
            assert max(parameter.grad.abs().max(), expected_gradients[name].abs().max()) < bound, (
                name
            )
        else:
            assert (parameter.grad - expected_gradients[name]).norm() < bound * expected_gradients[
                name
            ].norm(), name


@pytest.mark.parametrize(
    ("config", "breakage"),
    [
        (LLAMA, {"rotary_base": 5500.0}),
        (LLAMA, {"norm_epsilon": 1e-3}),
        (LLAMA, {"num_attention_heads": 12, "num_query_groups": 4, "kv_channels": 4}),
        (GPT2, {"norm_epsilon": 1e-3}),
        (GPT2, {"num_attention_heads": 12}),
    ],
)
def test_bound_sees_a_wrong_configuration(config, breakage):
    """Negative control: weights of the same shapes in a model that computes something else."""
    theirs = hugging_face(config)
    model = ours(theirs, dataclasses.replace(config, **breakage))
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bound_sees_a_square_matrix_that_is_not_transposed(config):
    theirs = hugging_face(config)
    model = ours(theirs, config)
    with torch.no_grad():
        model.layers[0].attention.wo.weight.copy_(model.layers[0].attention.wo.weight.T.clone())
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3


def test_round_trip(config):
    theirs = hugging_face(config).state_dict()
    back = to_hf(from_hf(theirs, config), config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    full = config_from_hf(config_to_hf(config))
    left_open = {
        name: getattr(full, name)
        for name in ("kv_channels", "num_query_groups", "max_position_embeddings")
    }
    assert full == dataclasses.replace(config, ffn_hidden_size=config.ffn_size, **left_open)
    assert (full.head_dim, full.query_groups) == (config.head_dim, config.query_groups)
    assert config_from_hf(config_to_hf(full)) == full


IN_BFLOAT16 = ("llama", "gemma3", "qwen3_5", "granite", "gpt2")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CONFIGS),
        *((name, torch.bfloat16) for name in IN_BFLOAT16),
    ],
)
def test_transformers_loads_what_is_saved(tmp_path, name, dtype):
    config, reference = CONFIGS[name], hugging_face(CONFIGS[name])
    model = ours(reference, config).to(dtype)
    longest = config.max_position_embeddings or getattr(config, "scaled_length", 0) or 4096
    save_hf(
        tmp_path / "out", config, model.state_dict(), contents={"max_position_embeddings": longest}
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(theirs) is type(reference)
    assert theirs.dtype == dtype
    assert theirs.config.max_position_embeddings == longest
    expected = theirs(TOKENS).logits
    bound = 1e-5 if dtype == torch.float32 else 0.05
    if config.recurrent and dtype == torch.float32:
        bound *= 20  # as above
    assert (expected - model(TOKENS)).norm() < bound * expected.norm()
    loaded, state, _ = load_hf(tmp_path / "out")
    assert loaded == config_from_hf(config_to_hf(config, {"max_position_embeddings": longest}))
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    with pytest.raises(ValueError, match="exists"):
        save_hf(tmp_path / "out", config, model.state_dict())


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, QWEN3_5, OLMO_HYBRID], ids=["llama", "gpt2", "qwen3_5", "olmo_hybrid"]
)
def test_reads_shards_that_transformers_wrote(config, tmp_path):
    """An OLMo Hybrid's have other names than its module's."""
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    read, state, _ = load_hf(tmp_path)
    expected = from_hf(theirs.state_dict(), config)
    assert config_from_hf(config_to_hf(read)) == read
    assert read.position_table == config.position_table
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CHANGES = [json.loads(line) for line in Path(__file__).with_name("config_changes.jsonl").open()]
"""Changes of a family's config.json.

It is read, nothing changes, or it is refused, by transformers too or by us.
"""


def changes(*results):
    rows = [
        (row["config"], row["change"], row.get("says"))
        for row in CHANGES
        if row["result"] in results
    ]
    return pytest.mark.parametrize(("name", "change", "words"), rows)


@changes("read", "refused by both")
def test_a_config_json_is_read_as_transformers_reads_it(tmp_path, name, change, words):
    hugging_face(CONFIGS[name]).save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs" / "config.json", **change)
    if words is not None:
        with pytest.raises(Exception, match=r".") as refused:
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")(TOKENS)
        assert not isinstance(refused.value, UserError)
        with pytest.raises(UserError, match=words):
            load_hf(tmp_path / "theirs")
        return
    config, state, contents = load_hf(tmp_path / "theirs")
    model = build_model(config)
    model.load_state_dict(state)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    expected = theirs(TOKENS).logits
    bound = 1e-4 if config.recurrent else 1e-6 * config.num_layers  # float32 in both, as above
    assert (model(TOKENS) - expected).abs().max() < bound * expected.abs().max()
    for contents_saved in (contents, {}):  # an export as it came, and one of our fields alone
        save_hf(tmp_path / f"{bool(contents_saved)}", config, state, contents_saved)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{bool(contents_saved)}"
        )
        assert torch.allclose(again(TOKENS).logits, expected, atol=1e-6)


@changes("nothing", "refused")
def test_a_config_json_changes_nothing_or_is_no_such_model(name, change, words):
    contents = config_to_hf(CONFIGS[name])
    same = config_from_hf(contents)
    if words is None:
        assert config_from_hf(contents | change) == same
        return
    with pytest.raises(UserError, match=rf"^config\.json: .*{words}"):
        config_from_hf(contents | change)


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "ministral", "qwen2, yarn", "qwen3", "gpt2", "olmo3"]
)
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "x y"])
def test_a_key_that_no_family_knows_is_told(name, key):
    contents = config_to_hf(CONFIGS[name])
    kind = with_article(contents["model_type"])
    words = (
        rf'^config.json: {key} = "other" is not supported: {kind} is not known to have it, and it'
    )
    for read in (config_from_hf, lambda contents: config_to_hf(CONFIGS[name], contents)):
        read(contents)
        with pytest.raises(UserError, match=words):
            read(contents | {key: "other"})


def test_every_key_that_transformers_writes_is_known():
    for family in (family_name for family_name in HUGGING_FACE if family_name != "transnormer"):
        written = transformers.AutoConfig.for_model(family).to_dict()
        assert written.keys() <= HUGGING_FACE[family].known, family
        assert (
            set(transformers.GenerationConfig._get_default_generation_params())
            <= HUGGING_FACE[family].known
        )


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "gpt2", "gemma3", "olmo3", "qwen3_5", "olmo_hybrid", "smollm3", "granite"],
)
def test_sinks_are_refused_both_ways(name):
    config = CONFIGS[name]
    state, other = (
        hugging_face(config).state_dict(),
        dataclasses.replace(config, softmax_type="learnable"),
    )
    for refused in (
        lambda: config_to_hf(other),
        lambda: from_hf(state, other),
        lambda: to_hf({}, other),
    ):
        with pytest.raises(
            UserError,
            match=r"softmax_type is learnable, but for Hugging Face.s .* it must be vanilla",
        ):
            refused()
    with pytest.raises(
        UserError, match=r"layers\.0\.self_attn\.sinks holds attention sinks, .* without sinks"
    ):
        from_hf(state | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, config)


@pytest.mark.parametrize(
    ("name", "lacking", "added", "message"),
    [
        ("llama", "lm_head.weight", {}, r"lacks lm_head\.weight"),
        (
            "llama",
            "",
            {"model.layers.0.self_attn.q_proj.bias": (48,)},
            r"unknown model\.layers\.0\.self_attn",
        ),
        ("llama, mha", "", {}, r"k_proj\.weight has shape \(16, 48\), .* \(48, 48\)"),
        ("llama, tied", "", {}, "tie_word_embeddings"),
        ("llama", "", {"model.layers.1.self_attn.rotary_emb.inv_freq": (4,)}, None),
        (
            "gpt2",
            "transformer.h.1.attn.c_attn.bias",
            {},
            r"lacks transformer\.h\.1\.attn\.c_attn\.bias",
        ),
        (
            "gpt2",
            "",
            {"transformer.h.0.crossattention.weight": (48, 48)},
            r"unknown transformer\.h\.0\.cross",
        ),
        ("gpt2, narrow feed-forward", "", {}, r"c_fc\.weight has shape \(48, 192\), .* \(48, 80\)"),
        (
            "gpt2",
            "",
            {"lm_head.weight": (61, 48)},
            r"lm_head\.weight differs from transformer\.wte\.weight",
        ),
        ("gpt2, untied", "lm_head.weight", {}, "lacks lm_head"),
    ],
)
def test_state_dicts_that_do_not_fit(name, lacking, added, message):
    kind = name.split(",")[0]
    state = {
        tensor_name: weight
        for tensor_name, weight in hugging_face(CONFIGS[kind]).state_dict().items()
        if tensor_name != lacking
    }
    state_dict = state | {tensor_name: torch.zeros(shape) for tensor_name, shape in added.items()}
    if message is None:
        assert from_hf(state_dict, CONFIGS[name]).keys() == from_hf(state, CONFIGS[name]).keys()
        return
    with pytest.raises(UserError, match=message):
        from_hf(state_dict, CONFIGS[name])


def test_a_state_dict_of_ours_that_is_not_whole_is_refused():
    state = from_hf(hugging_face(LLAMA).state_dict(), LLAMA)
    with pytest.raises(UserError, match=r"lacks layers\.1\.mlp"):
        to_hf({name: weight for name, weight in state.items() if "1.mlp." not in name}, LLAMA)
