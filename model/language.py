"""Language models of every kind: token ids to logits in two steps, and weights determined by seed and name.

``model.traits`` says what the kinds have: LLaMA (Touvron et al. 2023), with RMSNorm, rotary positions, SwiGLU and no
biases; Gemma 3 (arXiv:2503.19786), OLMo 3 (arXiv:2512.13961), Qwen3.5 and OLMo Hybrid, which differ in norms, ropes and
gates; GPT (Radford et al. 2019), with LayerNorm, GELU, biases and learned positions; TransNormerLLM and the Linear
Transformer (``model.parts.linear_attention``).

Shapes: B sequences, T tokens, C width of the residual stream, V vocabulary entries.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernels.cache import States
from kernels.operators import linear
from model.config import ModelConfig
from model.parts.attention import Attend, HybridAttention, LinearAttend, attention_of
from model.parts.blocks import LAYERS, PreNormLayer, drop_layers
from model.parts.delta import DeltaAttention, OneDevice
from model.parts.feed_forward import FEED_FORWARDS
from model.parts.linear_attention import LinearAttention, Sinusoids, TokenMixer
from model.parts.lora import is_adapter
from model.parts.norms import NORMS
from model.parts.projections import Linear
from model.parts.rotary import Rotary
from model.parts.weights import Beginning, Inits, Splits, Stream, initial_value, normal_inits

Head = Callable[[Tensor, Tensor], Tensor]
"""Normalised hidden states [B, T, C], output weights [V, C] -> the forward's result."""


def layer_of(config: ModelConfig, layer: int, attends: HybridAttention) -> PreNormLayer:
    """Build a layer, counted from 0: softmax attention, linear attention or a delta rule, and a feed-forward."""
    traits, width = config.traits, config.hidden_size
    norm = partial(NORMS[traits.norm], width, eps=config.norm_epsilon)
    feed_forward = FEED_FORWARDS[traits.feed_forward](width, config.ffn_size)
    if not config.has_softmax(layer):
        kind = DeltaAttention if traits.delta else TokenMixer if traits.positions == "lrpe" else LinearAttention
        return PreNormLayer(norm, kind(config, layer, attends.linear), feed_forward)
    attention = attention_of(config, layer, attends.softmax)
    return LAYERS[traits.norms](norm, attention, feed_forward)


def cores_of(config: ModelConfig, attend: Attend | LinearAttend | HybridAttention | None) -> HybridAttention:
    """Return both cores of attention, of which a model that is no hybrid needs one."""
    if attend is None:
        return HybridAttention(OneDevice()) if config.traits.delta else HybridAttention()
    if isinstance(attend, HybridAttention):
        return attend
    core: Any = attend
    return HybridAttention(linear=core) if config.linear_attention else HybridAttention(softmax=core)


