"""Families of diffusers' transformers: the token streams and arguments of each class, as data.

A model embeds an image or a clip as *image tokens*. Text either comes in by cross-attention, which
every rank computes for its own queries with the whole text, or as *text tokens* that attend jointly
with the image's. Both streams are cut where the blocks begin; the arguments of a block that hold a
value per token are cut with them, and are listed here by their names. Everything before the blocks
runs on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Stream = Literal["image", "text", "joint"]


@dataclass(frozen=True)
class Tokens:
    """An argument with a value per token; tuples and lists of tensors are cut one by one."""

    stream: Stream
    """``joint`` is one table for both streams, the text's tokens first."""
    dim: int = 1
    ndim: int | None = None
    """The argument holds a value per token only if it has this number of dimensions."""
    is_hidden: bool = False
    """True for hidden states, which every block gets anew; other arguments are the same tensor for
    all blocks, and are cut once.
    """


@dataclass(frozen=True)
class TextMask:
    """A mask of the text's padding, ``[B, ..., T]``; padding becomes a document of its own instead.

    Its last T elements are the text's. ``ones`` gives the block a mask of ones, for blocks that
    need one; the others get None.
    """

    ones: bool = False


@dataclass(frozen=True)
class FirstImageTokens:
    """A number of leading image tokens that a block treats apart; a rank gets its share of it."""


Argument: TypeAlias = Tokens | TextMask | FirstImageTokens | tuple[Tokens, ...]
"""Content of an argument; a tuple of Tokens describes an argument that is a tuple."""

IMAGE = Tokens("image", is_hidden=True)
TEXT = Tokens("text", is_hidden=True)
IMAGE_TABLE = Tokens("image")


@dataclass(frozen=True)
class Packing:
    """Names by which the clips of a packed sequence are told apart in a block.

    Only blocks that take modulation for each token can compute several clips at once: each clip has
    its own time.
    """

    cross: str
    """Attribute of a block that holds the cross-attention to the text."""
    text: str = "encoder_hidden_states"
    text_mask: str | None = None
    """Argument with a mask of the text ``[B, 1, T]`` that is added to scores."""
    modulation: str = "temb"
    modulation_ndim: int = 4
    """Dimensions of modulation for each token, the second of which counts the tokens."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the model that cannot be packed, with the reasons."""


@dataclass(frozen=True)
class Family:
    """Names of the blocks, arguments and modules at which a class is cut, attends and is joined."""

    blocks: Mapping[str, Mapping[str, Argument]]
    """Lists of blocks by their attribute, and the arguments of their forward that are cut."""
    attention: tuple[str, ...] = ("attn",)
    """Attributes of a block that hold self-attention or joint attention."""
    pooling: tuple[str, ...] = ()
    """Attributes of a block that hold attention of whole queries to the image tokens."""
    text_first: bool = False
    """True if joint attention puts the text's tokens before the image's."""
    last: str = "proj_out"
    """The module whose output is gathered: the last one that works token by token."""
    inputs: Mapping[str, Tokens] = field(default_factory=dict)
    """Arguments of the model itself that are cut, for values that never pass through a block."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the model that are refused, with the reasons."""
    packing: Packing | None = None
    """Names for packed clips; None if the blocks have one modulation for all tokens."""

    @property
    def joint(self) -> bool:
        """True if text tokens attend together with the image's."""
        if "encoder_hidden_states" in self.inputs:
            return True
        return any("encoder_hidden_states" in arguments for arguments in self.blocks.values())


CONTROLNET = "a ControlNet's residuals are added between blocks; run the model without it"
WAN_BLOCK: dict[str, Argument] = {
    "hidden_states": IMAGE,
    "control_hidden_states": IMAGE,
    "temb": Tokens("image", ndim=4),
    "rotary_emb": IMAGE_TABLE,
}
HUNYUAN_BLOCK: dict[str, Argument] = {
    "hidden_states": IMAGE,
    "encoder_hidden_states": TEXT,
    "attention_mask": TextMask(),
    "freqs_cis": Tokens("image", 0),
    "image_rotary_emb": Tokens("image", 0),
    "num_tokens": FirstImageTokens(),
}
FLUX_BLOCK: dict[str, Argument] = {
    "hidden_states": IMAGE,
    "encoder_hidden_states": TEXT,
    "image_rotary_emb": Tokens("joint", 0),
}

