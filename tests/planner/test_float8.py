"""The gain of 8-bit matmuls: which part of a step it shortens, and who has none."""

from dataclasses import replace

import pytest

from planner.cluster import CLUSTERS, ClusterError, load_cluster
from planner.layers.float8 import OLDER_CARDS, SPEEDUP, float8_recipe
from planner.search import predicted
from train.config.language import parse_args
from train.float8 import Float8Config

FLAGS = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 32000 --bf16"
HYBRID = "--fp8-format hybrid"
ROWWISE = "--fp8-format e4m3 --fp8-recipe rowwise"


def step(*flags, cluster="h100_pod"):
    words = " ".join([FLAGS, "--seq-length 8192 --mock-data --device cpu", *flags]).split()
    return predicted(parse_args(words), 8, load_cluster(CLUSTERS / f"{cluster}.toml"))


def test_only_the_layers_matmuls_take_less_time():
    plain, hybrid, rowwise = (step("--compile", flags) for flags in ("", HYBRID, ROWWISE))
    saved = plain.time - hybrid.time
    assert saved > 0
    for cause, seconds in plain.seconds.items():
        if cause == "linear":
            assert seconds - hybrid.seconds[cause] == pytest.approx(saved)
        else:
            assert seconds == hybrid.seconds[cause], cause
    assert hybrid.memory == plain.memory
    gains = {recipe: 1 - 1 / speedup for recipe, speedup in SPEEDUP.items()}
    assert (plain.time - rowwise.time) / saved == pytest.approx(
        gains["rowwise"] / gains["tensorwise"]
    )


def test_the_saved_time_is_that_of_three_passes_over_the_layers_weights():
    """Weights by hand: 4 of 1,024 x 1,024 for attention, 3 for the feed-forward, in 4 layers."""
    cluster = load_cluster(CLUSTERS / "h100_pod.toml")
    config = parse_args([*FLAGS.split(), "--seq-length", "8192", "--mock-data", "--device", "cpu"])
    width, inner = config.model.hidden_size, config.model.ffn_size
    weights = 4 * (4 * width**2 + 3 * width * inner)
    seconds = 3 * 2 * 8192 * weights / cluster.products_flops_per_s
    saved = step("--compile").time - step("--compile", HYBRID).time
    assert saved == pytest.approx(seconds * (1 - 1 / SPEEDUP["tensorwise"]))


def test_no_gain_is_counted_without_compilation():
    assert step(HYBRID).seconds == step().seconds


def test_cards_without_8_bit_matmuls_are_refused():
    for path in sorted(CLUSTERS.glob("*.toml")):
        cluster = load_cluster(path)
        if any(card in cluster.name for card in OLDER_CARDS):
            with pytest.raises(ClusterError, match="cards have no 8-bit"):
                float8_recipe(Float8Config(fp8_format="hybrid"), cluster)
            assert float8_recipe(Float8Config(), cluster) == ""
        else:
            assert float8_recipe(Float8Config(fp8_format="hybrid"), cluster) == "tensorwise"
    workstation = replace(load_cluster("l40s"), name="8 RTX A6000")
    with pytest.raises(ClusterError, match="cards have no 8-bit"):
        float8_recipe(Float8Config(fp8_format="hybrid"), workstation)
    with pytest.raises(ClusterError, match="leave out --fp8-format"):
        step("--compile", HYBRID, cluster="a100_pod")
