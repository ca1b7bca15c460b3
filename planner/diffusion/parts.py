"""Parts that several classes share: joint blocks of one or two streams, embedders, output layer."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.diffusion.symbols import Symbol
from planner.diffusion.tape import Tape

ROTATED_IN_BF16 = 52
"""Bytes per element that the forward pass of diffusers' ``apply_rotary_emb`` reads and writes."""
ROTATED_IN_FLOAT32 = 40
TIME_CHANNELS = 256
"""Number of channels of the sinusoidal timestep embedding in Flux and HunyuanVideo."""


@dataclass(frozen=True)
class Tokens:
    """Numbers of tokens on a rank, for the samples of a micro-batch."""

    samples: int
    image: int
    """Number of image tokens per sample on this rank."""
    text: int
    """Number of text tokens per sample: this rank's if they attend jointly, else all of them."""
    whole_image: int
    whole_text: int
    has_time_per_token: bool = False
    """True if each token has its own timestep, as in image-to-video training of Wan 2.2."""

    @property
    def image_rows(self) -> int:
        """Return the number of this rank's image tokens, over all samples."""
        return self.samples * self.image

    @property
    def text_rows(self) -> int:
        """Return the number of this rank's text tokens, over all samples."""
        return self.samples * self.text


Forward = Callable[[Tape, Tokens], list[Symbol]]
"""Records a part of a model for a rank's tokens, and returns its outputs."""


@dataclass(frozen=True)
class Stream:
    """Tokens of one kind (image or text) in a block of two streams, and their modules' names."""

    x: Symbol
    projections: tuple[str, str, str]
    out: str
    feed_forward: str


