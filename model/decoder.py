"""The decoder that every family of language models shares: token ids to logits.

The family's configuration (``model.families``) builds the layers, the norms and the positions, so
this file only defines the order in which they run. The forward pass has two steps: `hidden` runs
the layers, and `project` computes the logits. Training replaces the second step by a chunked loss,
which never has the logits of all tokens in memory.

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
"""Function to call instead of `Decoder.project`: (normalised hidden states [B, T, C], output
weights [V, C]) -> result."""


class Decoder(nn.Module):
    """A decoder: embedding, layers, norm, output projection; token ids [B, T] -> logits [B, T, V].

    Weights are undefined until `init_weights` or `load_state_dict`. Every layer is called as
    ``layer(x, positions, mask, states)``. With tied embeddings there is no output module, and the
    state dict holds the embedding's weight once. Modules that `keep` has dropped are None.
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
        """Build the modules of the decoder.

        Args:
            attend: the attention core, softmax or linear as the model needs, or both for a hybrid;
                by default attention on one device.
        """
        super().__init__()
        self.config = config
        self.inits = normal_inits(config.init_method_std, config.num_layers)
        """Initializers, keyed by the words of INIT."""
        self.local_rope = config.local_rope  # computed once, not in every step
        hidden_size = config.hidden_size
        cores = config.cores(attend)

        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, hidden_size)
        self.position_embedding: nn.Embedding | None = None
        if config.position_table is not None:
            self.position_embedding = nn.Embedding(config.position_table, hidden_size)
        self.sinusoids = config.added_positions()

        self.layers = nn.ModuleList()
        for layer in range(config.num_layers):
            self.layers.append(config.block(layer, cores))

        self.norm: nn.Module | None = config.norm()
        self.output: nn.Linear | None = None
        if config.untie_embeddings_and_output_weights:
            self.output = Linear(hidden_size, config.vocabulary, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        head: Head | None = None,
        mask: Any = None,
        states: States | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] of tokens [B, T].

        Args:
            positions: global positions [T] or [B, T]; by default 0 .. T-1.
            head: replaces the logits, for example by a loss that never materialises all of them. It
                runs inside this method because a sharded model has whole weights only during its
                forward pass.
            mask: the micro-batch's mask, passed to every attention (``Attend``).
            states: cached keys, values and states of earlier tokens, which these tokens extend.

        A pipeline stage (see `keep`) without the embedding takes hidden states [B, T, C] instead of
        tokens; without the last layer it returns hidden states.
        """
        hidden = self.hidden(tokens, positions, mask, states)  # [B, T, C]
        if not self.is_last:
            return hidden
        if head is not None:
            return head(hidden, self.output_weight)
        return self.project(hidden)  # [B, T, V]

    @property
    def is_last(self) -> bool:
        """True if this part has the last layer, and therefore the norm and output projection."""
        return self.norm is not None

    @property
    def output_weight(self) -> Tensor:
        """Weights [V, C] of the output projection; with tied embeddings, the embedding's."""
        module = self.embedding if self.output is None else self.output
        assert module is not None
        return module.weight

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        states: States | None = None,
    ) -> Tensor:
        """Return normalised hidden states [B, T, C], the input of `project`; see `forward`.

        With learned positions, every position must be below max_position_embeddings, even the
        positions of padding.

        Raises:
            ValueError: positions are left out, and there are more tokens than
                max_position_embeddings.
        """
        if positions is None:
            table = self.config.position_table
            length = tokens.shape[1]
            if table is not None and length > table:
                raise ValueError(
                    f"got {length} tokens, but max_position_embeddings is {table}; "
                    "give fewer tokens"
                )
            positions = torch.arange(length, device=tokens.device)  # [T]

        x = tokens  # for a later pipeline stage, hidden states
        if not tokens.is_floating_point():
            x = self.embed(tokens, positions)  # [B, T, C]
        layer_positions = self.layer_positions(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, layer_positions, mask, states)
        if self.norm is None:
            return x

        x = self.norm(x)
        scale = self.config.logits_scale
        return x if scale is None else x * scale

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the input [B, T, C] of the first layer; arguments as in `hidden`."""
        assert self.embedding is not None, "a part without an embedding takes hidden states"
        x = self.embedding(tokens)  # [B, T, C]
        scale = self.config.embedding_scale(x.dtype)
        if scale is not None:
            x = x * scale

        if self.position_embedding is not None:
            return x + self.position_embedding(positions)  # + [T, C] or [B, T, C]
        if self.sinusoids is not None:
            return x + self.sinusoids(positions).to(x.dtype)
        return x

    def layer_positions(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """Return the positions in the form that layers take: a Rotary, integers, or None.

        With rope, cosines and sines are computed once here and shared by all layers. Linear
        attention takes the integers. Other layers without rope take None, because the embeddings
        already contain the positions, or the model uses none.

        Args:
            dtype: dtype of the activations.
        """
        rope = self.config.rope
        if rope is None:
            return positions if self.config.linear_attention else None
        rotary = Rotary(positions, self.config.rotary_dim, rope, dtype)
        if self.local_rope is not None:
            rotary.local = Rotary(positions, self.config.rotary_dim, self.local_rope, dtype)
        return rotary

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] for normalised hidden states [..., C]."""
        if self.output is not None:
            return self.output(hidden)
        return linear(hidden, self.output_weight)

    def keep(self, layers: range) -> None:
        """Drop all layers except these, in place; parameters keep their names.

        The embeddings stay with the first layer, the norm and the output projection with the last.
        With tied embeddings the last part also keeps the embedding, since its weight is the output
        projection's.
        """
        has_first = 0 in layers
        has_last = len(self.layers) - 1 in layers
        drop_layers(self.layers, layers)
        if not has_first:
            self.position_embedding = None
        if not has_last:
            self.norm = None
        if not has_first and not (has_last and self.output is None):
            self.embedding = None
        if not has_last:
            self.output = None

    def cast(self, dtype: torch.dtype, *, frozen: bool = False) -> None:
        """Cast the model to ``dtype``, except modules with ``full_precision``, which stay float32.

        With ``frozen``, adapters stay float32 too, because only they are trained; the frozen
        weights need no float32 copy.
        """
        self.to(dtype)
        for name, module in self.named_modules():
            trained_adapter = frozen and is_adapter(f"{name}.weight")
            if getattr(module, "full_precision", False) or trained_adapter:
                module.float()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight to its initial value; call this before sharding.

        Raises:
            ValueError: the model is on the meta device; call `to_empty(device=...)` first.
        """
        for name, weight in self.named_parameters():
            if weight.is_meta:
                raise ValueError(
                    f"{name} is on the meta device; call to_empty(device=...) before init_weights"
                )
            weight.copy_(initial_value(self, Beginning(name, weight.shape, seed)))
