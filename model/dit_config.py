"""The configuration of a diffusion transformer and of its latents."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.errors import at_least, divisors, require, wrong


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Shape of the model."""

    num_layers: int = 12
    """Number of transformer layers."""
    hidden_size: int = 384
    """Width of the residual stream; a multiple of 4, or of 16 for video, since the sines and
    cosines of all position axes share it."""
    ffn_hidden_size: int | None = None
    """Inner width of the feed-forward; by default 4 x hidden_size."""
    num_attention_heads: int = 6
    """Number of attention heads."""
    patch_size: int = 2
    """Height and width of a patch, in elements of the latents."""
    patch_size_t: int = 1
    """Number of frames in a patch; 1 for images."""
    latent_shape: tuple[int, ...] = (4, 32, 32)
    """Shape of one sample: channels, height, width; or channels, frames, height, width."""
    num_classes: int = 1000
    """Number of label classes; one more label embedding stands for no label."""
    class_dropout_prob: float = 0.1
    """Share of the labels that training drops, for classifier-free guidance."""
    learn_sigma: bool = False
    """Predict the variance too, which doubles the number of output channels."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights of the time and label embeddings."""

    # Shared code reads these from every model's configuration, but a diffusion transformer has none
    # of these features.
    linear_attention = False
    delta_rule = False
    recurrent = False
    own_softmax_layout = False
    alternating: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        # TOML and the command line provide lists.
        object.__setattr__(self, "latent_shape", tuple(self.latent_shape))
        at_least(
            self,
            1,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "patch_size",
            "patch_size_t",
            "num_classes",
        )
        ffn_size = self.ffn_hidden_size
        must = "it must be 1 or more, or left out for its default"
        require(self, ffn_size is None or ffn_size >= 1, "ffn_hidden_size", must)
        for name in ("norm_epsilon", "init_method_std"):
            in_range = 0 < getattr(self, name) < math.inf
            require(self, in_range, name, "it must be a number above 0")
        in_range = 0 <= self.class_dropout_prob <= 1
        require(self, in_range, "class_dropout_prob", "it must be from 0 to 1")

        heads = self.num_attention_heads
        must = f"it must be a multiple of num_attention_heads {heads}; change one of them"
        require(self, self.hidden_size % heads == 0, "hidden_size", must)
        self._check_latents()
        divisor = 16 if self.video else 4
        must = (
            f"it must be a multiple of {divisor}, since the sines and cosines of all position axes "
            "share it"
        )
        require(self, self.hidden_size % divisor == 0, "hidden_size", must)

    def architecture(self) -> dict[str, int | float | bool | str | None]:
        """Return all settings that decide the model's shapes and results, for checkpoints."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "patch_size": self.patch_size,
            "patch_size_t": self.patch_size_t,
            "num_classes": self.num_classes,
            "learn_sigma": self.learn_sigma,
            "norm_epsilon": self.norm_epsilon,
            "model_type": "dit",
            "ffn_hidden_size": self.ffn_size,
            "latent_shape": "x".join(map(str, self.latent_shape)),
        }

    def _check_latents(self) -> None:
        shape = self.latent_shape
        must = (
            "it must be channels, height, width for images, or channels, frames, height, width for "
            "video, each a whole number of 1 or more"
        )
        are_sizes = all(isinstance(size, int) and size >= 1 for size in shape)
        require(self, len(shape) in (3, 4) and are_sizes, "latent_shape", must)

        *_, height, width = shape
        if height % self.patch_size or width % self.patch_size:
            allowed = ", ".join(map(str, divisors(math.gcd(height, width))))
            must = (
                f"it must divide height {height} and width {width} of latent_shape; choose from "
                f"{allowed}"
            )
            raise wrong(self, "patch_size", must)

        frames = shape[1] if self.video else 1
        if frames % self.patch_size_t:
            must = "images have no frames; leave patch_size_t out, or give latent_shape 4 numbers"
            if self.video:
                allowed = ", ".join(map(str, divisors(frames)))
                must = f"it must divide the {frames} frames of latent_shape; choose from {allowed}"
            raise wrong(self, "patch_size_t", must)

    @property
    def video(self) -> bool:
        """True if the latents have frames."""
        return len(self.latent_shape) == 4

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_attention_heads

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes of a layer that tensor parallelism divides, keyed by setting."""
        return {"num_attention_heads": self.num_attention_heads, "ffn_hidden_size": self.ffn_size}

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        """Frames, height and width of one patch."""
        return self.patch_size_t, self.patch_size, self.patch_size

    @property
    def patch_grid(self) -> tuple[int, int, int]:
        """Number of patches along frames (1 for images), height and width."""
        frames = self.latent_shape[1] if self.video else 1
        height, width = self.latent_shape[-2:]
        return (
            frames // self.patch_size_t,
            height // self.patch_size,
            width // self.patch_size,
        )

    @property
    def num_patches(self) -> int:
        """Number of patches per sample, which is the model's sequence length."""
        return math.prod(self.patch_grid)

    @property
    def patch_width(self) -> int:
        """Number of elements in a patch: frames x height x width x channels, in this order."""
        return math.prod(self.patch_shape) * self.latent_shape[0]

    @property
    def out_width(self) -> int:
        """Number of elements in an output patch: the input's, or twice that with learn_sigma."""
        return self.patch_width * (2 if self.learn_sigma else 1)