@dataclass(frozen=True)
class JointBlock:
    """Sizes of a block with joint attention, and how it normalises and rotates q and k."""

    hidden: int
    inner: int
    """Width of the feed-forward."""
    heads: int
    has_eager_norms: bool
    """True for diffusers' RMSNorm, False for torch's."""
    rotates_text: bool
    """True if text tokens have rotary positions too."""
    has_mask: bool = False
    """True if each block makes a mask of all pairs of tokens, in memory during its attention."""

    def two_streams(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record a block with separate weights for image and text: 36 d^2 for d channels."""
        image = Stream(
            tape.input(tokens.image_rows, self.hidden),
            ("attn.to_q", "attn.to_k", "attn.to_v"),
            "attn.to_out.0",
            "ff",
        )
        text = Stream(
            tape.input(tokens.text_rows, self.hidden),
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "attn.to_add_out",
            "ff_context",
        )
        time = shared_time(tape, tokens, self.hidden)

        # Queries, keys and values of both streams, then joined.
        modulation = modulations(tape, time, self.hidden, 6)
        projected = self._projected(tape, image, modulation)
        text_modulation = modulations(tape, time, self.hidden, 6)
        projected_text = self._projected(tape, text, text_modulation)
        if not self.rotates_text:
            for index in range(2):
                projected[index] = self._rotate(tape, projected[index])

        joined = []
        for part, text_part in zip(projected, projected_text, strict=True):
            joined.append(tape.join_tokens(part, text_part))
        if self.rotates_text:
            for index in range(2):
                joined[index] = self._rotate(tape, joined[index])
        q, k, v = joined
        out = tape.joint_attention(q, k, v, self.heads, has_mask=self.has_mask)
        return [
            self._after_attention(tape, image, out, modulation),
            self._after_attention(tape, text, out, text_modulation),
        ]

    def _projected(self, tape: Tape, stream: Stream, modulation: list[Symbol]) -> list[Symbol]:
        """Return the normalised queries, keys and values of a stream."""
        shift, scale = modulation[:2]
        normed = tape.modulate(tape.layer_norm(stream.x), scale, shift)
        to_q, to_k, to_v = stream.projections
        q = tape.linear(normed, self.hidden, to_q)
        k = tape.linear(normed, self.hidden, to_k)
        v = tape.linear(normed, self.hidden, to_v)
        return [self._norm(tape, q), self._norm(tape, k), v]

    def _after_attention(
        self, tape: Tape, stream: Stream, out: Symbol, modulation: list[Symbol]
    ) -> Symbol:
        """Return a stream after the attention's output projection and the feed-forward."""
        gate, shift, scale, last_gate = modulation[2:]
        part = tape.some_tokens(out, stream.x.rows, is_contiguous=True)
        attended = tape.linear(part, self.hidden, stream.out)
        attended = tape.multiply(attended, gate)
        x = tape.add(stream.x, attended)

        normed = tape.modulate(tape.layer_norm(x), scale, shift)
        transformed = feed_forward(tape, normed, self.inner, stream.feed_forward)
        tape.hold(attended, normed, transformed)
        return tape.add(x, tape.multiply(transformed, last_gate))

    def one_stream(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record a block of joined tokens, attention parallel to feed-forward: 15 d^2 weights."""
        image = tape.input(tokens.image_rows, self.hidden)
        text = tape.input(tokens.text_rows, self.hidden)
        time = shared_time(tape, tokens, self.hidden)
        x = tape.join_tokens(text, image)

        # The feed-forward's first projection.
        shift, scale, gate = modulations(tape, time, self.hidden, 3)
        normed = tape.modulate(tape.layer_norm(x), scale, shift)
        inner = tape.linear(normed, self.inner, "proj_mlp")
        inner = tape.activation(inner)
        if not self.rotates_text:
            normed = tape.copy(normed)  # the attention joins the streams again

        # Attention to the joined tokens.
        q = tape.linear(normed, self.hidden, "attn.to_q")
        k = tape.linear(normed, self.hidden, "attn.to_k")
        v = tape.linear(normed, self.hidden, "attn.to_v")
        q = self._rotate_image(tape, self._norm(tape, q), image.rows)
        k = self._rotate_image(tape, self._norm(tape, k), image.rows)
        out = tape.joint_attention(q, k, v, self.heads)
        if not self.rotates_text:
            out = tape.copy(out)

        # One projection for the outputs of attention and feed-forward.
        both = tape.join_channels(out, inner)
        both = tape.linear(both, self.hidden, "proj_out")
        tape.hold(normed, inner, out)
        return [tape.add(x, tape.multiply(both, gate))]

    def _norm(self, tape: Tape, x: Symbol) -> Symbol:
        """Return queries or keys, normalised head by head."""
        if self.has_eager_norms:
            return tape.eager_rms_norm(x, self.heads)
        return tape.rms_norm(x, self.heads)

    def _rotate(self, tape: Tape, x: Symbol) -> Symbol:
        """Return queries or keys with rotary positions."""
        return tape.rotate(x, ROTATED_IN_BF16, ROTATED_IN_FLOAT32)

    def _rotate_image(self, tape: Tape, x: Symbol, image_rows: int) -> Symbol:
        """Return joined queries or keys, with rotary positions for all or just image tokens."""
        if self.rotates_text or image_rows == x.rows:
            return self._rotate(tape, x)
        image = self._rotate(tape, tape.some_tokens(x, image_rows))
        text = tape.some_tokens(x, x.rows - image_rows)
        return tape.join_tokens(image, text)


def shared_time(tape: Tape, tokens: Tokens, hidden: int) -> Symbol:
    """Return the timestep embedding of each sample, which all blocks share."""
    is_trained = tape.training.trains_all
    return tape.input(tokens.samples, hidden, is_tracked=is_trained, is_shared=True)


def modulations(tape: Tape, time: Symbol, hidden: int, parts: int) -> list[Symbol]:
    """Return shifts, scales and gates of each sample, made by a linear module of the block."""
    activated = tape.activation(time)
    joined = tape.linear(activated, parts * hidden, "norm.linear")
    return tape.columns(joined, parts)


def feed_forward(tape: Tape, x: Symbol, inner: int, name: str, width: int | None = None) -> Symbol:
    """Return the output of a feed-forward: two linear modules with an activation between."""
    projected = tape.linear(x, inner, f"{name}.net.0.proj")
    activated = tape.activation(projected)
    return tape.linear(activated, width or x.width, f"{name}.net.2")


def two_products(tape: Tape, x: Symbol, width: int) -> Symbol:
    """Return the embedding that two linear modules with an activation between them compute."""
    projected = tape.linear(x, width, "linear_1")
    activated = tape.activation(projected)
    return tape.linear(activated, width, "linear_2")


def embedded_time(tape: Tape, samples: int, hidden: int) -> Symbol:
    """Return the embedding of each sample's timestep or guidance weight."""
    frequencies = tape.input(samples, TIME_CHANNELS, is_tracked=False)
    return two_products(tape, frequencies, hidden)


def embedded_input(tape: Tape, rows: int, channels: int, width: int) -> Symbol:
    """Return patches or text tokens, embedded by a linear module whose input needs no gradient."""
    x = tape.input(rows, channels, is_tracked=False)
    return tape.linear(x, width, "embedder")


def continuous_end(tape: Tape, tokens: Tokens, hidden: int, width: int) -> list[Symbol]:
    """Record the last norm, modulated by each sample's timestep, and the output projection."""
    image = tape.input(tokens.image_rows, hidden)
    time = tape.input(tokens.samples, hidden, is_tracked=tape.training.trains_all)
    scale, shift = modulations(tape, time, hidden, 2)
    normed = tape.modulate(tape.layer_norm(image), scale, shift)
    return [tape.linear(normed, width, "proj_out")]
