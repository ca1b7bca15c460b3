"""The diffusion transformer: its published sizes, positions, patches, first weights and parts."""

import csv
import tomllib

import numpy as np
import pytest
import torch

from model.dit import (
    DiT,
    dit_flops_per_patch,
    multiply_adds,
    num_dit_parameters,
    patchify,
    position_embedding,
    unpatchify,
)
from model.dit_config import DiTConfig
from model.registry import initial_weight
from tests.model.models import IMAGE, VIDEO
from tests.starts import ROOT

with (ROOT / "papers" / "tables" / "dit_sizes.csv").open() as table:
    PUBLISHED = list(csv.DictReader(line for line in table if not line.startswith("#")))
CONFIGS = {
    "dit_s_2": 32_865_056,
    "dit_b_2": 130_315_808,
    "dit_l_2": 457_840_672,
    "dit_xl_2": 674_834_720,
}
CONFIGS["wallfacer_dit_1b"] = 1_028_981_824


def shape_of(config):
    return tomllib.loads((ROOT / "configs" / "models" / f"{config}.toml").read_text())["model"]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['model']}-{row['patch']}")
def test_parameters_and_multiply_adds_are_the_published_ones(row):
    """Within 1 %, what their rounding leaves; the paper's Gflops are multiply-adds."""
    size = row["model"].removeprefix("DiT-").lower()
    config = DiTConfig(**{**shape_of(f"dit_{size}_2"), "patch_size": int(row["patch"])})
    assert (config.num_layers, config.hidden_size) == (int(row["layers"]), int(row["hidden"]))
    assert config.num_attention_heads == int(row["heads"])
    assert num_dit_parameters(config) == pytest.approx(1e6 * float(row["params_m"]), rel=0.01)
    assert multiply_adds(config) == pytest.approx(1e9 * float(row["gmacs"]), rel=0.01)
    assert dit_flops_per_patch(config) * config.num_patches == pytest.approx(
        6e9 * float(row["gmacs"]), rel=0.01
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_have_their_number_of_parameters(name):
    config = DiTConfig(**shape_of(name))
    width, layers = config.hidden_size, config.num_layers
    layer = 18 * width**2 + 15 * width  # attention 4, feed-forward 8, modulation 6
    times = 256 * width + width**2 + 2 * width
    ends = (
        (config.patch_width + 1) * width + 2 * width**2 + 2 * width + (width + 1) * config.out_width
    )
    assert (
        layers * layer + times + 1001 * width + ends == num_dit_parameters(config) == CONFIGS[name]
    )


def test_a_linear_layer_counts_as_torch_counts_it():
    """torch's own counter, in which a multiplication and its addition are two."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for config in (IMAGE, VIDEO):
        x = torch.zeros(1, config.num_patches, config.patch_width)
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            DiT(config)(
                x,
                torch.arange(config.num_patches),
                torch.zeros(1),
                torch.zeros(1, dtype=torch.int64),
            )
        assert counter.get_total_flops() == 2 * multiply_adds(config)


def sines(positions, channels):
    angles = np.outer(positions, 1 / 10000 ** (np.arange(channels // 2) / (channels / 2)))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def test_positions_of_images_are_the_original_s():
    """The column in the first half, the row in the second."""
    config = DiTConfig(hidden_size=24, num_attention_heads=2, latent_shape=(4, 6, 10))
    column, row = np.meshgrid(np.arange(5.0), np.arange(3.0))
    want = np.concatenate([sines(column.ravel(), 12), sines(row.ravel(), 12)], axis=1)
    np.testing.assert_allclose(
        position_embedding(torch.arange(15), config).numpy(), want, atol=1e-15
    )


def test_positions_of_video_have_the_frame_first():
    frame, row, column = (
        place.ravel() for place in np.meshgrid(*(np.arange(n) for n in (3, 2, 4)), indexing="ij")
    )
    want = np.concatenate([sines(frame, 8), sines(column, 12), sines(row, 12)], axis=1)
    np.testing.assert_allclose(
        position_embedding(torch.arange(24), VIDEO).numpy(), want, atol=1e-15
    )


@pytest.mark.parametrize("config", [IMAGE, VIDEO])
def test_positions_are_those_of_the_patches_that_are_asked_for(config):
    whole = position_embedding(torch.arange(config.num_patches), config)
    some = torch.tensor([7, 0, config.num_patches - 1])
    assert torch.equal(position_embedding(some, config), whole[some])
    beyond = position_embedding(torch.arange(config.num_patches, config.num_patches + 40), config)
    assert beyond.isfinite().all()


@pytest.mark.parametrize("config", [IMAGE, VIDEO])
def test_patches_are_blocks_of_the_latents_with_channels_last(config):
    x = torch.randn(2, *config.latent_shape)
    patches = patchify(x, config)
    assert patches.shape == (2, config.num_patches, config.patch_width)
    assert torch.equal(unpatchify(patches, config), x)
    frames, height, width = config.patch_shape
    second = (
        x[0, :, :frames, :height, width : 2 * width]
        if config.video
        else x[0, :, :height, width : 2 * width]
    )
    assert torch.equal(patches[0, 1], second.movedim(0, -1).flatten())
    wide_patches = torch.randn(2, config.num_patches, 2 * config.patch_width)
    assert torch.equal(patchify(unpatchify(wide_patches, config), config), wide_patches)


def test_a_new_model_is_the_identity_and_says_nought():
    model = DiT(IMAGE)
    model.init_weights(3)
    x, times, labels = torch.randn(2, 16, 12), torch.tensor([0.0, 9.0]), torch.tensor([5, 0])
    assert not model(x, torch.arange(16), times, labels).any()
    hidden = torch.randn(2, 16, 24)
    assert torch.equal(model.layers[1](hidden, torch.randn(2, 24)), hidden)
    name = "layers.1.attention.wq.weight"
    weight = model.state_dict()[name]
    assert torch.equal(weight, initial_weight(IMAGE, name, weight.shape, 3))
    assert weight.abs().max().item() == pytest.approx((6 / (4 * 24)) ** 0.5, rel=0.01)
    assert model.y_embedder.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(weight, model.state_dict()["layers.0.attention.wq.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"patch_size": 3},
            "patch_size is 3; it must divide height 32 and width 32 of .*; choose from 1, 2, 4, 8",
        ),
        ({"patch_size_t": 2}, "patch_size_t is 2; images have no frames"),
        (
            {"patch_size_t": 4, "latent_shape": (4, 6, 32, 32)},
            "patch_size_t is 4; .* 6 frames .*; choose from 1, 2, 3, 6",
        ),
        ({"latent_shape": (4, 32)}, "latent_shape is 4 32; it must be channels, height, width for"),
        (
            {"hidden_size": 383},
            "hidden_size is 383; it must be a multiple of num_attention_heads 6",
        ),
        ({"hidden_size": 390}, "hidden_size is 390; it must be a multiple of 4"),
        (
            {"hidden_size": 24, "latent_shape": (4, 2, 32, 32)},
            "hidden_size is 24; it must be a multiple of 16",
        ),
        ({"class_dropout_prob": 1.5}, "class_dropout_prob is 1.5; it must be from 0 to 1"),
        ({"num_classes": 0}, "num_classes is 0; it must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        DiTConfig(**changes)
