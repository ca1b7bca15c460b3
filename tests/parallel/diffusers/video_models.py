"""Tiny video transformers of diffusers, and inputs of their forwards."""

from typing import Any

import torch
from torch import nn

from tests.parallel.diffusers.draws import (
    FRAMES,
    HEADS,
    HEIGHT,
    TEXT,
    WIDTH,
    WIDTH_OF_GRID,
    clip,
    mask,
    text,
    times,
)


def wan(**settings: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**WAN, **settings)


WAN: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def wan_inputs() -> dict[str, Any]:
    return {"hidden_states": clip(), "timestep": times(), "encoder_hidden_states": text()}


def wan_clip(
    frames: int, height: int, width: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Inputs of one clip of another size, by its grid of tokens."""
    generator = torch.Generator().manual_seed(100 * frames + 10 * height + width)
    latents = torch.randn(1, 4, frames, 2 * height, 2 * width, generator=generator)
    embeddings = torch.randn(1, TEXT, 16, generator=generator)
    return {
        "hidden_states": latents.to(dtype),
        "timestep": torch.tensor([250.0], dtype=dtype),
        "encoder_hidden_states": embeddings.to(dtype),
    }


def wan_time_per_token() -> dict[str, Any]:
    """The first frame is given: its time is 0, as in Wan 2.2 TI2V."""
    tokens = FRAMES * HEIGHT * WIDTH_OF_GRID
    timestep = times()[:, None].repeat(1, tokens)
    timestep[:, : HEIGHT * WIDTH_OF_GRID] = 0
    return {**wan_inputs(), "timestep": timestep}


def wan_i2v_inputs() -> dict[str, Any]:
    return {**wan_inputs(), "encoder_hidden_states_image": torch.randn(2, 6, 10)}


def vace() -> nn.Module:
    from diffusers import WanVACETransformer3DModel

    return WanVACETransformer3DModel(**WAN, vace_layers=[0, 1], vace_in_channels=6)


def vace_inputs() -> dict[str, Any]:
    return {**wan_inputs(), "control_hidden_states": clip(6)}


def ltx() -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        cross_attention_dim=HEADS * WIDTH,
        num_layers=2,
        caption_channels=16,
    )


def ltx_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 45, 4),
        "encoder_hidden_states": text(),
        "timestep": times(),
        "encoder_attention_mask": mask(),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH_OF_GRID,
    }


def ltx_time_per_token() -> dict[str, Any]:
    timestep = times()[:, None].repeat(1, 45)
    timestep[:, :15] = 0
    return {**ltx_inputs(), "timestep": timestep}


def ltx2(rope: str = "interleaved") -> nn.Module:
    from diffusers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=8,
        cross_attention_dim=HEADS * 8,
        audio_in_channels=3,
        audio_out_channels=3,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=HEADS * 4,
        num_layers=2,
        caption_channels=16,
        rope_type=rope,
    )


def ltx2_inputs(time_per_token: bool = False) -> dict[str, Any]:
    inputs = {
        **ltx_inputs(),
        "audio_hidden_states": torch.randn(2, 11, 3),
        "audio_encoder_hidden_states": text(),
        "audio_encoder_attention_mask": mask(),
        "audio_num_frames": 11,
    }
    if time_per_token:
        inputs["audio_timestep"] = inputs["timestep"]
        inputs["timestep"] = ltx_time_per_token()["timestep"]
    return inputs


def hunyuan(**settings: Any) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        pooled_projection_dim=10,
        rope_axes_dim=(2, 2, 4),
        **settings,
    )


def hunyuan_inputs(guidance: bool = True) -> dict[str, Any]:
    inputs = {
        "hidden_states": clip(),
        "timestep": times(),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": mask(),
        "pooled_projections": torch.randn(2, 10),
    }
    if guidance:
        inputs["guidance"] = torch.tensor([6.0, 4.0])
    return inputs


def hunyuan15() -> nn.Module:
    from diffusers import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=10,
        rope_axes_dim=(2, 2, 4),
    )


def hunyuan15_inputs() -> dict[str, Any]:
    return {
        "hidden_states": clip(patch=1),
        "timestep": times(),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": mask(),
        "encoder_hidden_states_2": text(12, 3),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "image_embeds": torch.randn(2, 4, 10),
    }


def cogvideox() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
    )


def cogvideox_inputs() -> dict[str, Any]:
    angles = torch.rand(45, WIDTH)
    return {
        "hidden_states": clip().transpose(1, 2),
        "encoder_hidden_states": text(),
        "timestep": times(),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
