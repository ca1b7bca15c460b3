"""Tiny image transformers of diffusers, and inputs of their forwards."""

from typing import Any

import torch
from torch import nn

from tests.parallel.diffusers.draws import (
    HEADS,
    TEXT,
    WIDTH,
    clip,
    mask,
    picture,
    positions,
    text,
    times,
)


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        pooled_projection_dim=10,
        axes_dims_rope=(2, 2, 4),
    )


def flux_inputs(image: int = 45, text_length: int = TEXT) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, image, 4),
        "encoder_hidden_states": text(length=text_length),
        "pooled_projections": torch.randn(2, 10),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": positions(image, 3),
        "txt_ids": torch.zeros(text_length, 3),
    }


def flux2() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        timestep_guidance_channels=8,
        axes_dims_rope=(2, 2, 2, 2),
    )


def flux2_inputs() -> dict[str, Any]:
    txt_ids = torch.zeros(TEXT, 4)
    txt_ids[:, 3] = torch.arange(TEXT)
    return {
        "hidden_states": torch.randn(2, 45, 4),
        "encoder_hidden_states": text(),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": positions(45, 4),
        "txt_ids": txt_ids,
        "guidance": torch.tensor([3.0, 4.0]),
    }


def qwen() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        axes_dims_rope=(2, 2, 4),
    )


def qwen_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 45, 16),
        "encoder_hidden_states": text(),
        "encoder_hidden_states_mask": mask(),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_shapes": [[(1, 9, 5)], [(1, 9, 5)]],
    }


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=18,
        in_channels=4,
        num_layers=2,
        attention_head_dim=WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        caption_projection_dim=HEADS * WIDTH,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def sd3_inputs() -> dict[str, Any]:
    return {
        "hidden_states": picture(18, 10),
        "encoder_hidden_states": text(),
        "pooled_projections": torch.randn(2, 10),
        "timestep": times(),
    }


def mochi() -> nn.Module:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        num_layers=2,
        pooled_projection_dim=24,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
    )


def mochi_inputs() -> dict[str, Any]:
    return {
        "hidden_states": clip(),
        "encoder_hidden_states": text(),
        "timestep": times(),
        "encoder_attention_mask": mask().bool(),
    }


def pixart() -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=HEADS * WIDTH,
        sample_size=10,
        caption_channels=16,
        use_additional_conditions=False,
    )


def pixart_inputs() -> dict[str, Any]:
    return {
        "hidden_states": picture(10, 10),
        "encoder_hidden_states": text(),
        "timestep": times(),
        "encoder_attention_mask": mask(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=4,
        num_layers=2,
        sample_size=10,
        num_embeds_ada_norm=20,
    )


def dit_inputs() -> dict[str, Any]:
    return {
        "hidden_states": picture(10, 10),
        "timestep": torch.tensor([3, 500]),
        "class_labels": torch.tensor([1, 7]),
    }
