"""The decoder of every family: token ids to logits in two steps.

A family's settings (``model.families``) build its layers, its norm and what it adds to embeddings.

Shapes: B sequences, T tokens, C width of the residual stream, V vocabulary entries.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernels.cache import States
from kernels.operators import linear
from model.config import DecoderConfig
from model.parts.attention import Attend, HybridAttention, LinearAttend
from model.parts.blocks import drop_layers
from model.parts.lora import is_adapter
from model.parts.projections import Linear
from model.parts.rotary import Rotary
from model.parts.weights import Beginning, Inits, Splits, Stream, initial_value, normal_inits

Head = Callable[[Tensor, Tensor], Tensor]
"""Normalised hidden states [B, T, C], output weights [V, C] -> the forward's result."""


class Decoder(nn.Module):
    """Token ids -> logits. Weights are undefined until init_weights or load_state_dict.

    A layer takes (x, places, mask, states). Tied embeddings have no output module, and the
    embedding's weight is the only copy in the state dict. Modules that `keep` dropped are None.
    """

    INIT: ClassVar[Inits] = {
        "embedding": "normal",
        "position_embedding": "normal",
        "norm": "ones",
        "output": "matrix",
    }
    SPLIT: ClassVar[Splits] = {
        "embedding": "entries",
        "position_embedding": "entries",
        "sinusoids": "positions",
        "norm": "last_norm",
        "output": "logits",
    }
    STREAM = Stream(plain=False)

    def __init__(
        self, config: DecoderConfig, attend: Attend | LinearAttend | HybridAttention | None = None
    ) -> None:
        """Build it.

        Args:
            attend: the attention core: softmax or linear as the model, both for a hybrid; by
                default that of one device.
        """
        super().__init__()
        self.config = config
        self.inits = normal_inits(config.init_method_std, config.num_layers)
        """The meaning of the words in parts' INIT."""
        self.local_rope = config.local_rope  # once, not in every step
        width, table = config.hidden_size, config.position_table
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, width)
        self.position_embedding: nn.Embedding | None = (
            None if table is None else nn.Embedding(table, width)
        )
        self.sinusoids = config.added_positions()
        attends = config.cores(attend)
        self.layers = nn.ModuleList(
            config.block(layer, attends) for layer in range(config.num_layers)
        )
        self.norm: nn.Module | None = config.norm()
        untied = config.untie_embeddings_and_output_weights
        self.output: nn.Linear | None = (
            Linear(width, config.vocabulary, bias=False) if untied else None
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        head: Head | None = None,
        mask: Any = None,
        states: States | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] of tokens [B, T]; positions [T] or [B, T] are global, by default
        0 .. T-1.

        A head replaces the logits, for example by a loss that never materialises all of them. It
        runs here because a sharded model has whole weights only during its forward.

        The mask of the micro-batch is handed to every attention unseen
        (``model.parts.attention.Attend``). With states, the tokens follow those that the states
        hold, which are extended by them.

        A part that `keep` made takes hidden states [B, T, C] of earlier layers instead of tokens,
        and returns hidden states if layers follow.
        """
        hidden = self.hidden(tokens, positions, mask, states)
        if not self.is_last:
            return hidden
        return self.project(hidden) if head is None else head(hidden, self.output_weight)

    @property
    def is_last(self) -> bool:
        """Return whether it has the last layer and what follows it."""
        return self.norm is not None

    @property
    def output_weight(self) -> Tensor:
        """Return the weights [V, C] of the output projection."""
        weight = self.embedding if self.output is None else self.output
        assert weight is not None
        return weight.weight

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        states: States | None = None,
    ) -> Tensor:
        """Return what `project` takes, normalised hidden states [B, T, C]; arguments as in
        `forward`.

        Learned positions, also of padding, must be below max_position_embeddings.

        Raises:
            ValueError: more tokens than that without explicit positions.
        """
        if positions is None:
            table, length = self.config.position_table, tokens.shape[1]
            if table is not None and length > table:
                raise ValueError(
                    f"{length} tokens are more than max_position_embeddings {table}; give fewer"
                )
            positions = torch.arange(length, device=tokens.device)
        x = tokens if tokens.is_floating_point() else self.embed(tokens, positions)
        places = self.places(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, places, mask, states)
        if self.norm is None:
            return x
        scale = self.config.logits_scale
        return self.norm(x) if scale is None else self.norm(x) * scale

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input [B, T, C] of tokens [B, T] and positions [T] or [B, T]."""
        assert self.embedding is not None, "a part without an embedding takes hidden states"
        x = self.embedding(tokens)
        scale = self.config.embedding_scale(x.dtype)
        x = x if scale is None else x * scale
        if self.position_embedding is not None:
            return x + self.position_embedding(positions)  # [B, T, C] + [T, C] or [B, T, C]
        return x if self.sinusoids is None else x + self.sinusoids(positions).to(x.dtype)

    def places(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """Return what every layer is told of the positions; ``dtype`` is the activations'."""
        rope = self.config.rope
        if rope is None:
            return positions if self.config.linear_attention else None
        rotary = Rotary(positions, self.config.rotary_dim, rope, dtype)
        if self.local_rope is not None:
            rotary.local = Rotary(positions, self.config.rotary_dim, self.local_rope, dtype)
        return rotary

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., C]."""
        return (
            self.output(hidden) if self.output is not None else linear(hidden, self.output_weight)
        )

    def keep(self, layers: range) -> None:
        """Reduce the model to these layers; parameters keep their names.

        Modules before the layers stay with the first layer, norm and output with the last. With
        tied embeddings the last part keeps a copy of the embedding.
        """
        total = len(self.layers)
        drop_layers(self.layers, layers)
        first, last = 0 in layers, total - 1 in layers
        if not first:
            self.position_embedding = None
        if not last:
            self.norm = None
        if not first and not (last and self.output is None):
            self.embedding = None
        if not last:
            self.output = None

    def cast(self, dtype: torch.dtype, *, frozen: bool = False) -> None:
        """Cast the model to ``dtype``; modules with full_precision stay in float32.

        With ``frozen`` adapters stay too: a model on the meta device then trains them with masters
        in float32.
        """
        self.to(dtype)
        for name, module in self.named_modules():
            if getattr(module, "full_precision", False) or (
                frozen and is_adapter(f"{name}.weight")
            ):
                module.float()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight to its initial value. Call it before sharding.

        Raises ValueError on the meta device; call `to_empty(device=...)` first.
        """
        for name, weight in self.named_parameters():
            if weight.is_meta:
                raise ValueError(
                    f"{name} is on the meta device; call to_empty(device=...) before init_weights"
                )
            weight.copy_(initial_value(self, Beginning(name, weight.shape, seed)))
