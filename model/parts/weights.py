"""Initial values of weights, and their splits under tensor parallelism.

Both are stated in the module that creates the weights, so a new module needs no change elsewhere.
Such a module has two class attributes, INIT and SPLIT: tables keyed by the names of its parameters
and children. A key may also name a descendant, such as mlp.0. A child's entry for its own parameter
takes precedence over the parent's entry for the child. There is no default: a parameter without an
entry is an error that names it, on one process too. If an entry depends on arguments of the
constructor, as for the initial bias of a gate, the table is an attribute of the object.

    class MLP(nn.Module):
        INIT: ClassVar[Inits] = {"up": "matrix", "down": "residual"}
        SPLIT: ClassVar[Splits] = {"up": "columns", "down": "rows"}

An entry of ``INIT`` is a word or an ``Init``. An entry for a child applies to the child's weight; a
bias starts at 0.

* zeros, ones
* normal: normal numbers with the model's standard deviation
* matrix: a linear layer, initialized as the model's matrices are
* qkv: a linear layer for queries, keys or values, which some models initialize as one matrix
* residual: a linear layer that writes into the residual stream
* gate: a linear layer with a gate per head, initialized as the model's matrices are

Optimizers that orthogonalize matrices take those of matrix, qkv and residual in the model's
``layers``; see ``is_hidden_matrix``.

The model's attribute ``inits``, from ``normal_inits`` or ``xavier_inits``, holds the initializers
that the words stand for.

An entry of ``SPLIT`` is a word of ``Split``, which ``parallel/tensor/split.py`` turns into a style.
For linear layers:

* columns: split by output channels; takes all tokens, returns this rank's channels
* rows: split by input channels, the bias by entries; returns partial sums, which ``all_tokens``
  adds up
* kv_heads: split by key or value heads, each as wide as the module's ``head_dim``; with fewer heads
  than ranks, every rank has all heads and computes only the one that its query heads attend to

Adapters (``model.parts.lora``) follow the linear layer that contains them. For heads:

* heads: one or several numbers per head: a parameter that is a vector, a tuple, or the number of
  heads itself. The module's ``forward`` takes this rank's entries of such a parameter as an
  argument with the parameter's name
* all_heads: an RMS norm over the channels of all heads at once, with or without a weight
* whole: a copy on every rank, applied to the rank's own heads, or to its own tokens as plain
  tensors; gradients are summed

For the residual stream, whose tokens are sharded over the ranks:

* tokens: a norm, with a copy on every rank, of this rank's tokens
* all_tokens: attention or a feed-forward, which takes all tokens; its outputs are summed over
  ranks, and it has its own table
* positions: a function of positions without parameters, computed for this rank's tokens
* entries: an embedding, split by entries
* last_norm: like tokens, but all ranks' tokens are then gathered, for the logits
* logits: the output projection, split by vocabulary entries
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from runtime.tensors import Part, initial_weight_slice, title_of_owner

Split = Literal[
    "columns",
    "rows",
    "kv_heads",
    "heads",
    "all_heads",
    "whole",
    "tokens",
    "all_tokens",
    "positions",
    "entries",
    "last_norm",
    "logits",
]
Splits = Mapping[str, Split]


class Stream(NamedTuple):
    """Layout of a model's hidden states under tensor parallelism; each rank has some tokens.

    A model states it as ``STREAM``. The model's ``is_last`` is True if it has the modules that
    follow the layers; with a plain stream, its ``is_first`` is True if it has those that precede
    them. A pipeline stage may lack either.
    """

    plain: bool
    """True if hidden states are plain tensors; otherwise they are DTensors, sharded by the
    embedding or wrapped between stages."""
    inputs: Mapping[str, int] = {}
    """Inputs of a plain stream that are split over ranks: input's name -> its dimension of tokens.
    Later stages receive the first input already split."""


class Beginning(NamedTuple):
    """A slice of a parameter, to be initialized."""

    name: str
    shape: Sequence[int]
    """Shape of the whole parameter."""
    seed: int
    part: Part = ()


Init = Callable[[Beginning], Tensor]
"""Function that returns the initial value of a slice (float32, on the CPU). The value depends only
on the name, the shape and the seed, not on the mesh, the pipeline split or the order of
construction."""


def constant(value: float, weight: Beginning) -> Tensor:
    """Return a slice filled with one number."""
    return torch.full(tuple(weight.shape), value)[weight.part]


def drawn(fill: Callable[..., Tensor], weight: Beginning) -> Tensor:
    """Return random numbers drawn by ``fill``, a function like those of ``torch.nn.init``."""
    return initial_weight_slice(fill, *weight)


def normal(std: float) -> Init:
    """Return an Init that draws normal numbers with this standard deviation."""
    return partial(drawn, partial(nn.init.normal_, std=std))


def uniform(bound: float) -> Init:
    """Return an Init that draws uniform numbers from -bound to bound."""
    return partial(drawn, partial(nn.init.uniform_, a=-bound, b=bound))


def xavier(matrices: int, weight: Beginning) -> Tensor:
    """Return Xavier uniform numbers; ``matrices`` equal weights count as one matrix."""
    outputs, inputs = weight.shape
    return uniform(math.sqrt(6 / (inputs + matrices * outputs)))(weight)


def input_uniform(weight: Beginning) -> Tensor:
    """Return numbers uniform within +-1 / sqrt(in), as torch initializes linear layers."""
    return uniform(1 / math.sqrt(weight.shape[1]))(weight)


Word = Literal["zeros", "ones", "normal", "matrix", "qkv", "residual", "gate"]
Inits = Mapping[str, Word | Init]
HIDDEN_MATRICES = ("matrix", "qkv", "residual")
"""Words of matrices that map hidden states to hidden states, if they are in a model's layers."""
CONSTANTS = {"zeros": partial(constant, 0.0), "ones": partial(constant, 1.0)}


