"""Tiny models of the classes that the planner describes, with clips and inputs of a forward."""

from typing import Any

import torch
from torch import Tensor, nn

from planner.diffusion.clip import Clip, transformer_of
from planner.diffusion.transformer import Grid, Transformer

WIDTH = {"num_attention_heads": 4, "attention_head_dim": 24, "in_channels": 4}
WAN = {
    **WIDTH,
    "_class_name": "WanTransformer3DModel",
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 16,
    "ffn_dim": 256,
    "num_layers": 3,
    "rope_max_seq_len": 64,
}
HUNYUAN = {
    **WIDTH,
    "_class_name": "HunyuanVideoTransformer3DModel",
    "out_channels": 4,
    "text_embed_dim": 32,
    "pooled_projection_dim": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "num_refiner_layers": 1,
    "rope_axes_dim": [8, 8, 8],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "wan": WAN,
    "wan i2v": {**WAN, "image_dim": 40, "added_kv_proj_dim": 96},
    "hunyuan": HUNYUAN,
    "hunyuan 1.5": {
        **WIDTH,
        "_class_name": "HunyuanVideo15Transformer3DModel",
        "out_channels": 4,
        "text_embed_dim": 32,
        "text_embed_2_dim": 24,
        "image_embed_dim": 40,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "rope_axes_dim": [8, 8, 8],
        "use_meanflow": True,
    },
    "flux": {
        **WIDTH,
        "_class_name": "FluxTransformer2DModel",
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "axes_dims_rope": [8, 8, 8],
        "guidance_embeds": True,
    },
}
TEXT = {"wan": 16, "wan i2v": 512, "hunyuan": 24, "hunyuan 1.5": 40, "flux": 24}
BLOCKS = ("blocks", "transformer_blocks", "single_transformer_blocks")
GRID = Grid(4, 12, 10)
PICTURE = Grid(1, 20, 24)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def described(name: str, has_time_per_token: bool = False) -> tuple[Transformer, Clip]:
    """The planner's model, and a clip of 480 tokens."""
    model = transformer_of(dict(CONFIGS[name]))
    grid = PICTURE if model.makes_pictures else GRID
    frames, height, width = (
        count * vae * patch for count, vae, patch in zip(grid, model.vae, model.patch, strict=True)
    )
    if not model.makes_pictures:
        frames = frames - model.vae.frames + 1
    clip = Clip(
        frames=frames,
        height=height,
        width=width,
        text=TEXT[name],
        has_time_per_token=has_time_per_token,
    )
    return model, clip


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of diffusers."""
    import diffusers

    torch.manual_seed(0)
    kind = getattr(diffusers, CONFIGS[name]["_class_name"])
    settings = {key: value for key, value in CONFIGS[name].items() if key[0] != "_"}
    return kind(**settings).to(dtype).train()


def adapted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with adapters of rank 4, which alone are trained."""
    from peft import LoraConfig

    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=list(TARGETS)))
    return model.to(dtype)


def inputs(
    name: str, dtype: torch.dtype = torch.float32, batch: int = 1, per_token: bool = False
) -> dict[str, Any]:
    """Arguments of the forward."""
    torch.manual_seed(1)
    model, clip = described(name)
    grid = clip.grid(model)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, dtype=dtype)

    def filled(value: float) -> Tensor:
        return torch.full((batch,), value, dtype=dtype)

    latents = [count * patch for count, patch in zip(grid, model.patch, strict=True)]
    tokens = clip.image_tokens(model)
    shared = {"timestep": filled(3.0), "encoder_hidden_states": random(TEXT[name], 32)}
    mask = torch.ones(batch, TEXT[name])
    if name == "flux":
        return shared | {
            "hidden_states": random(tokens, 16),
            "pooled_projections": random(16),
            "guidance": filled(1.0),
            "img_ids": torch.zeros(tokens, 3),
            "txt_ids": torch.zeros(TEXT[name], 3),
        }
    shared["hidden_states"] = random(4, *latents)
    if per_token:
        shared["timestep"] = torch.rand(batch, tokens)
    if name == "wan i2v":
        shared["encoder_hidden_states_image"] = random(257, 40)
    if name == "hunyuan":
        shared |= {
            "encoder_attention_mask": mask,
            "pooled_projections": random(16),
            "guidance": filled(1000.0),
        }
    if name == "hunyuan 1.5":
        shared |= {
            "timestep_r": filled(2.0),
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": random(256, 24),
            "encoder_attention_mask_2": torch.ones(batch, 256),
            "image_embeds": random(729, 40),
        }
    return shared


def predicted_of(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """The prediction."""
    return model(**arguments, return_dict=False)[0]
