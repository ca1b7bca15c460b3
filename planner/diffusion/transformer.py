"""Base class of the planner's descriptions of diffusers' classes, made from a ``config.json``."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

from planner.diffusion.parts import Forward, Tokens
from planner.diffusion.symbols import Symbol
from planner.diffusion.tape import Tape
from runtime.errors import UserError


class ModelError(UserError):
    """A configuration that the planner cannot read; the message names the key and the fix."""


class Grid(NamedTuple):
    """Three numbers, such as of tokens or pixels, along frames, height and width."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class Blocks:
    """Equal blocks of a model."""

    count: int
    forward: Forward


class Transformer(ABC):
    """A diffusion transformer, described by the forward pass of its parts.

    Everything before the blocks runs on every rank, for all tokens; the blocks and what follows run
    for a rank's tokens.
    """

    defaults: ClassVar[Mapping[str, Any]]
    """Keys of the class's configuration, with the class's defaults."""
    joint: ClassVar[bool]
    """True if text tokens attend together with the image's; False for cross-attention to text."""
    makes_pictures: ClassVar[bool] = False
    """True if the model makes pictures, which have one frame."""
    text_tokens: ClassVar[int]
    """Number of tokens that the model's pipeline makes of a text."""
    added_tokens: int = 0
    """Number of tokens that join the text's: those of a picture and of a second text encoder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Set the values that all classes have; ``config`` has every key."""
        self.config = config
        self.layers: int = config["num_layers"]
        self.heads: int = config["num_attention_heads"]
        self.head_dim: int = config["attention_head_dim"]
        self.hidden = self.heads * self.head_dim
        self.out_channels: int = config["out_channels"] or config["in_channels"]
        self._check()

    @property
    def config_class(self) -> str:
        """Return the class's name in diffusers."""
        return str(self.config.get("_class_name", type(self).__name__))

    @property
    @abstractmethod
    def inner(self) -> int:
        """Width of the feed-forward."""

    @property
    @abstractmethod
    def patch(self) -> Grid:
        """Latents per token along frames, height and width."""

    @property
    @abstractmethod
    def vae(self) -> Grid:
        """Pixels per latent of the published autoencoder, along frames, height and width."""

    @property
    @abstractmethod
    def blocks(self) -> list[Blocks]:
        """The blocks, in order."""

    @abstractmethod
    def embed(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the parts before the blocks, for all tokens."""

    @abstractmethod
    def finish(self, tape: Tape, tokens: Tokens) -> list[Symbol]:
        """Record the parts after the blocks."""

    @abstractmethod
    def _check(self) -> None:
        """Raise ModelError for a value that changes the computation in a way not described here."""

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return sum(blocks.count for blocks in self.blocks)

    @property
    def patch_channels(self) -> int:
        """Return the number of input channels per token."""
        return int(self.config["in_channels"]) * prod(self.patch)

    @property
    def out_width(self) -> int:
        """Return the number of output channels per token."""
        return self.out_channels * prod(self.patch)

    def _require(self, key: str, *values: Any) -> None:
        """Raise ModelError unless a key has one of these values."""
        value = self.config[key]
        if value not in values:
            choices = " or ".join(repr(choice) for choice in values)
            raise ModelError(
                f"{key} is {value!r}; the planner supports {self.config_class} only with {choices}"
            )
