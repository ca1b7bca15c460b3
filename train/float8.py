"""Compute the layers' matmuls in 8 bits, with torchao.

Only the operands of each matmul are scaled and rounded (Micikevicius et al. 2022,
arXiv:2209.05433). Weights, gradients, their communication and the optimizer stay as with bf16.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from train.config.flags import ConfigError

NAMES = ("wq", "wk", "wv", "wu", "wo", "gate", "up", "down")
"""Linear modules of attention and feed-forward, which compute most of a layer's matmuls."""
EMULATED = False
"""If set, torchao rounds to 8 bits but computes in float32; tests do so on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """8-bit matmuls of the layers; everything else is as with bf16."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Round the operands of the matmuls in attention and feed-forward to 8 bits. e4m3 has 3 bits of
    fraction; hybrid has only 2 in gradients, for a wider range there. This needs torchao and a GPU
    of compute capability 8.9 or newer; --compile fuses a layer's roundings. Memory and MFU are
    counted as for bf16."""
    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Granularity of the scales: one per tensor, or one per row, which is more exact and slower."""

    def __post_init__(self) -> None:
        if self.fp8_recipe == "rowwise" and self.fp8_format != "e4m3":
            raise ConfigError(
                f"fp8_recipe is rowwise, but fp8_format is {self.fp8_format}; "
                "give --fp8-format e4m3, or leave out --fp8-recipe"
            )

    def check(self, config: Any) -> None:
        """Refuse settings that would not run, or would silently compute in 16 bits.

        Raises ConfigError with the fix.
        """
        if self.fp8_format is None:
            return
        for is_refused, reason in self._refusals(config):
            if is_refused:
                raise ConfigError(f"fp8_format is {self.fp8_format}, but {reason}")

    def _refusals(self, config: Any) -> list[tuple[Any, str]]:
        """Return every reason to refuse 8-bit matmuls, each after the condition for it."""
        recompute = config.recompute
        device = config.mesh.device_type
        tp = config.mesh.tensor_model_parallel_size
        lora_rank = getattr(config.model, "lora_rank", None)
        is_old_gpu = (
            device == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_capability() < (8, 9)
        )
        odd_width = ""
        for name in ("hidden_size", "ffn_size", "head_dim"):
            width = getattr(config.model, name)
            if width % 16 and not odd_width:
                odd_width = f"{name} is {width}"

        return [
            (not config.train.bf16, "bf16 is not set, and all other tensors need it; add --bf16"),
            (
                tp > 1,
                f"tensor_model_parallel_size is {tp}, and torchao does not support tensor-parallel "
                "matmuls; set it to 1, or leave out --fp8-format",
            ),
            (
                lora_rank,
                f"lora_rank is {lora_rank}, and adapters need unrounded matmuls; "
                "leave out --fp8-format",
            ),
            (
                config.pipeline.pipeline_schedule == "InterleavedZeroBubble",
                "pipeline_schedule InterleavedZeroBubble splits the backward pass, which torchao "
                "computes in one piece; use Interleaved1F1B",
            ),
            (
                recompute.recompute_offload
                or recompute.recompute_granularity == "attention_boundary",
                "recompute_offload and recompute_granularity attention_boundary choose among "
                "operators that torchao replaces; use recompute_granularity full or selective",
            ),
            (
                odd_width,
                f"{odd_width}, and 8-bit matmuls need multiples of 16; change it, or leave out "
                "--fp8-format",
            ),
            (
                config.dry.dry_run,
                "dry_run cannot simulate torchao's tensors; "
                "leave out --fp8-format, since memory is counted as for bf16",
            ),
            (
                device == "cpu" and not EMULATED,
                "device is cpu, which has no 8-bit matmuls; leave out --fp8-format",
            ),
            (
                is_old_gpu,
                "this GPU has no 8-bit matmuls, which need compute capability 8.9; leave out "
                "--fp8-format",
            ),
            (
                find_spec("torchao") is None,
                "torchao is not installed; install it with `pip install --no-deps torchao`",
            ),
        ]

    def convert(self, layers: nn.ModuleList) -> None:
        """Replace the layers' linear modules by torchao's, with the same parameter names.

        Call it before the layers are sharded.
        """
        if self.fp8_format is None:
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe: Any = Float8LinearConfig.from_recipe_name(self.fp8_recipe)
        # A rank's number of tokens need not be a multiple of 16.
        recipe = replace(recipe, emulate=EMULATED, pad_inner_dim=True)
        if self.fp8_format == "e4m3":
            casts = {
                name: replace(getattr(recipe, name), target_dtype=torch.float8_e4m3fn)
                for name in ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight")
            }
            recipe = replace(recipe, **casts)

        def is_converted(_: nn.Module, name: str) -> bool:
            return name.rpartition(".")[2] in NAMES

        convert_to_float8_training(layers, config=recipe, module_filter_fn=is_converted)
