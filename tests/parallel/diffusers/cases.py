"""Tiny random models of diffusers with inputs: 45 image tokens or so, padded text, a batch of 2."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

HEADS = 12
"""Divided by 2, 3 and 4 ranks."""
WIDTH = 8
TEXT = 7
MIN_NORM = 1e-3
"""Smallest norm that a gradient's error is relative to, as a share of all gradients' norm."""
FRAMES, HEIGHT, WIDTH_OF_GRID = 3, 3, 5
"""Image tokens: 45, which no number of ranks here divides."""


@dataclass(frozen=True)
class Case:
    """A model and inputs of its forward."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


def model_of(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The case's model with random weights, the zero-initialised ones included."""
    torch.manual_seed(0)
    model = case.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.add_(noise, alpha=0.1)
    return model.to(dtype)


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The case's inputs, floating-point ones in ``dtype``."""
    torch.manual_seed(1)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(Tensor, cast, case.inputs())


def loss_of(model: nn.Module, inputs: Mapping[str, Any], sum_only: bool = False) -> Tensor:
    """A loss in which every element of the prediction has another weight; its mean, or sum."""
    return loss_of_predictions(model(**inputs, return_dict=False), sum_only)


def loss_of_predictions(predictions: Sequence[Tensor], sum_only: bool = False) -> Tensor:
    """The sum of the losses of predictions; LTX-2 predicts sound, too."""
    losses = []
    for prediction in predictions:
        count = torch.arange(prediction.numel(), device=prediction.device, dtype=torch.float64)
        target = (0.37 * count).sin().view(prediction.shape).to(prediction.dtype)
        squares = (prediction - target) ** 2
        losses.append(squares.sum() if sum_only else squares.mean())
    return torch.stack(losses).sum()


def gradients(
    loss: Tensor, model: nn.Module, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The loss and every gradient, their mean over the ranks of a group; 0 where there is none."""
    parameters = [x for x in model.parameters() if x.requires_grad]
    computed = torch.autograd.grad(loss, parameters, allow_unused=True)
    results = [loss.detach().clone()]
    for parameter, gradient in zip(parameters, computed, strict=True):
        results.append(torch.zeros_like(parameter) if gradient is None else gradient.clone())
    if group is not None:
        for x in results:
            dist.all_reduce(x, group=group)
            x /= dist.get_world_size(group)
    return results


def errors(
    mine: list[Tensor], expected: list[Tensor], model: nn.Module, bound: float
) -> dict[str, float]:
    """The error of each tensor in the 2-norm, of those over the bound.

    It is relative to the tensor's own norm, or to 1e-3 of all gradients' together: the gradient of
    a key's bias is 0 in exact arithmetic.
    """
    names = ["loss", *(name for name, x in model.named_parameters() if x.requires_grad)]
    min_norm = MIN_NORM * torch.stack([x.double().norm() for x in expected[1:]]).norm()
    wrong = {}
    for name, x, reference in zip(names, mine, expected, strict=True):
        difference = (x.double() - reference.double()).norm()
        error = float(difference / reference.double().norm().clamp(min=min_norm))
        if not error < bound:
            wrong[name] = error
    return wrong


def clip(channels: int = 4, patch: int = 2) -> Tensor:
    return torch.randn(2, channels, FRAMES, patch * HEIGHT, patch * WIDTH_OF_GRID)


def picture(height: int, width: int, channels: int = 4) -> Tensor:
    return torch.randn(2, channels, height, width)


def text(width: int = 16, length: int = TEXT) -> Tensor:
    return torch.randn(2, length, width)


def mask(first: int = 5, second: int = TEXT) -> Tensor:
    """The first sample has 5 text tokens of 7."""
    return (torch.arange(TEXT) < torch.tensor([[first], [second]])).long()


def positions(length: int, axes: int) -> Tensor:
    """Ids of the axes for a grid of 5 columns, float ``[length, axes]``."""
    index = torch.arange(length)
    ids = torch.zeros(length, axes)
    ids[:, 1] = index // 5
    ids[:, 2] = index % 5
    return ids


def times() -> Tensor:
    return torch.tensor([3.0, 500.0])


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


CASES = {
    "wan": Case(wan, wan_inputs),
    "wan, time per token": Case(wan, wan_time_per_token),
    "wan, image to video": Case(
        lambda: wan(image_dim=10, added_kv_proj_dim=HEADS * 12), wan_i2v_inputs
    ),
    "wan vace": Case(vace, vace_inputs),
    "ltx": Case(ltx, ltx_inputs),
    "ltx, time per token": Case(ltx, ltx_time_per_token),
    "ltx 2": Case(ltx2, ltx2_inputs),
    "ltx 2, time per token": Case(lambda: ltx2("split"), lambda: ltx2_inputs(True)),
    "hunyuan": Case(hunyuan, hunyuan_inputs),
    "hunyuan, first frame": Case(
        lambda: hunyuan(image_condition_type="token_replace"), hunyuan_inputs
    ),
    "hunyuan 1.5": Case(hunyuan15, hunyuan15_inputs),
    "cogvideox": Case(cogvideox, cogvideox_inputs),
    "flux": Case(flux, flux_inputs),
    "flux, long text": Case(flux, lambda: flux_inputs(9, 40)),
    "flux, few tokens": Case(flux, lambda: flux_inputs(2, 1)),
    "flux 2": Case(flux2, flux2_inputs),
    "qwen": Case(qwen, qwen_inputs),
    "sd3": Case(sd3, sd3_inputs),
    "mochi": Case(mochi, mochi_inputs),
    "pixart": Case(pixart, pixart_inputs),
    "dit": Case(dit, dit_inputs),
}