WAN = Family(
    {"blocks": WAN_BLOCK},
    attention=("attn1",),
    # With a time per token, the final shift and scale are computed from it outside all blocks.
    inputs={"timestep": Tokens("image", ndim=2)},
    packing=Packing(
        "attn2",
        refused={
            "encoder_hidden_states_image": (
                "the cross-attention of Wan 2.1 I2V takes all keys but the last 512 for the image's"
            )
        },
    ),
)
WAN_VACE = Family({"blocks": WAN_BLOCK, "vace_blocks": WAN_BLOCK}, attention=("attn1",))
LTX = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "temb": IMAGE_TABLE,
            "image_rotary_emb": IMAGE_TABLE,
        }
    },
    attention=("attn1",),
    inputs={"timestep": Tokens("image", ndim=2)},
    packing=Packing("attn2", text_mask="encoder_attention_mask", modulation_ndim=3),
)
# Audio is some hundred tokens: every rank has all of them, so the video's queries need no other
# rank, and the audio's queries attend to every rank's video tokens.
LTX2 = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "temb": IMAGE_TABLE,
            "temb_ca_scale_shift": IMAGE_TABLE,
            "temb_ca_gate": IMAGE_TABLE,
            "video_rotary_emb": Tokens("image", -2),
            "ca_video_rotary_emb": Tokens("image", -2),
        }
    },
    attention=("attn1",),
    pooling=("video_to_audio_attn",),
    inputs={"timestep": Tokens("image", ndim=2)},
    refused={
        "video_self_attention_mask": "a mask among image tokens is not supported; leave it out",
        "perturbation_mask": "guidance by perturbed layers is for sampling; leave it out",
        "spatio_temporal_guidance_blocks": (
            "guidance by perturbed layers is for sampling; leave it out"
        ),
    },
)
HUNYUAN_VIDEO = Family(
    {"transformer_blocks": HUNYUAN_BLOCK, "single_transformer_blocks": HUNYUAN_BLOCK}
)
HUNYUAN_VIDEO_15 = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "attention_mask": TextMask(ones=True),
            "freqs_cis": Tokens("image", 0),
        }
    }
)
COGVIDEOX = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "image_rotary_emb": Tokens("image", 0),
        }
    },
    attention=("attn1",),
    text_first=True,
)
FLUX = Family(
    {"transformer_blocks": FLUX_BLOCK, "single_transformer_blocks": FLUX_BLOCK},
    text_first=True,
    refused={
        "controlnet_block_samples": CONTROLNET,
        "controlnet_single_block_samples": CONTROLNET,
    },
)
# Flux 2 counts its text tokens before the blocks and removes as many after them, so everything is
# cut before the model sees it.
FLUX2 = Family(
    {"transformer_blocks": {}, "single_transformer_blocks": {}},
    text_first=True,
    inputs={
        "hidden_states": IMAGE,
        "encoder_hidden_states": TEXT,
        "img_ids": Tokens("image", -2),
        "txt_ids": Tokens("text", -2),
    },
    refused={"kv_cache_mode": "a cache of reference tokens is for sampling; leave it out"},
)
QWEN_IMAGE = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "encoder_hidden_states_mask": TextMask(),
            "image_rotary_emb": (Tokens("image", 0), Tokens("text", 0)),
            "modulate_index": IMAGE_TABLE,
        }
    },
    text_first=True,
    refused={"controlnet_block_samples": CONTROLNET},
)
SD3 = Family(
    {"transformer_blocks": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}},
    attention=("attn", "attn2"),
    refused={"block_controlnet_hidden_states": CONTROLNET},
)
MOCHI = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "encoder_attention_mask": TextMask(ones=True),
            "image_rotary_emb": Tokens("image", 0),
        }
    },
    attention=("attn1",),
)
PIXART = Family({"transformer_blocks": {"hidden_states": IMAGE}}, attention=("attn1",))
DIT = Family(
    {"transformer_blocks": {"hidden_states": IMAGE}}, attention=("attn1",), last="proj_out_2"
)

FAMILIES: dict[str, Family] = {
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN_VACE,
    "LTXVideoTransformer3DModel": LTX,
    "LTX2VideoTransformer3DModel": LTX2,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO_15,
    "CogVideoXTransformer3DModel": COGVIDEOX,
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX2,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "SD3Transformer2DModel": SD3,
    "MochiTransformer3DModel": MOCHI,
    "PixArtTransformer2DModel": PIXART,
    "DiTTransformer2DModel": DIT,
}
"""Families by the class's name."""
