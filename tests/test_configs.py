"""The published sizes of the models under configs/, and the commands that the help shows with these files."""

import re
from dataclasses import replace

import pytest

from model.registry import num_parameters
from planner.cluster import load_cluster
from planner.levers import settings
from planner.search import arrangements, predicted, rank
from tests.starts import ROOT
from train.config import diffusion as dit_config
from train.config import language as config
from train.config.language import load_config
from train.config.sizes import validate_sizes

PARTS = ("weights, gradients and optimizer", "activations", "a layer's backward")

PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_8b": 8_030_261_248,
    "striped_1b": 1_244_227_584,
    "striped_3b": 3_426_473_600,  # OpenLLaMA 3B, of the same shape
    "striped_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "qwen3_8b": 8_190_735_360,
    "wallfacer_gpt_3b": 3_159_646_208,
    "wallfacer_gpt_7b": 6_650_208_256,
    "qwen3_5_0.8b": 752_393_024,
    "qwen3_5_4b": 4_205_751_296,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_tiny": 547_552,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "transnormer_0.4b": 398_984_192,
    "transnormer_1b": 1_020_266_496,
    "transnormer_7b": 6_931_091_456,
    "transnormer_hybrid_tiny": 487_488,
}
"""Text parts; the names of Qwen3.5 and Gemma 3 count a vision part, and a layer that predicts more tokens, besides."""


def mixer(model, layer):
    """The weights of a layer that mix tokens, with their norms, counted by hand."""
    width, heads, groups, inside = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    softmax = 2 * width * inside * (heads + groups)
    match model.model_type:
        case "llama":
            return softmax + 2 * inside * model.qk_layernorm
        case "gemma3":
            return softmax + 2 * width + 2 * inside
        case "olmo3":
            return softmax + (heads + groups) * inside
        case "gpt":
            return softmax + (3 * heads * inside + width)  # biases
        case "transnormer":
            return (4 if model.has_softmax(layer) else 5) * width**2  # a gate, where attention is linear
        case "qwen3_5" if model.has_softmax(layer):
            return softmax + width * inside * heads + 2 * inside  # a gate, norms of q and k
        case "qwen3_5":
            keys, values = model.key_heads * model.key_dim, model.value_heads * model.value_dim
            delta = width * (2 * keys + 3 * values + 2 * model.value_heads) + 4 * (2 * keys + values)
            return delta + 2 * model.value_heads + model.value_dim  # rates and biases of the gates, the norm of a head


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_their_number_of_parameters(name):
    model = load_config(ROOT / "configs" / "models" / f"{name}.toml").model
    model = replace(model, vocab_size=model.vocab_size or 4096)
    width, ffn, gpt = model.hidden_size, model.ffn_size, model.model_type == "gpt"
    norms = {"transnormer": 0, "gpt": 4}.get(model.model_type, 2) * width
    layer = norms + ((2 * ffn + 1) * width + ffn if gpt else 3 * width * ffn)
    tables = (1 + model.untie_embeddings_and_output_weights) * model.vocab_size * width + (1 + gpt) * width
    total = sum(mixer(model, number) + layer for number in range(model.num_layers)) + tables
    assert total == num_parameters(model) == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name.startswith(("gemma3", "olmo3"))])
def test_one_layer_of_several_sees_all_tokens(name):
    model = load_config(ROOT / "configs" / "models" / f"{name}.toml").model
    every = 6 if model.model_type == "gemma3" else 4
    whole = [layer for layer in range(model.num_layers) if model.window(layer) is None]
    assert whole == list(range(every - 1, model.num_layers, every))


def examples(introduction):
    """The processes and flags of each command in a help text."""
    commands = introduction.replace("\\\n", " ").splitlines()
    return [
        (int((re.search(r"nproc-per-node (\d+)", command) or ["", 1])[1]), command.split("%(prog)s")[1].split())
        for command in commands
        if "%(prog)s" in command
    ]


@pytest.mark.parametrize("entry", [config, dit_config])
def test_the_examples_of_the_help_are_valid(entry, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = examples(entry.INTRODUCTION)
    assert len(shown) >= 3
    for processes, flags in shown:
        words = ["configs/models/llama_tiny.toml" if word == "runs/zigzag/config.toml" else word for word in flags]
        entry.validate(entry.parse_args(words), processes)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "runs").glob("*_[0-9]*x*.toml")), ids=lambda path: path.stem
)
def test_a_recipe_says_what_the_planner_predicts_for_it_and_is_among_the_fastest(path):
    processes, device = re.search(r"_(\d+)x([a-z]+\d+)", path.stem).groups()
    cluster, recipe = load_cluster(ROOT / "configs" / "clusters" / f"{device}_pod.toml"), load_config(path)
    validate_sizes(recipe, int(processes))
    own = predicted(recipe, int(processes), cluster)
    figures = [f"{own.time:.1f} s a step", f"{own.bytes / 1e9:.1f} GB per GPU"]
    figures += [f"{words} {count / 1e9:.1f}" for words, count in zip(PARTS, own.memory.values(), strict=True)]
    said = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    assert [figure for figure in figures if figure not in said] == []
    proven = replace(cluster, host_gb_per_s=0.0)  # offload has not run on a GPU
    best = rank(list(arrangements(recipe, int(processes))), int(processes), proven, vary=settings).candidates[0]
    assert best.prediction.time <= own.time <= 1.01 * best.prediction.time  # less means nothing, and may cost memory


def test_adapters_leave_a_tenth_of_the_memory_where_all_weights_do_not():
    recipe = load_config(ROOT / "configs" / "runs" / "finetune_llama3_8b_512k_4xh100_lora.toml")
    cluster = load_cluster(ROOT / "configs" / "clusters" / "h100_pod.toml")
    cluster = replace(cluster, host_gb_per_s=0.0)
    assert predicted(recipe, 4, cluster).bytes < 0.9e9 * cluster.memory_gb
    found = rank(list(arrangements(replace(recipe, model=recipe.model.merged()), 4)), 4, cluster, vary=settings)
    assert found.candidates[0].prediction.bytes / 1e9 == pytest.approx(77.4, abs=0.05)
    assert min(candidate.prediction.bytes for candidate in found.candidates) > 0.9e9 * cluster.memory_gb
