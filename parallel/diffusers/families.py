"""Families of diffusers' transformers: the token streams and arguments of each class, as data.

A model embeds an image or a clip as *image tokens*. Text enters either through cross-attention,
which every rank computes for its own queries with the whole text, or as *text tokens*, which attend
jointly with the image tokens. Both streams are cut (each rank keeps its own tokens) where the
blocks begin, together with those arguments of a block that have a value per token; their names are
listed here. Everything before the blocks runs on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Stream = Literal["image", "text", "joint"]


@dataclass(frozen=True)
class Tokens:
    """An argument with a value per token, or a tuple or list of such tensors."""

    stream: Stream
    """Stream of the tokens; ``joint`` means one table for both streams, text tokens first."""
    dim: int = 1
    ndim: int | None = None
    """Number of dimensions with which the argument has a value per token; None means any number."""
    is_hidden: bool = True
    """True for hidden states, which differ in each block; other arguments are the same tensor for
    all blocks, and are cut once.
    """


def table(stream: Stream, dim: int = 1, ndim: int | None = None) -> Tokens:
    """Return an argument that is the same tensor for all blocks, such as a rotary table."""
    return Tokens(stream, dim, ndim, is_hidden=False)


@dataclass(frozen=True)
class TextMask:
    """A mask of the text's padding, ``[B, ..., T]``, in which the last T elements are the text's.

    Blocks do not get this mask: padding becomes a separate document instead. A block that needs a
    mask gets one of ones (``ones``), any other block gets None.
    """

    ones: bool = False


@dataclass(frozen=True)
class FirstImageTokens:
    """Number of leading image tokens that a block treats differently; each rank counts its own."""


Argument: TypeAlias = Tokens | TextMask | FirstImageTokens | tuple[Tokens, ...]
"""Description of a block's argument; a tuple of Tokens describes an argument that is a tuple."""

IMAGE = Tokens("image")
TEXT = Tokens("text")
IMAGE_TABLE = table("image")


@dataclass(frozen=True)
class Packing:
    """Names of the attributes and arguments of a block that packing several clips needs.

    Only blocks with a modulation per token can compute several clips at once, since each clip has
    its own timestep.
    """

    cross: str
    """Name of the block's attribute with the cross-attention to the text."""
    text: str = "encoder_hidden_states"
    text_mask: str | None = None
    """Name of the argument with a mask of the text ``[B, 1, T]``, which is added to scores."""
    modulation: str = "temb"
    modulation_ndim: int = 4
    """Number of dimensions of a modulation per token; its second dimension is over tokens."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the model that cannot be packed, each with the reason."""


@dataclass(frozen=True)
class Family:
    """Names of a class's blocks, arguments and modules that split tokens, attend, or gather."""

    blocks: Mapping[str, Mapping[str, Argument]]
    """For each of the model's lists of blocks, the arguments of a block's forward that are cut."""
    attention: tuple[str, ...] = ("attn",)
    """Names of a block's attributes with self-attention or joint attention."""
    pooling: tuple[str, ...] = ()
    """Names of a block's attributes that attend to the image tokens with queries that every rank
    has completely."""
    text_first: bool = False
    """True if joint attention has the text tokens before the image tokens."""
    last: str = "proj_out"
    """Name of the module whose output is gathered: the last one that works token by token."""
    inputs: Mapping[str, Tokens] = field(default_factory=dict)
    """Arguments of the model's own forward that are cut to this rank's tokens before it begins."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the model that are refused, each with the reason."""
    packing: Packing | None = None
    """Names for packing clips; None if the blocks have one modulation for all tokens."""

    @property
    def joint(self) -> bool:
        """True if text tokens attend jointly with the image tokens."""
        if "encoder_hidden_states" in self.inputs:
            return True
        return any("encoder_hidden_states" in arguments for arguments in self.blocks.values())


CONTROLNET = "a ControlNet's residuals are added between blocks; run the model without it"
WAN_BLOCK: dict[str, Argument] = {
    "hidden_states": IMAGE,
    "control_hidden_states": IMAGE,
    "temb": table("image", ndim=4),
    "rotary_emb": IMAGE_TABLE,
}
HUNYUAN_BLOCK: dict[str, Argument] = {
    "hidden_states": IMAGE,
    "encoder_hidden_states": TEXT,
    "attention_mask": TextMask(),
    "freqs_cis": table("image", 0),
    "image_rotary_emb": table("image", 0),
    "num_tokens": FirstImageTokens(),
}
FLUX_BLOCK: dict[str, Argument] = {
    "hidden_states": IMAGE,
    "encoder_hidden_states": TEXT,
    "image_rotary_emb": table("joint", 0),
}

WAN = Family(
    {"blocks": WAN_BLOCK},
    attention=("attn1",),
    # With a timestep per token, the final shift and scale are computed from it outside all blocks.
    inputs={"timestep": Tokens("image", ndim=2)},
    packing=Packing(
        "attn2",
        refused={
            "encoder_hidden_states_image": (
                "the cross-attention of Wan 2.1 I2V treats all keys but the last 512 as the image's"
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
# Audio has only a few hundred tokens, so every rank has all of them: video queries attend to them
# without communication, and audio queries attend to the video tokens of all ranks.
LTX2 = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "temb": IMAGE_TABLE,
            "temb_ca_scale_shift": IMAGE_TABLE,
            "temb_ca_gate": IMAGE_TABLE,
            "video_rotary_emb": table("image", -2),
            "ca_video_rotary_emb": table("image", -2),
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
            "freqs_cis": table("image", 0),
        }
    }
)
COGVIDEOX = Family(
    {
        "transformer_blocks": {
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "image_rotary_emb": table("image", 0),
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
# Flux 2 counts its text tokens before the blocks and removes that number of tokens after them, so
# the inputs are cut before the model's forward begins.
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
            "image_rotary_emb": (table("image", 0), table("text", 0)),
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
            "image_rotary_emb": table("image", 0),
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
"""Families, keyed by the name of the model's class."""