class LanguageModel(nn.Module):
    """Token ids -> logits. Weights are undefined until init_weights or load_state_dict.

    A layer takes (x, places, mask, states). Tied embeddings have no output module, and the embedding's weight is the
    only copy in the state dict. Modules that `keep` dropped are None.
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

    def __init__(self, config: ModelConfig, attend: Attend | LinearAttend | HybridAttention | None = None) -> None:
        """Build it.

        Args:
            attend: the attention core: softmax or linear as the model, both for a hybrid; by default that of one
                device.
        """
        super().__init__()
        self.config = config
        self.inits = normal_inits(config.init_method_std, config.num_layers)
        """The meaning of the words in parts' INIT."""
        # Once, not in every step.
        self.rotates, self.rotary_dim, self.local_rope = config.rotates, config.rotary_dim, config.local_rope
        width, table = config.hidden_size, config.position_table
        scaled = config.traits.rounds_scale or (config.linear_attention and not config.no_scale_embedding)
        self.scale = math.sqrt(width) if scaled else None
        """Factor of the embeddings (Vaswani et al. 2017, section 3.4)."""
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, width)
        self.position_embedding: nn.Embedding | None = None if table is None else nn.Embedding(table, width)
        self.sinusoids = Sinusoids(width) if config.traits.positions == "sinusoidal" else None
        attends = cores_of(config, attend)
        self.layers = nn.ModuleList(layer_of(config, layer, attends) for layer in range(config.num_layers))
        self.norm: nn.Module | None = NORMS[config.traits.norm](width, eps=config.norm_epsilon)
        untied = config.untie_embeddings_and_output_weights
        self.output: nn.Linear | None = Linear(width, config.vocabulary, bias=False) if untied else None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        head: Head | None = None,
        mask: Any = None,
        states: States | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] of tokens [B, T]; positions [T] or [B, T] are global, by default 0 .. T-1.

        A head replaces the logits, for example by a loss that never materialises all of them. It runs here because a
        sharded model has whole weights only during its forward.

        The mask of the micro-batch is handed to every attention unseen (``model.parts.attention.Attend``). With states,
        the tokens follow those that the states hold, which are extended by them.

        A part that `keep` made takes hidden states [B, T, C] of earlier layers instead of tokens, and returns hidden
        states if layers follow.
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
        self, tokens: Tensor, positions: Tensor | None = None, mask: Any = None, states: States | None = None
    ) -> Tensor:
        """Return normalised hidden states [B, T, C], for `project`; arguments as in `forward`.

        Learned positions, also of padding, must be below max_position_embeddings.

        Raises:
            ValueError: more tokens than that without explicit positions.
        """
        if positions is None:
            table, length = self.config.position_table, tokens.shape[1]
            if table is not None and length > table:
                raise ValueError(f"{length} tokens are more than max_position_embeddings {table}; give fewer")
            positions = torch.arange(length, device=tokens.device)
        x = tokens if tokens.is_floating_point() else self.embed(tokens, positions)
        places = self.places(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, places, mask, states)
        return x if self.norm is None else self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input [B, T, C] of tokens [B, T] and positions [T] or [B, T]."""
        assert self.embedding is not None, "a part without an embedding takes hidden states"
        x, scale = self.embedding(tokens), self.scale
        if self.config.traits.rounds_scale:
            # In the embeddings' dtype, as in the released models' code: the root of 3072 is 55.5 in bfloat16.
            scale = torch.tensor(scale, dtype=x.dtype).item()
        x = x if scale is None else x * scale
        if self.position_embedding is not None:
            return x + self.position_embedding(positions)  # [B, T, C] + [T, C] or [B, T, C]
        return x if self.sinusoids is None else x + self.sinusoids(positions).to(x.dtype)

    def places(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """Return what every layer is told of the positions; ``dtype`` is the activations'."""
        if not self.rotates:
            return positions if self.config.linear_attention else None
        rotary = Rotary(positions, self.rotary_dim, self.config, dtype)
        if self.local_rope is not None:
            rotary.local = Rotary(positions, self.rotary_dim, self.local_rope, dtype)
        return rotary

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., C]."""
        return self.output(hidden) if self.output is not None else linear(hidden, self.output_weight)

    def keep(self, layers: range) -> None:
        """Reduce the model to these layers; parameters keep their names.

        Modules before the layers stay with the first layer, norm and output with the last. With tied embeddings the
        last part keeps a copy of the embedding.
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

        With ``frozen`` adapters stay too: a model on the meta device then trains them with masters in float32.
        """
        self.to(dtype)
        for name, module in self.named_modules():
            if getattr(module, "full_precision", False) or (frozen and is_adapter(f"{name}.weight")):
                module.float()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight to its initial value. Call it before sharding.

        Raises ValueError on the meta device; call `to_empty(device=...)` first.
        """
        for name, weight in self.named_parameters():
            if weight.is_meta:
                raise ValueError(f"{name} is on the meta device; call to_empty(device=...) before init_weights")
            weight.copy_(initial_value(self, Beginning(name, weight.shape, seed)))