def normal_inits(std: float, layers: int) -> dict[str, Init]:
    """Return the initializers of a language model; its matrices are normal.

    Matrices that write into the residual stream have std / sqrt(2 * layers), so that its variance
    does not grow with depth (Radford et al. 2019, section 2.3; Megatron-LM's
    scaled_init_method_normal).
    """
    unscaled = normal(std)
    scaled = normal(std / math.sqrt(2 * layers))
    return {
        **CONSTANTS,
        "normal": unscaled,
        "matrix": unscaled,
        "qkv": unscaled,
        "residual": scaled,
        "gate": unscaled,
    }


def xavier_inits(std: float) -> dict[str, Init]:
    """Return the initializers of a diffusion transformer; its matrices are Xavier uniform.

    Queries, keys and values count as one matrix, as in the original's initialize_weights.
    """
    matrix = partial(xavier, 1)
    return {
        **CONSTANTS,
        "normal": normal(std),
        "matrix": matrix,
        "qkv": partial(xavier, 3),
        "residual": matrix,
        "gate": matrix,
    }


def initial_value(model: Any, weight: Beginning) -> Tensor:
    """Return the initial value of a parameter's slice, as its module's INIT states.

    The model may be on the meta device; its values are not read.

    Raises:
        ValueError: no module has an entry for the parameter.
    """
    init = stated_init(model, weight.name)
    if init is not None:
        if isinstance(init, str):
            init = model.inits[init]
        return init(weight)

    owner = title_of_owner(model, weight.name)
    raise ValueError(
        f"{weight.name} has no initial value: {owner} states none in INIT; "
        "add an entry there (model/parts/weights.py lists the words)"
    )


def stated_init(model: Any, name: str) -> Word | Init | None:
    """Return the entry of INIT for a parameter; None if no module states one."""
    path = name.split(".")
    for depth in reversed(range(len(path))):  # from the innermost module up to the model
        module = model.get_submodule(".".join(path[:depth]))
        inits = getattr(module, "INIT", {})
        relative_name = ".".join(path[depth:])
        child, _, parameter = relative_name.rpartition(".")
        if relative_name in inits:
            return inits[relative_name]
        if child in inits and parameter in ("weight", "bias"):
            return "zeros" if parameter == "bias" else inits[child]
    return None


def is_hidden_matrix(model: Any, name: str) -> bool:
    """Return True for the matrix of a linear layer that maps hidden states to hidden states.

    False outside the model's ``layers`` (embeddings, output head), and for norms, biases, gates,
    convolutions, sinks, adapters and a diffusion transformer's modulations.
    """
    return name.startswith("layers.") and stated_init(model, name) in HIDDEN_MATRICES
