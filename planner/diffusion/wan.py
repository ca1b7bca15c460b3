"""Wan 2.1 and 2.2: self-attention of the clip's tokens, cross-attention to the text.

Norms, shifts, scales and gates are computed in float32, whatever the model's dtype.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from planner.diffusion.parts import Tokens, feed_forward, two_products
from planner.diffusion.symbols import Symbol
from planner.diffusion.tape import Tape
from planner.diffusion.transformer import Blocks, Grid, ModelError, Transformer

ROTATED_IN_BF16 = 30
"""Bytes per element that the forward pass of Wan's rotary positions reads and writes."""
ROTATED_IN_FLOAT32 = 36
PICTURE_TOKENS = 257
"""Number of tokens that CLIP makes of the picture for an image-to-video model."""
LATENT_CHANNELS = {16: Grid(4, 8, 8), 48: Grid(4, 16, 16)}
"""Pixels per latent of Wan 2.1's autoencoder and of Wan 2.2 TI2V-5B's, keyed by latent channels."""


class Wan(Transformer):
    """diffusers' ``WanTransformer3DModel``, of text-to-video and image-to-video models."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }
    joint = False
    text_tokens = 512

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Set the number of picture tokens, which only image-to-video models have."""
        super().__init__(config)
        if config["image_dim"] is not None:
            self.added_tokens = config["pos_embed_seq_len"] or PICTURE_TOKENS

    def _check(self) -> None:
        """Refuse a configuration with only one of the two keys of image-to-video models."""
        if (self.config["image_dim"] is None) != (self.config["added_kv_proj_dim"] is None):
            raise ModelError(
                f"image_dim is {self.config['image_dim']}, but added_kv_proj_dim is "
                f"{self.config['added_kv_proj_dim']}; image-to-video models have both, and others "
                "have neither"
            )

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return int(self.config["ffn_dim"])

    @property
    def patch(self) -> Grid:
        """Latents per token along frames, height and width."""
        return Grid(*self.config["patch_size"])

    @property
    def vae(self) -> Grid:
        """Pixels per latent along frames, height and width."""
        return LATENT_CHANNELS.get(self.out_channels, LATENT_CHANNELS[16])

    @property
    def blocks(self) -> list[Blocks]:
        """The blocks, all of one kind."""
        return [Blocks(self.layers, self._block)]

    def embed(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the embeddings of patches, time, text and picture."""
        samples = tokens.samples
        latents = tape.input(samples * tokens.whole_image, self.patch_channels, is_tracked=False)
        image = tape.linear(latents, self.hidden, "patch_embedding")

        channels = self.config["freq_dim"]
        frequencies = tape.input(self._time_rows(tokens), channels, is_tracked=False)
        time = two_products(tape, frequencies, self.hidden)
        modulation = tape.linear(tape.activation(time), 6 * self.hidden, "time_proj")

        # The text, without the picture's tokens.
        text_rows = samples * (tokens.whole_text - self.added_tokens)
        text = tape.input(text_rows, self.config["text_dim"], is_tracked=False)
        text = two_products(tape, text, self.hidden)
        outputs = [image, time, modulation, text]
        if self.added_tokens:
            outputs.append(self._embedded_picture(tape, samples))
        return outputs

    def _embedded_picture(self, tape: Tape, samples: int) -> Symbol:
        width = self.config["image_dim"]
        picture = tape.input(samples * self.added_tokens, width, is_tracked=False)
        if self.config["pos_embed_seq_len"] is not None:
            positions = tape.parameter(self.added_tokens, width)
            picture = tape.add(picture, positions)
        normed = tape.layer_norm(picture, is_affine=True)
        transformed = feed_forward(tape, normed, width, "ff", width=self.hidden)
        return tape.layer_norm(transformed, is_affine=True)

    def finish(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the last norm, modulated by the timestep, and the output projection."""
        image = tape.input(tokens.image_rows, self.hidden)
        is_trained = tape.training.trains_all
        time = tape.input(self._time_rows(tokens), self.hidden, is_tracked=is_trained)
        table = tape.parameter(1, 2 * self.hidden)
        twice = tape.join_channels(time, time)
        shift, scale = tape.columns(tape.add(twice, table), 2)

        normed = tape.layer_norm(tape.cast(image, 4))
        normed = tape.modulate(normed, scale, shift)
        normed = tape.cast(normed, tape.size)
        return [tape.linear(normed, self.out_width, "proj_out")]

    def _time_rows(self, tokens: Tokens) -> int:
        """Return the number of timestep embeddings: one per local image token or per sample."""
        return tokens.image_rows if tokens.has_time_per_token else tokens.samples

    def _block(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record a block: self-attention, cross-attention, feed-forward."""
        size = tape.size
        x = tape.input(tokens.image_rows, self.hidden)

        # Scales and gates are float32, so what they multiply becomes float32 too.
        modulation = self._modulation(tape, tokens)
        shift, scale, gate, last_shift, last_scale, last_gate = modulation

        # Self-attention.
        normed = tape.layer_norm(tape.cast(x, 4))
        normed = tape.modulate(normed, scale, shift)
        attended = self._self_attention(tape, tape.cast(normed, size))
        x = self._gated_sum(tape, x, attended, gate)

        # Cross-attention; its norm is Identity in models without one.
        normed = tape.cast(x, 4)
        if self.config["cross_attn_norm"]:
            normed = tape.layer_norm(normed, is_affine=True)
        attended = self._cross_attention(tape, tape.cast(normed, size), tokens)
        x = tape.add(x, attended)

        # Feed-forward.
        normed = tape.layer_norm(tape.cast(x, 4))
        normed = tape.modulate(normed, last_scale, last_shift)
        normed = tape.cast(normed, size)
        transformed = feed_forward(tape, normed, self.inner, "ffn")
        tape.hold(attended, normed, transformed)
        return [self._gated_sum(tape, x, tape.cast(transformed, 4), last_gate)]

    def _gated_sum(self, tape: Tape, x: Symbol, update: Symbol, gate: Symbol) -> Symbol:
        """Return x plus the gated update, computed in float32."""
        gated = tape.multiply(update, gate)
        total = tape.add(tape.cast(x, 4), gated)
        return tape.cast(total, tape.size)

    def _modulation(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Return shifts, scales and gates: the block's table plus the timestep embedding."""
        width = 6 * self.hidden
        rows = self._time_rows(tokens)
        is_trained = tape.training.trains_all
        time = tape.input(rows, width, is_tracked=is_trained, is_shared=True)
        table = tape.parameter(1, width)
        return tape.columns(tape.add(tape.cast(time, 4), table), 6)

    def _self_attention(self, tape: Tape, x: Symbol) -> Symbol:
        """Return the attention to the clip's tokens of all ranks."""
        q = tape.linear(x, self.hidden, "attn1.to_q")
        k = tape.linear(x, self.hidden, "attn1.to_k")
        v = tape.linear(x, self.hidden, "attn1.to_v")
        q = tape.rotate(tape.rms_norm(q), ROTATED_IN_BF16, ROTATED_IN_FLOAT32)
        k = tape.rotate(tape.rms_norm(k), ROTATED_IN_BF16, ROTATED_IN_FLOAT32)
        out = tape.joint_attention(q, k, v, self.heads)
        return tape.linear(out, self.hidden, "attn1.to_out.0")

    def _cross_attention(self, tape: Tape, x: Symbol, tokens: Tokens) -> Symbol:
        """Return the attention to the whole text, and to the picture."""
        is_trained = tape.training.trains_all
        rows = tokens.text_rows
        joined = tape.input(rows, self.hidden, is_tracked=is_trained, is_shared=True)
        picture_rows = tokens.samples * self.added_tokens
        q = tape.linear(x, self.hidden, "attn2.to_q")
        q = tape.rms_norm(q)

        # Attention to the text, then to the picture, whose output is added.
        k, v = self._keys(tape, joined, rows - picture_rows, "attn2.to_k", "attn2.to_v")
        out = tape.local_attention(q, k, v, self.heads)
        if self.added_tokens:
            names = ("attn2.add_k_proj", "attn2.add_v_proj")
            k, v = self._keys(tape, joined, picture_rows, *names)
            out = tape.add(out, tape.local_attention(q, k, v, self.heads))
        return tape.linear(out, self.hidden, "attn2.to_out.0")

    def _keys(
        self, tape: Tape, joined: Symbol, rows: int, to_k: str, to_v: str
    ) -> tuple[Symbol, Symbol]:
        """Return keys and values of the text's or the picture's tokens.

        With several samples they are not contiguous, so each projection copies them first.
        """
        for_keys = tape.some_tokens(joined, rows, is_contiguous=True)
        for_values = tape.some_tokens(joined, rows, is_contiguous=True)
        k = tape.linear(for_keys, self.hidden, to_k)
        v = tape.linear(for_values, self.hidden, to_v)
        return tape.rms_norm(k), v
