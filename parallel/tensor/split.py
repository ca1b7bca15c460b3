"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.2).

The tp ranks hold the same tokens. Each computes some heads of every attention, some columns of every feed-forward layer
and the logits of some vocabulary entries. In between, where all channels of a token are needed (norms, residual sums),
each holds some of the tokens: the all-reduce becomes a reduce-scatter and an all-gather of the same traffic. Sequence
parallelism is on whenever tp > 1: every parameter is then a DTensor, and partial gradients of norms are summed.

Shapes: B sequences, T tokens of this context-parallel rank (a multiple of tp), C width of the residual stream, G key
and value heads, D width of a head, V vocabulary entries. ``Shard(1)`` of [B, T, C] is over tokens, ``Shard(-1)`` over
channels.
"""

import re

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel, parallelize_module

from parallel.tensor.styles import (
    AllTokens,
    Entries,
    GatheredNorm,
    JointNorm,
    Matrix,
    OwnHeads,
    OwnTokens,
    PerHead,
    Whole,
    of_tokens,
)

Styles = dict[str, ParallelStyle | None]
"""By the names of modules, in each layer or whole; None leaves one to its parts."""


def split_model(model: nn.Module, mesh: DeviceMesh, *, head_dim: int, kv_heads: int) -> None:
    """Split a transformer on the meta device over the ranks of ``mesh``, in place; before any other parallelism.

    The model may have the modules embedding, position_embedding or sinusoids, layers (each with attention_norm,
    attention with wq, wk, wv and wo, mlp_norm, and mlp with up, down and optionally gate, and optionally
    attention_post_norm and mlp_post_norm), norm and output, with or without biases. An attention may have
    log_decay, one number per head, num_heads, sinks, a parameter of a number per head that ``own_sinks`` returns,
    and the modules q_norm and k_norm (RMS norms of each head, or ``joint``), wu (a gate), lrpe (angles theta of
    every head) and norm (an RMS norm over all heads, without a weight). One with ``convolve`` has a delta rule,
    split by its key heads and their value heads: wa and wb, conv_q, conv_k, conv_v and gates, parameters of each
    head or channel, and out_norm, of each head. Linear layers may hold adapters. The model takes tokens [B, T], the
    same on all ranks, and returns logits [B, T, V] as a DTensor sharded over the vocabulary, for vocabulary.py's
    ``cross_entropy_sum``.

    A pipeline stage lacks some of these. Stages send each other hidden states of this rank's tokens [B, T / size, C],
    as plain tensors.

    The query heads and the feed-forward width must be multiples of the mesh's size, and ``kv_heads`` a multiple or a
    divisor of it: with fewer heads than ranks, every rank keeps all and computes the one that its query heads attend
    to. The vocabulary and the position table need not divide evenly: each rank holds V / size entries, rounded up, and
    the last one the rest, at least one.

    Raises:
        ValueError: the model has a parameter in a module that is none of these.
    """
    size = mesh.size()
    if size == 1:
        return
    head = mesh.get_local_rank() * kv_heads // size
    heads = Matrix(0) if kv_heads % size == 0 else Whole(slice(head * head_dim, (head + 1) * head_dim))
    styles: Styles = {
        "embedding": Entries(),
        "position_embedding": Entries(),
        "sinusoids": OwnTokens(),
        **dict.fromkeys(("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"), SequenceParallel()),
        "attention": OwnHeads(),
        "attention.wq": Matrix(0),
        "attention.wk": heads,
        "attention.wv": heads,
        "attention.q_norm": Whole(),
        "attention.k_norm": Whole(),
        "attention.wu": Matrix(0),
        "attention.lrpe": PerHead(),
        "attention.wa": Matrix(0),
        "attention.wb": Matrix(0),
        "attention.conv_q": PerHead(),
        "attention.conv_k": PerHead(),
        "attention.conv_v": PerHead(),
        "attention.gates": PerHead(),
        "attention.out_norm": Whole(),
        "attention.norm": JointNorm(),
        "attention.wo": Matrix(1),
        "mlp": AllTokens(),
        "mlp.gate": Matrix(0),
        "mlp.up": Matrix(0),
        "mlp.down": Matrix(1),
        "norm": GatheredNorm(),
        "output": ColwiseParallel(use_local_output=False),
    }
    styles |= _by_module(model)
    _apply(model, mesh, styles | _adapters(styles))
    model.register_forward_pre_hook(lambda _, inputs: (of_tokens(inputs[0], mesh), *inputs[1:]))
    if getattr(model, "norm", None) is None:
        # A copy: FSDP warns about views.
        model.register_forward_hook(lambda _, inputs, x: x.to_local().clone())


def split_dit(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a diffusion transformer as ``split_model`` splits a language model.

    The model may have the modules x_embedder, t_embedder, y_embedder, layers (each attention with wq, wk, wv and wo,
    mlp with up and down, adaLN_modulation) and final_layer. It takes the positional arguments patches [B, T, P],
    positions [T], times and labels [B], the same on all ranks, and returns patches [B, T, P'], whole on all ranks.
    Stages send each other hidden states of this rank's patches [B, T / size, C].

    Conditions [B, C] are the same on all ranks, but each rank modulates only its own patches: the gradients of the
    modulations and of the conditions' embedders are partial, and are summed.

    The heads and the feed-forward width must be multiples of the mesh's size.

    Raises:
        ValueError: the model has a parameter in a module that is none of these.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    if size == 1:
        return
    whole = ("x_embedder", "t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder", "adaLN_modulation.1")
    final = ("final_layer.adaLN_modulation.1", "final_layer.linear")
    styles: Styles = dict.fromkeys((*whole, *final), Whole())
    styles |= dict.fromkeys(("attention", "mlp"), AllTokens(plain=True))
    styles |= dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "mlp.up"), Matrix(0))
    styles |= dict.fromkeys(("attention.wo", "mlp.down"), Matrix(1))
    _apply(model, mesh, styles)
    first = getattr(model, "x_embedder", None) is not None

    def own_patches(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, positions, *others = inputs
        return x.chunk(size, 1)[rank] if first else x, positions.chunk(size)[rank], *others

    model.register_forward_pre_hook(own_patches)
    if getattr(model, "final_layer", None) is not None:
        model.register_forward_hook(lambda _, inputs, x: of_tokens(x, mesh).full_tensor().clone())


def _by_module(model: nn.Module) -> Styles:
    """Return the styles of modules whose name says too little, by their whole names."""
    found: Styles = {}
    for name, module in model.named_modules():
        if hasattr(module, "convolve"):  # a delta rule, whose keys and values have heads of their own
            found |= {f"{name}.wk": Matrix(0), f"{name}.wv": Matrix(0)}
        if getattr(module, "joint", False):
            found[name] = JointNorm()
        if hasattr(module, "narrow"):  # a bottleneck, of all heads
            found |= {name: None, f"{name}.narrow": Whole(), f"{name}.wide": Matrix(0)}
    return found


def _adapters(styles: Styles) -> Styles:
    """Return the styles of the adapters inside of linear layers (``model.parts.lora``), which send nothing.

    Beside output channels B is split as they are, and A is whole; beside input channels A is split, and B, whole, takes
    partial sums to partial sums. Gradients of what is whole are partial.
    """
    found: Styles = {}
    for name, style in styles.items():
        if isinstance(style, Matrix) or name in ("attention.wk", "attention.wv"):
            inputs = isinstance(style, Matrix) and style.dim == 1
            found[f"{name}.lora_A"], found[f"{name}.lora_B"] = (style, Whole()) if inputs else (Whole(), style)
    return found


def _apply(model: nn.Module, mesh: DeviceMesh, styles: Styles) -> None:
    """Split the named modules, in each layer and outside; a whole name wins.

    Raises ValueError for a parameter in none of them.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {name: re.sub(r"^layers\.[^.]+\.", "", name) for name, _ in model.named_modules()}
    found = {name: styles.get(name, styles.get(kind)) for name, kind in names.items()}
    parallelize_module(model, mesh, {name: style for name, style in found.items() if style is not None})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)  # styles make new ones
    if left := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        raise ValueError(
            f"tensor parallelism knows no way to split {', '.join(left)}; parallel/tensor/split.py has the plan"
        )
