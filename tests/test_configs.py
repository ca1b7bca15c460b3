"""The published sizes of the models under configs/.

The commands that the help shows with these files are tested too.
"""

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
    "smollm3_3b": 3_075_098_624,
    "smollm3_tiny": 459_328,
    "granite3_8b": 8_170_848_256,
    "granite3_tiny": 459_328,
    "transnormer_0.4b": 398_984_192,
    "transnormer_1b": 1_020_266_496,
    "transnormer_7b": 6_931_091_456,
    "transnormer_hybrid_tiny": 487_488,
}
"""Text parts; the names of Qwen3.5 and Gemma 3 count other parts besides.

These are a vision part, and a layer that predicts more tokens.
"""


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_their_number_of_parameters(name):
    model = load_config(ROOT / "configs" / "models" / f"{name}.toml").model
    assert num_parameters(replace(model, vocab_size=model.vocab_size or 4096)) == PARAMETERS[name]


def examples(introduction):
    """The processes and flags of each command in a help text."""
    commands = introduction.replace("\\\n", " ").splitlines()
    return [
        (
            int((re.search(r"nproc-per-node (\d+)", command) or ["", 1])[1]),
            command.split("%(prog)s")[1].split(),
        )
        for command in commands
        if "%(prog)s" in command
    ]


@pytest.mark.parametrize("entry", [config, dit_config])
def test_the_examples_of_the_help_are_valid(entry, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = examples(entry.INTRODUCTION)
    assert len(shown) >= 3
    for processes, flags in shown:
        words = [
            "configs/models/llama_tiny.toml" if word == "runs/zigzag/config.toml" else word
            for word in flags
        ]
        entry.validate(entry.parse_args(words), processes)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "runs").glob("*_[0-9]*x*.toml")), ids=lambda path: path.stem
)
def test_a_recipe_says_what_the_planner_predicts_for_it_and_is_among_the_fastest(path):
    processes, device = re.search(r"_(\d+)x([a-z]+\d+)", path.stem).groups()
    cluster, recipe = (
        load_cluster(ROOT / "configs" / "clusters" / f"{device}_pod.toml"),
        load_config(path),
    )
    validate_sizes(recipe, int(processes))
    prediction = predicted(recipe, int(processes), cluster)
    figures = [f"{prediction.time:.1f} s a step", f"{prediction.bytes / 1e9:.1f} GB per GPU"]
    figures += [
        f"{words} {count / 1e9:.1f}"
        for words, count in zip(PARTS, prediction.memory.values(), strict=True)
    ]
    comment = " ".join(
        line.removeprefix("#").strip()
        for line in path.read_text().splitlines()
        if line.startswith("#")
    )
    assert [figure for figure in figures if figure not in comment] == []
    proven = replace(cluster, host_gb_per_s=0.0)  # offload has not run on a GPU
    best = rank(
        list(arrangements(recipe, int(processes))), int(processes), proven, vary=settings
    ).candidates[0]
    assert (
        best.prediction.time <= prediction.time <= 1.01 * best.prediction.time
    )  # less means nothing, and may cost memory
