"""Diffusion transformers with adaLN-Zero, for images and video (Peebles & Xie 2023).

The paper is arXiv:2212.09748. Timestep and label become one vector per sample, from which every
layer computes shifts, scales and gates ("modulation"). Gates start at 0, so each layer starts as
the identity.

Shapes: B samples, T patches, C width of the residual stream, P elements of a patch; latents have F
frames, H height, W width. The elements of a patch, in inputs and outputs, are in the order frames,
height, width, channels.
"""

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model.dit_config import DiTConfig
from model.parts.attention import Attend, Attention, sdpa
from model.parts.blocks import drop_layers
from model.parts.feed_forward import MLP
from model.parts.norms import LayerNorm
from model.parts.projections import Linear
from model.parts.weights import Beginning, Inits, Splits, Stream, initial_value, xavier_inits

FREQUENCIES = 256
"""Number of channels of the sinusoidal timestep embedding."""
full_sdpa = partial(sdpa, causal=False)
"""Full attention on one device that has all patches: an ``Attend`` without windows or sinks."""


def patchify(latents: Tensor, config: DiTConfig) -> Tensor:
    """Cut latents [B, channels, (F,) H, W] into patches [B, T, P].

    Patches are ordered by frame, then row, then column. The latents may have any number of
    channels.
    """
    frames, height, width = config.patch_grid
    pt, ph, pw = config.patch_shape
    x = latents.reshape(len(latents), -1, frames, pt, height, ph, width, pw)
    x = x.permute(0, 2, 4, 6, 3, 5, 7, 1)  # [B, f, h, w, pt, ph, pw, channels]
    return x.flatten(4).flatten(1, 3)  # [B, T, P]


def unpatchify(patches: Tensor, config: DiTConfig) -> Tensor:
    """Assemble all patches [B, T, P] into latents [B, channels, (F,) H, W].

    P determines the number of channels.
    """
    x = patches.unflatten(1, config.patch_grid)  # [B, f, h, w, P]
    x = x.unflatten(4, (*config.patch_shape, -1))  # [B, f, h, w, pt, ph, pw, channels]
    x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)  # [B, channels, f, pt, h, ph, w, pw]
    return x.reshape(len(x), -1, *config.latent_shape[1:])


