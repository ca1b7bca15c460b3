"""HunyuanVideo and HunyuanVideo 1.5: text tokens attend jointly with the clip's.

A refiner of two blocks prepares the text tokens, on every rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from planner.diffusion.parts import (
    JointBlock,
    Tokens,
    continuous_end,
    embedded_input,
    embedded_time,
    feed_forward,
    modulations,
    two_products,
)
from planner.diffusion.symbols import Symbol
from planner.diffusion.tape import Tape
from planner.diffusion.transformer import Blocks, Grid, Transformer

REFINER_RATIO = 4
GLYPH_TOKENS = 256
"""Number of tokens of HunyuanVideo 1.5's second text encoder, ByT5."""
GLYPH_WIDTH = 2048
PICTURE_TOKENS = 729
"""Number of tokens of HunyuanVideo 1.5's picture; without a picture they are masked."""
KINDS_OF_TEXT = 3


class HunyuanVideo(Transformer):
    """diffusers' ``HunyuanVideoTransformer3DModel``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
        "image_condition_type": None,
    }
    joint = True
    text_tokens = 256

    def _check(self) -> None:
        """Refuse norms of q and k other than RMSNorm, and a first frame with its own timestep."""
        self._require("qk_norm", "rms_norm")
        self._require("image_condition_type", None, "latent_concat")

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return int(self.hidden * self.config["mlp_ratio"])

    @property
    def patch(self) -> Grid:
        """Latents per token along frames, height and width."""
        size = self.config["patch_size"]
        return Grid(self.config["patch_size_t"], size, size)

    @property
    def vae(self) -> Grid:
        """Pixels per latent along frames, height and width."""
        return Grid(4, 8, 8)

    @property
    def _block(self) -> JointBlock:
        return JointBlock(
            self.hidden, self.inner, self.heads, has_eager_norms=True, rotates_text=False
        )

    @property
    def blocks(self) -> list[Blocks]:
        """The two-stream blocks, then the one-stream blocks."""
        return [
            Blocks(self.layers, self._block.two_streams),
            Blocks(self.config["num_single_layers"], self._block.one_stream),
        ]

    def embed(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the embeddings of patches, time, guidance and text."""
        samples = tokens.samples
        image_rows = samples * tokens.whole_image
        image = embedded_input(tape, image_rows, self.patch_channels, self.hidden)
        time = embedded_time(tape, samples, self.hidden)
        if self.config["guidance_embeds"]:
            time = tape.add(time, embedded_time(tape, samples, self.hidden))
        pooled = tape.input(samples, self.config["pooled_projection_dim"], is_tracked=False)
        time = tape.add(time, two_products(tape, pooled, self.hidden))
        return [image, time, self._refined_text(tape, samples, tokens.whole_text)]

    def _refined_text(self, tape: Tape, samples: int, text_tokens: int) -> Symbol:
        """Return the refined text tokens; the refiner also embeds the timestep and their mean."""
        hidden = self.hidden
        channels = self.config["text_embed_dim"]
        pooled = tape.input(samples, channels, is_tracked=False)
        time = embedded_time(tape, samples, hidden)
        time = tape.add(time, two_products(tape, pooled, hidden))
        x = embedded_input(tape, samples * text_tokens, channels, hidden)
        for _ in range(self.config["num_refiner_layers"]):
            x = self._refined(tape, x, time)
        return x

    def _refined(self, tape: Tape, x: Symbol, time: Symbol) -> Symbol:
        """Return the text tokens after a block of the refiner."""
        hidden = self.hidden
        normed = tape.layer_norm(x, is_affine=True)
        q = tape.linear(normed, hidden, "attn.to_q")
        k = tape.linear(normed, hidden, "attn.to_k")
        v = tape.linear(normed, hidden, "attn.to_v")
        attended = tape.local_attention(q, k, v, self.heads)
        attended = tape.linear(attended, hidden, "attn.to_out.0")
        gate, last_gate = modulations(tape, time, hidden, 2)
        x = tape.add(x, tape.multiply(attended, gate))

        normed = tape.layer_norm(x, is_affine=True)
        transformed = feed_forward(tape, normed, REFINER_RATIO * hidden, "ff")
        return tape.add(x, tape.multiply(transformed, last_gate))

    def finish(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the last norm and the output projection."""
        return continuous_end(tape, tokens, self.hidden, self.out_width)


class HunyuanVideo15(HunyuanVideo):
    """diffusers' ``HunyuanVideo15Transformer3DModel``, with a picture and a second text encoder."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "text_embed_dim": 3584,
        "text_embed_2_dim": 1472,
        "image_embed_dim": 1152,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
        "target_size": 640,
        "task_type": "i2v",
        "use_meanflow": False,
    }
    text_tokens = 1000
    added_tokens = GLYPH_TOKENS + PICTURE_TOKENS

    def _check(self) -> None:
        """Refuse norms of q and k other than RMSNorm."""
        self._require("qk_norm", "rms_norm")

    @property
    def vae(self) -> Grid:
        """Pixels per latent along frames, height and width."""
        return Grid(4, 16, 16)

    @property
    def blocks(self) -> list[Blocks]:
        """The blocks, all of two streams."""
        block = replace(self._block, has_mask=True)
        return [Blocks(self.layers, block.two_streams)]

    def embed(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the embeddings of patches, time, both texts and the picture."""
        config = self.config
        samples = tokens.samples
        hidden = self.hidden
        image_rows = samples * tokens.whole_image
        image = embedded_input(tape, image_rows, self.patch_channels, hidden)
        time = embedded_time(tape, samples, hidden)
        if config["use_meanflow"]:
            time = tape.add(time, embedded_time(tape, samples, hidden))

        # Three kinds of text tokens, each marked by its own vector.
        kinds = tape.parameter(KINDS_OF_TEXT, hidden)
        text = self._refined_text(tape, samples, tokens.whole_text - self.added_tokens)

        glyphs = tape.input(samples * GLYPH_TOKENS, config["text_embed_2_dim"], is_tracked=False)
        x = tape.layer_norm(glyphs, is_affine=True)
        for name in ("linear_1", "linear_2"):
            x = tape.activation(tape.linear(x, GLYPH_WIDTH, name))
        glyphs = tape.linear(x, hidden, "linear_3")

        width = config["image_embed_dim"]
        picture = tape.input(samples * PICTURE_TOKENS, width, is_tracked=False)
        picture = tape.linear(tape.layer_norm(picture, is_affine=True), width, "linear_1")
        picture = tape.linear(tape.activation(picture), hidden, "linear_2")
        picture = tape.layer_norm(picture, is_affine=True)
        joined = tape.add(tape.join_tokens(picture, glyphs, text), kinds)
        return [image, time, joined]
