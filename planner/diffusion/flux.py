"""Flux, which makes pictures: text tokens attend jointly with the image's."""

from collections.abc import Mapping
from typing import Any, ClassVar

from planner.diffusion.parts import (
    JointBlock,
    Tokens,
    continuous_end,
    embedded_input,
    embedded_time,
    two_products,
)
from planner.diffusion.symbols import Symbol
from planner.diffusion.tape import Tape
from planner.diffusion.transformer import Blocks, Grid, Transformer

MLP_RATIO = 4


class Flux(Transformer):
    """diffusers' ``FluxTransformer2DModel``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    }
    joint = True
    makes_pictures = True
    text_tokens = 512

    def _check(self) -> None:
        """Refuse a ``patch_size`` other than 1, which no published model has."""
        self._require("patch_size", 1)

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return MLP_RATIO * self.hidden

    @property
    def patch(self) -> Grid:
        """Latents per token: the pipeline packs 2 x 2 of them into a token's 64 channels."""
        return Grid(1, 2, 2)

    @property
    def patch_channels(self) -> int:
        """Input channels per token; the pipeline has packed the latents into them already."""
        return int(self.config["in_channels"])

    @property
    def out_width(self) -> int:
        """Output channels per token."""
        return self.out_channels

    @property
    def vae(self) -> Grid:
        """Pixels per latent along frames, height and width."""
        return Grid(1, 8, 8)

    @property
    def blocks(self) -> list[Blocks]:
        """The two-stream blocks, then the one-stream blocks."""
        block = JointBlock(
            self.hidden, self.inner, self.heads, has_eager_norms=False, rotates_text=True
        )
        return [
            Blocks(self.layers, block.two_streams),
            Blocks(self.config["num_single_layers"], block.one_stream),
        ]

    def embed(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the embeddings of patches, text, time, guidance and the pooled text."""
        samples = tokens.samples
        hidden = self.hidden
        image = embedded_input(tape, samples * tokens.whole_image, self.patch_channels, hidden)
        text_width = self.config["joint_attention_dim"]
        text = embedded_input(tape, samples * tokens.whole_text, text_width, hidden)
        time = embedded_time(tape, samples, hidden)
        if self.config["guidance_embeds"]:
            time = tape.add(time, embedded_time(tape, samples, hidden))
        pooled = tape.input(samples, self.config["pooled_projection_dim"], is_tracked=False)
        return [image, text, tape.add(time, two_products(tape, pooled, hidden))]

    def finish(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the last norm and the output projection."""
        return continuous_end(tape, tokens, self.hidden, self.out_width)