def position_embedding(positions: Tensor, config: DiTConfig) -> Tensor:
    """Return sines and cosines [T, C] of the coordinates of patches, float64.

    Half of the channels encode the column and half the row, as in the original's
    get_2d_sincos_pos_embed. For video, the first quarter of the channels encodes the frame and the
    rest encodes column and row, as in diffusers' get_3d_sincos_pos_embed.

    Args:
        positions: global positions [T], integers; those beyond the grid (padding) count as its last
            row or frame.
    """
    frames, height, width = config.patch_grid
    device = positions.device
    column = positions % width
    row = positions // width
    embeddings = []
    frame_channels = 0
    if config.video:
        frame_channels = config.hidden_size // 4
        frame = (row // height).clamp(max=frames - 1)
        row = row % height
        embeddings.append(_sines(frames, frame_channels, device)[frame])
    else:
        row = row.clamp(max=height - 1)

    channels = (config.hidden_size - frame_channels) // 2
    embeddings.append(_sines(width, channels, device)[column])
    embeddings.append(_sines(height, channels, device)[row])
    return torch.cat(embeddings, dim=-1)


def _sines(size: int, channels: int, device: torch.device) -> Tensor:
    """Return [size, channels]: sines, then cosines, of i / 10000^(2 j / channels)."""
    coordinates = torch.arange(size, dtype=torch.float64, device=device)
    steps = torch.arange(channels // 2, dtype=torch.float64, device=device)
    angles = torch.outer(coordinates, 10000 ** (-steps / (channels // 2)))
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class TimeEmbedding(nn.Module):
    """Timestep embedding, [B] -> [B, C]: an MLP of sinusoids, float32 as in the original."""

    INIT: ClassVar[Inits] = {"mlp.0": "normal", "mlp.2": "normal"}
    SPLIT: ClassVar[Splits] = {"mlp.0": "whole", "mlp.2": "whole"}

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            Linear(FREQUENCIES, hidden_size), nn.SiLU(), Linear(hidden_size, hidden_size)
        )

    def forward(self, times: Tensor) -> Tensor:
        half = FREQUENCIES // 2
        steps = torch.arange(half, dtype=torch.float32, device=times.device)
        angles = times[:, None].float() * torch.exp(-math.log(10000) * steps / half)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)  # [B, 256]
        return self.mlp(waves.to(self.mlp[0].weight.dtype))  # type: ignore[arg-type]


class Modulation(nn.Sequential):
    """Compute a layer's shifts, scales and gates from conditions [B, C].

    Each is [B, 1, C], or [1, T, C] if samples are joined into one sequence and patch t belongs to
    sample[t].
    """

    INIT: ClassVar[Inits] = {"1": "zeros"}
    SPLIT: ClassVar[Splits] = {"1": "whole"}

    def __init__(self, width: int, parts: int) -> None:
        super().__init__(nn.SiLU(), Linear(width, parts * width))
        self._parts = parts

    def forward(self, conditions: Tensor, sample: Tensor | None = None) -> tuple[Tensor, ...]:
        modulation = super().forward(conditions)  # [B, parts * C]
        if sample is None:
            return modulation[:, None].chunk(self._parts, dim=-1)
        # In float32, because a row's gradient is the sum over all of its patches, and a bfloat16
        # sum would soon stop growing.
        rows = modulation.float()[sample]  # [T, parts * C]
        return rows[None].to(modulation.dtype).chunk(self._parts, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x * (1 + scale) + shift; x is [B, T, C], the others [B, 1, C] or [1, T, C]."""
    return x * (1 + scale) + shift


class Block(nn.Module):
    """A transformer layer with modulation: [B, T, C] and conditions [B, C] -> [B, T, C].

    If modulation is 0, as it is initially, the layer is the identity. For samples joined into one
    sequence [1, T, C], ``sample`` [T] gives each patch's row in the conditions.
    """

    SPLIT: ClassVar[Splits] = {"attention": "all_tokens", "mlp": "all_tokens"}

    def __init__(self, config: DiTConfig, attend: Attend) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        num_heads = config.num_attention_heads
        eps = config.norm_epsilon
        self.attention_norm = LayerNorm(hidden_size, eps=eps, elementwise_affine=False)
        self.attention = Attention(
            hidden_size, num_heads, num_heads, config.head_dim, attend, bias=True
        )
        self.mlp_norm = LayerNorm(hidden_size, eps=eps, elementwise_affine=False)
        self.mlp = MLP(hidden_size, config.ffn_size)
        self.adaLN_modulation = Modulation(hidden_size, 6)

    def forward(
        self, x: Tensor, conditions: Tensor, mask: Any = None, sample: Tensor | None = None
    ) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(
            conditions, sample
        )
        x = x + gate * self.attention(modulate(self.attention_norm(x), shift, scale), None, mask)
        return x + mlp_gate * self.mlp(modulate(self.mlp_norm(x), mlp_shift, mlp_scale))


class FinalLayer(nn.Module):
    """The output layer: [B, T, C] and conditions [B, C] -> patches [B, T, P]."""

    INIT: ClassVar[Inits] = {"linear": "zeros"}
    SPLIT: ClassVar[Splits] = {"linear": "whole"}

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_epsilon, elementwise_affine=False)
        self.linear = Linear(config.hidden_size, config.out_width)
        self.adaLN_modulation = Modulation(config.hidden_size, 2)

    def forward(self, x: Tensor, conditions: Tensor, sample: Tensor | None = None) -> Tensor:
        shift, scale = self.adaLN_modulation(conditions, sample)
        return self.linear(modulate(self.norm(x), shift, scale)).clone()  # FSDP warns about views


class DiT(nn.Module):
    """A diffusion transformer: noisy patches -> the objective's prediction.

    Weights are undefined until `init_weights` or `load_state_dict`. Modules that `keep` has dropped
    are None.
    """

    INIT: ClassVar[Inits] = {"x_embedder": "matrix", "y_embedder": "normal"}
    SPLIT: ClassVar[Splits] = {"x_embedder": "whole", "y_embedder": "whole"}
    STREAM = Stream(plain=True, inputs={"x": 1, "positions": 0})

    def __init__(self, config: DiTConfig, attend: Attend = full_sdpa) -> None:
        """Build the modules; ``attend`` is full attention over the patches of a sample."""
        super().__init__()
        self.config = config
        self.inits = xavier_inits(config.init_method_std)
        """Initializers, keyed by the words of INIT."""
        self.x_embedder: nn.Linear | None = Linear(config.patch_width, config.hidden_size)
        self.t_embedder = TimeEmbedding(config.hidden_size)
        self.y_embedder = nn.Embedding(config.num_classes + 1, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.final_layer: FinalLayer | None = FinalLayer(config)

    def forward(
        self, x: Tensor, positions: Tensor, times: Tensor, labels: Tensor, mask: Any = None
    ) -> Tensor:
        """Predict patches [B, T, out_width] from noisy patches.

        Samples may be joined into one sequence: x is then [1, T, ...], positions continue from one
        sample to the next, and ``attend`` must keep the samples apart, like documents.

        A pipeline stage (see `keep`) without the patch embedding takes hidden states [B, T, C]
        instead of patches; without the last layer it returns hidden states.

        Args:
            x: noisy patches [B, T, patch_width].
            positions: global positions [T].
            times: timestep of each sample, [B].
            labels: integers [B]; num_classes means no label.
            mask: the micro-batch's mask, passed to every attention (``Attend``).

        Raises:
            ValueError: x has neither one row nor one row per time.
        """
        if len(x) not in (1, len(times)):
            raise ValueError(
                f"x has {len(x)} samples, but times has {len(times)} entries; give one time per "
                "sample, or pack all samples into one sequence"
            )
        sample = None
        if len(x) != len(times):
            num_patches = self.config.num_patches
            sample = (positions // num_patches).clamp(max=len(times) - 1)  # [T]
            positions = positions % num_patches

        if self.x_embedder is not None:
            x = self.x_embedder(x.to(self.x_embedder.weight.dtype))
            x = x + position_embedding(positions, self.config).to(x.dtype)
        conditions = self.t_embedder(times) + self.y_embedder(labels)  # [B, C]
        for layer in self.layers:
            x = layer(x, conditions, mask, sample)
        if self.final_layer is None:
            return x
        return self.final_layer(x, conditions, sample)  # [B, T, out_width]

    @property
    def is_first(self) -> bool:
        """True if this part has the first layer, and therefore takes patches."""
        return self.x_embedder is not None

    @property
    def is_last(self) -> bool:
        """True if this part has the last layer, and therefore returns patches."""
        return self.final_layer is not None

    def keep(self, layers: range) -> None:
        """Drop all layers except these, in place; parameters keep their names.

        The patch embedding stays with the first layer, the final layer with the last, timestep and
        label embeddings with every part.
        """
        has_last = len(self.layers) - 1 in layers
        drop_layers(self.layers, layers)
        if 0 not in layers:
            self.x_embedder = None
        if not has_last:
            self.final_layer = None

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight to its initial value; call this before sharding."""
        for name, weight in self.named_parameters():
            weight.copy_(initial_value(self, Beginning(name, weight.shape, seed)))


def meta_dit_state(config: DiTConfig) -> dict[str, Tensor]:
    """Return the state dict on the meta device, with every parameter's name and shape."""
    return _on_meta(config).state_dict()


def num_dit_parameters(config: DiTConfig) -> int:
    """Count the trainable parameters; positions have none, because they are fixed sines."""
    return sum(weight.numel() for weight in meta_dit_state(config).values())


def multiply_adds(config: DiTConfig) -> int:
    """Count the multiply-adds in the forward pass of one sample.

    The paper calls multiply-adds flops (Peebles & Xie 2023, table 4). Attention has 2 * T^2 * C per
    layer. Linear layers of the timestep embedding and the modulation run once per sample, the
    others once per patch.
    """
    total = 2 * config.num_layers * config.num_patches**2 * config.hidden_size
    for name, module in _on_meta(config).named_modules():
        if isinstance(module, nn.Linear):
            once = name.startswith("t_embedder") or "adaLN_modulation" in name
            total += module.weight.numel() * (1 if once else config.num_patches)
    return total


def dit_flops_per_patch(config: DiTConfig) -> float:
    """Return the training FLOPs per patch, forward and backward: 6 per multiply-add.

    A multiply-add costs two FLOPs in the forward pass and four in the backward pass. Work done once
    per sample is divided among its patches.
    """
    return 6 * multiply_adds(config) / config.num_patches


def _on_meta(config: DiTConfig) -> Any:
    with torch.device("meta"):
        return DiT(config)
