"""LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B sequences, T tokens, C width of the residual stream, V vocabulary entries.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attend, Attention, sdpa
from model.layers import RMSNorm, Rotary, SwiGLU


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a LLaMA."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside SwiGLU; by default 8/3 of hidden_size, rounded up to a multiple of 64."""
    num_attention_heads: int = 8
    """Query heads."""
    num_query_groups: int | None = None
    """Key and value heads (grouped-query attention); by default one per query head."""
    kv_channels: int | None = None
    """Width of one head; by default hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Vocabulary entries; by default the tokenizer's."""
    rotary_base: float = 10000.0
    """Base of the rotary angles."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output projection weights of its own, not the embedding's."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            self._require(getattr(self, name) >= 1, name, "it must be 1 or more")
        for name in ("ffn_hidden_size", "num_query_groups", "kv_channels", "vocab_size"):
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "it must be 1 or more, or left out for its default")
        for name in ("rotary_base", "norm_epsilon", "init_method_std"):
            value = getattr(self, name)
            self._require(math.isfinite(value) and value > 0, name, "it must be a number above 0")
        heads = self.num_attention_heads
        self._require(
            self.kv_channels is not None or self.hidden_size % heads == 0,
            "hidden_size",
            f"it must be a multiple of num_attention_heads {heads}; change either, or set kv_channels",
        )
        self._require(heads % self.query_groups == 0, "num_query_groups", f"it must divide num_attention_heads {heads}")
        self._require(
            self.head_dim % 2 == 0,
            "hidden_size" if self.kv_channels is None else "kv_channels",
            f"the {heads} heads are {self.head_dim} wide, which must be even: rotary positions turn channels in pairs",
        )

    def _require(self, ok: bool, name: str, problem: str) -> None:
        if not ok:
            raise ValueError(f"{name} is {getattr(self, name)}; {problem}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside SwiGLU; 8/3 of hidden_size gives its three matrices the size of an ordinary MLP's two."""
        return self.ffn_hidden_size or 64 * math.ceil(8 * self.hidden_size / 3 / 64)

    @property
    def vocabulary(self) -> int:
        """Vocabulary entries; ValueError while nothing has set them."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set; give it, or a tokenizer to take it from")
        return self.vocab_size


Head = Callable[[Tensor, Tensor], Tensor]
"""Normalised hidden states [B, T, C] and the output weights [V, C] -> what a forward is to return."""


class Layer(nn.Module):
    """One pre-norm transformer layer: [B, T, C] -> [B, T, C]."""

    def __init__(self, config: LlamaConfig, attend: Attend) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = RMSNorm(width, eps=config.norm_epsilon)
        self.attention = Attention(width, config.num_attention_heads, config.query_groups, config.head_dim, attend)
        self.mlp_norm = RMSNorm(width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(width, config.ffn_size)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The language model: token ids -> logits. Its weights mean something after init_weights or load_state_dict.

    With tied embeddings there is no output module, and the embedding's weight is the only copy in the state dict.
    """

    def __init__(self, config: LlamaConfig, attend: Attend = sdpa) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, attend) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        untied = config.untie_embeddings_and_output_weights
        self.output = nn.Linear(config.hidden_size, config.vocabulary, bias=False) if untied else None

    def forward(self, tokens: Tensor, positions: Tensor | None = None, head: Head | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; positions [T] or [B, T] are global, by default 0 .. T-1.

        A head is what a caller puts in the place of the logits, such as a loss that never has all of them at once. It
        runs in here because a sharded model has its weights whole in its forward alone.
        """
        hidden = self.hidden(tokens, positions)
        return self.project(hidden) if head is None else head(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """Weights [V, C] of the output projection."""
        return self.embedding.weight if self.output is None else self.output.weight

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalised hidden states [B, T, C], which `project` turns into logits; arguments as in `forward`."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)  # [B, T, C]
        rotary = Rotary(positions, self.config.head_dim, self.config.rotary_base, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.norm(x)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., C]."""
        return self.output(hidden) if self.output is not None else F.linear(hidden, self.embedding.weight)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight to its `initial_weight`. For whole tensors: call it before anything is sharded.

        After construction on the meta device call `to_empty(device=...)` first, else ValueError.
        """
        for name, weight in self.named_parameters():
            if weight.is_meta:
                raise ValueError(f"{name} is on the meta device; call to_empty(device=...) before init_weights")
            weight.copy_(initial_weight(self.config, name, weight.shape, seed))


def initial_weight(config: LlamaConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value (float32, on the CPU) of the whole parameter `name`, a function of its name and the seed alone.

    Norms start at 1, matrices as normals of standard deviation init_method_std, those that write into the residual
    stream divided by sqrt(2 * num_layers), so that its variance does not grow with depth (Radford et al. 2019,
    section 2.3; Megatron-LM's scaled_init_method_normal). One generator per parameter makes the weights the same on
    any mesh, pipeline split or order of construction.
    """
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    std = config.init_method_std
    if name.endswith(("attention.wo.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * config.num_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(*shape).normal_(0.0, std, generator=generator)


def _layer_matrices(config: LlamaConfig) -> int:
    """Weights in the matrices of one layer."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.query_groups)
    return attention + 3 * config.hidden_size * config.ffn_size


def architecture_of(config: LlamaConfig) -> dict[str, int | float | bool | str]:
    """What decides the shapes and the function of the model, defaults resolved: two equal ones share checkpoints."""
    return {
        "model": "llama",
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.query_groups,
        "kv_channels": config.head_dim,
        "vocab_size": config.vocabulary,
        "rotary_base": config.rotary_base,
        "norm_epsilon": config.norm_epsilon,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
    }


def num_parameters(config: LlamaConfig) -> int:
    """Trainable parameters, embedding included; tied output weights are counted once."""
    tables = config.vocabulary * config.hidden_size * (2 if config.untie_embeddings_and_output_weights else 1)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    return tables + config.num_layers * _layer_matrices(config) + norms


def flops_per_token(config: LlamaConfig, seq_length: int) -> float:
    """Floating-point operations that training one token takes, forward and backward, without recomputation.

    6 per weight of every matrix product, the output projection included and the embedding's lookup not (it multiplies
    nothing), as PaLM counts (Chowdhery et al. 2022, appendix B). Attention adds 12 * layers * heads * head width *
    seq_length for a full mask; the causal mask needs half, and half is counted, as Megatron-LM's
    num_floating_point_operations does. PaLM and nanoGPT count the full square and so report a higher utilisation.
    """
    matrices = config.num_layers * _layer_matrices(config) + config.vocabulary * config.hidden_size
    attention = 12 * config.num_layers * config.num_attention_heads * config.head_dim * seq_length / 2
    return 6 * matrices + attention
