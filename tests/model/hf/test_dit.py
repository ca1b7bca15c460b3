"""Our DiT computes what diffusers' computes, and reads and writes the original's names."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.dit import DiT, patchify, unpatchify
from model.hf.dit import dit_from_original, dit_to_original, load_dit, save_dit
from tests.model.models import IMAGE, VIDEO, random_dit

WEIGHTS = """
x_embedder.proj 24 3 2 2 | t_embedder.mlp.0 24 256 | t_embedder.mlp.2 24 24
final_layer.linear 24 24 | final_layer.adaLN_modulation.1 48 24
BLOCK.attn.qkv 72 24 | BLOCK.attn.proj 24 24 | BLOCK.mlp.fc1 96 24 | BLOCK.mlp.fc2 24 96
BLOCK.adaLN_modulation.1 144 24
"""
"""The original's modules with the shapes of their weights, whose first number is that of the bias.
"""


def in_diffusers(original, config):
    """diffusers' model with weights in the original's naming.

    Each of its blocks has embedders of its own.

    Its sines of times go by 10000^(-j / 127), the original's by 10000^(-j / 128): set to the latter
    here.
    """
    diffusers = pytest.importorskip("diffusers", reason="compares with diffusers' model")
    width = config.hidden_size
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_shape[0],
        out_channels=2 * config.latent_shape[0],
        num_layers=config.num_layers,
        sample_size=config.latent_shape[1],
        patch_size=config.patch_size,
        num_embeds_ada_norm=config.num_classes,
        norm_eps=config.norm_epsilon,
    )
    shift, scale = (
        original["final_layer.adaLN_modulation.1." + kind] for kind in ("weight", "bias")
    )
    state = {"proj_out_1.weight": shift, "proj_out_1.bias": scale}
    for kind in ("weight", "bias"):
        state[f"pos_embed.proj.{kind}"] = original[f"x_embedder.proj.{kind}"]
        state[f"proj_out_2.{kind}"] = original[f"final_layer.linear.{kind}"]
        for layer in range(config.num_layers):
            block, into = f"blocks.{layer}.", f"transformer_blocks.{layer}."
            parts = original[f"{block}attn.qkv.{kind}"].split(width)
            state |= {
                f"{into}attn1.to_{name}.{kind}": part
                for name, part in zip("qkv", parts, strict=True)
            }
            state[f"{into}attn1.to_out.0.{kind}"] = original[f"{block}attn.proj.{kind}"]
            state[f"{into}ff.net.0.proj.{kind}"] = original[f"{block}mlp.fc1.{kind}"]
            state[f"{into}ff.net.2.{kind}"] = original[f"{block}mlp.fc2.{kind}"]
            state[f"{into}norm1.linear.{kind}"] = original[f"{block}adaLN_modulation.1.{kind}"]
            for theirs_name, name in (("linear_1", "mlp.0"), ("linear_2", "mlp.2")):
                state[f"{into}norm1.emb.timestep_embedder.{theirs_name}.{kind}"] = original[
                    f"t_embedder.{name}.{kind}"
                ]
    for layer in range(config.num_layers):
        table = f"transformer_blocks.{layer}.norm1.emb.class_embedder.embedding_table.weight"
        state[table] = original["y_embedder.embedding_table.weight"]
    theirs.load_state_dict(state)
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    torch.testing.assert_close(
        theirs.pos_embed.pos_embed, original["pos_embed"].float(), atol=1e-6, rtol=0
    )
    return theirs.eval()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_outputs_are_those_of_diffusers(dtype, bound):
    model = random_dit(IMAGE).to(dtype)
    original = dit_to_original(model.state_dict(), IMAGE)
    theirs = in_diffusers(original, IMAGE).to(dtype)
    theirs.pos_embed.pos_embed = original["pos_embed"]  # theirs is kept in float32
    x = torch.randn(4, *IMAGE.latent_shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    times, labels = torch.tensor([0, 1, 500, 999]), torch.tensor([0, 4, 5, 2])
    with torch.no_grad():
        out = model(patchify(x, IMAGE), torch.arange(IMAGE.num_patches), times.to(dtype), labels)
        want = theirs(x, timestep=times, class_labels=labels).sample
    assert want.std() > 0.1
    assert (unpatchify(out, IMAGE) - want).abs().max() < bound


def test_names_are_the_original_s():
    state = dit_to_original(random_dit(IMAGE).state_dict(), IMAGE)
    want = {"pos_embed": (1, 16, 24), "y_embedder.embedding_table.weight": (6, 24)}
    for row in WEIGHTS.strip().replace("\n", "|").split("|"):
        name, *shape = row.split()
        for layer in range(IMAGE.num_layers if "BLOCK" in name else 1):
            module = name.replace("BLOCK", f"blocks.{layer}")
            want |= {f"{module}.weight": tuple(map(int, shape)), f"{module}.bias": (int(shape[0]),)}
    assert {name: tuple(weight.shape) for name, weight in state.items()} == want


def test_the_patch_embedding_is_their_convolution():
    for config, convolve in (
        (IMAGE, torch.nn.functional.conv2d),
        (VIDEO, torch.nn.functional.conv3d),
    ):
        model = random_dit(config).double()
        weight = dit_to_original(model.state_dict(), config)["x_embedder.proj.weight"]
        x = torch.randn(2, *config.latent_shape, dtype=torch.float64)
        stride = config.patch_shape if config.video else config.patch_shape[1:]
        want = convolve(x, weight, model.x_embedder.bias, stride=stride).flatten(2).mT
        torch.testing.assert_close(model.x_embedder(patchify(x, config)), want)


@pytest.mark.parametrize("config", [IMAGE, VIDEO])
def test_what_is_saved_is_loaded(tmp_path, config):
    state = random_dit(config).state_dict()
    save_dit(tmp_path / "out", config, state)
    saved_config, loaded = load_dit(tmp_path / "out")
    assert saved_config == config
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    DiT(saved_config).load_state_dict(loaded)
    with pytest.raises(ValueError, match="exists; choose a new folder"):
        save_dit(tmp_path / "out", config, state)


def test_what_does_not_fit_is_named(tmp_path):
    state = dit_to_original(random_dit(IMAGE).state_dict(), IMAGE)
    with pytest.raises(ValueError, match=r"lacks blocks\.1\.attn\.qkv\.bias"):
        dit_from_original(
            {name: w for name, w in state.items() if name != "blocks.1.attn.qkv.bias"}, IMAGE
        )
    with pytest.raises(ValueError, match="unknown ema"):
        dit_from_original(state | {"ema": torch.zeros(1)}, IMAGE)
    with pytest.raises(ValueError, match=r"x_embedder\.proj\.weight has shape"):
        dit_from_original(state, dataclasses.replace(IMAGE, patch_size=4))
    with pytest.raises(ValueError, match=r"pos_embed \(1, 16, 24\) differs from the sines"):
        dit_from_original(state | {"pos_embed": state["pos_embed"].flip(1)}, IMAGE)
    save_dit(tmp_path, IMAGE, random_dit(IMAGE).state_dict())
    weights = tmp_path / "model.safetensors"
    save_file({name: w for name, w in load_file(weights).items() if name != "pos_embed"}, weights)
    load_dit(tmp_path)  # positions are fixed, and may be left out
    weights.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_dit(tmp_path)
