"""What language models share: from token ids to logits in two steps, and weights that a seed and a name decide.

Shapes: B sequences, T tokens, C width of the residual stream, V vocabulary entries.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import States
from model.config import ModelConfig

Head = Callable[[Tensor, Tensor], Tensor]
"""Normalised hidden states [B, T, C] and the output weights [V, C] -> what a forward is to return."""


class LanguageModel(nn.Module):
    """Token ids -> logits. Its weights mean something after init_weights or load_state_dict.

    A model sets the modules below and defines `hidden`. With tied embeddings there is no output module, and the
    embedding's weight is the only copy in the state dict. What `keep` has dropped is None.
    """

    config: ModelConfig
    embedding: nn.Embedding | None
    layers: nn.ModuleList
    norm: nn.Module | None
    output: nn.Linear | None

    only_first: tuple[str, ...] = ()
    """Modules, besides the embedding, that come before the layers."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, head: Head | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; positions [T] or [B, T] are global, by default 0 .. T-1.

        A head is what a caller puts in the place of the logits, such as a loss that never has all of them at once. It
        runs in here because a sharded model has its weights whole in its forward alone.

        A part that `keep` made takes hidden states [B, T, C] of the layers before it in the place of tokens, and
        returns them where layers come after it.
        """
        hidden = self.hidden(tokens, positions)
        if self.norm is None:
            return hidden
        return self.project(hidden) if head is None else head(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """Weights [V, C] of the output projection."""
        weight = self.embedding if self.output is None else self.output
        assert weight is not None
        return weight.weight

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalised hidden states [B, T, C], which `project` turns into logits; arguments as in `forward`."""
        raise TypeError(f"{type(self).__name__} defines no hidden states")

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, T, C] of token ids, or the hidden states that stand in their place as they are."""
        if tokens.is_floating_point():
            return tokens
        assert self.embedding is not None, "a part without an embedding takes hidden states"
        return self.embedding(tokens)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., C]."""
        return self.output(hidden) if self.output is not None else F.linear(hidden, self.output_weight)

    def keep(self, layers: range) -> None:
        """Become the part of the model that these layers are; parameters keep their names.

        What comes before the layers stays with the first one, the norm and the output with the last. A last part whose
        output weights are the embedding's keeps a copy of that.
        """
        total = len(self.layers)
        drop_layers(self.layers, layers)
        first, last = 0 in layers, total - 1 in layers
        if not first:
            for name in self.only_first:
                setattr(self, name, None)
        if not last:
            self.norm = None
        if not first and not (last and self.output is None):
            self.embedding = None
        if not last:
            self.output = None

    def cast(self, dtype: torch.dtype) -> None:
        """Compute in this dtype from now on, but for the modules that say full_precision, which stay in float32."""
        self.to(dtype)
        for module in self.modules():
            if getattr(module, "full_precision", False):
                module.float()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight to its `initial_weight`. For whole tensors: call it before anything is sharded.

        After construction on the meta device call `to_empty(device=...)` first, else ValueError.
        """
        for name, weight in self.named_parameters():
            if weight.is_meta:
                raise ValueError(f"{name} is on the meta device; call to_empty(device=...) before init_weights")
            weight.copy_(initial_weight(self.config, name, weight.shape, seed))


class RecurrentModel(LanguageModel):
    """A language model of linear attention, whose layers carry all of the past in a state of one size.

    A hybrid's layers of softmax attention carry keys and values, which grow.

    A model sets the modules of a LanguageModel and defines `embed`; a layer takes (x, positions, states).
    """

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What enters the first layer [B, T, C], of tokens [B, T] and positions [T] or [B, T]."""
        raise TypeError(f"{type(self).__name__} defines no embedding")

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, states: States = None) -> Tensor:
        """As in LanguageModel. With states, one entry per layer, the tokens go on from these, which are replaced."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = tokens if tokens.is_floating_point() else self.embed(tokens, positions)
        for layer in self.layers:
            x = layer(x, positions) if states is None else layer(x, positions, states)
        return x if self.norm is None else self.norm(x)


def output_module(config: ModelConfig) -> nn.Linear | None:
    """The output projection, or None where it has the embedding's weight."""
    untied = config.untie_embeddings_and_output_weights
    return nn.Linear(config.hidden_size, config.vocabulary, bias=False) if untied else None


def initial_weight(config: ModelConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value (float32, on the CPU) of the whole parameter `name`, a function of its name and the seed alone.

    Norms start at 1, biases at 0, LRPE's angle j at 10000^(-2 j / channels), matrices and tables as normals of standard
    deviation init_method_std, those that write into the residual stream divided by sqrt(2 * num_layers), so that its
    variance does not grow with depth (Radford et al. 2019, section 2.3; Megatron-LM's scaled_init_method_normal). One
    generator per parameter makes the weights the same on any mesh, pipeline split or order of construction.
    """
    if name.endswith(".bias"):
        return torch.zeros(*shape)
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    if name.endswith("lrpe.theta"):
        return (10000.0 ** (-2 / shape[0] * torch.arange(shape[0], dtype=torch.float64))).float()
    std = config.init_method_std
    if name.endswith(("attention.wo.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * config.num_layers)
    return torch.empty(*shape).normal_(0.0, std, generator=generator_of(seed, name))


def generator_of(seed: int, name: str) -> torch.Generator:
    """The random numbers of one parameter, or of whatever has a name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def drop_layers(layers: nn.ModuleList, kept: range) -> None:
    """Drop all layers but these, which keep their numbers."""
    for number in set(range(len(layers))) - set(kept):
        delattr(layers, str(number))  # `del` would number the rest anew
