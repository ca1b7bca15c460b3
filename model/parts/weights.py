"""Initial values of weights, and their splits under tensor parallelism.

Both are stated where the weights are made, so that a new module needs no change elsewhere. A module
of ours has two class attributes, tables by the names of its parameters and children; a name may
reach further in, such as mlp.0. An entry of a child for its own parameter takes precedence over its
parent's entry for the child. There is no default: a parameter without an entry is an error that
names it, on one process too. If construction decides, as for a gate's first bias, the table is an
attribute of the object.

    class MLP(nn.Module):
        INIT: ClassVar[Inits] = {"up": "matrix", "down": "residual"}
        SPLIT: ClassVar[Splits] = {"up": "columns", "down": "rows"}

``INIT`` has a word or an ``Init``. A word for a child is for its weight; its bias, if it has one,
begins at 0.

* zeros, ones
* normal: normal with the model's standard deviation
* matrix: a linear layer, initialized as the model's matrices are
* qkv: a linear layer that makes queries, keys or values, which some models initialize as one matrix
* residual: a linear layer that writes into the residual stream

The model's attribute ``inits``, from ``normal_inits`` or ``xavier_inits``, holds the initializers
that the words stand for.

``SPLIT`` has one of the words of ``Split``, which ``parallel/tensor/split.py`` turns into styles.
For linear layers:

* columns: split by output channels; takes all tokens, returns this rank's channels
* rows: split by input channels, the bias by entries; returns partial sums, which ``all_tokens``
  adds up
* kv_heads: columns of key or value heads as wide as the part's ``head_dim``; with fewer heads than
  ranks, every rank has all and computes the one that its query heads attend to

Adapters (``model.parts.lora``) follow the linear layer that contains them. For heads:

* heads: one or several numbers per head: a parameter that is a vector, a tuple, or the number of
  heads itself. The module's ``forward`` takes this rank's entries of such a parameter as an
  argument of its name
* all_heads: an RMS norm over the channels of all heads at once, with or without a weight
* whole: on every rank, applied to what the rank has: its heads, or its tokens as plain tensors;
  gradients are summed

For the residual stream, whose tokens are sharded over the ranks:

* tokens: a norm, on every rank, of this rank's tokens
* all_tokens: an attention or a feed-forward, which takes all tokens and whose output is summed; it
  has a table of its own
* positions: a function of positions without parameters, computed for this rank's tokens
* entries: an embedding, split by entries
* last_norm: as tokens; then the tokens are gathered, for the logits
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
    """Layout of a model's hidden states under tensor parallelism, each rank with some tokens.

    A model states it as ``STREAM``. Its ``is_last`` is True if it has what follows the layers, and
    its ``is_first``, for a plain stream, if it has what precedes them: a pipeline stage may lack
    either.
    """

    plain: bool
    """True for plain tensors; otherwise DTensors, sharded by the embedding or wrapped between
    stages."""
    inputs: Mapping[str, int] = {}
    """Inputs of a plain stream that are split, by name, and their dimension of tokens. Later stages
    receive the first input already split."""


class Beginning(NamedTuple):
    """A slice of a parameter, to be initialized."""

    name: str
    shape: Sequence[int]
    """The whole parameter's."""
    seed: int
    part: Part = ()


Init = Callable[[Beginning], Tensor]
"""Returns the initial value (float32, on the CPU). It depends on the name, the shape and the seed
alone: not on mesh, pipeline split or order of construction."""


def constant(value: float, weight: Beginning) -> Tensor:
    """Return a slice filled with one number."""
    return torch.full(tuple(weight.shape), value)[weight.part]


def drawn(fill: Callable[..., Tensor], weight: Beginning) -> Tensor:
    """Return random numbers drawn by ``fill``, a function like those of ``torch.nn.init``."""
    return initial_weight_slice(fill, *weight)


def normal(std: float) -> Init:
    """Return an Init of normal numbers with this standard deviation."""
    return partial(drawn, partial(nn.init.normal_, std=std))


def uniform(bound: float) -> Init:
    """Return an Init of numbers uniform from -bound to bound."""
    return partial(drawn, partial(nn.init.uniform_, a=-bound, b=bound))


def xavier(matrices: int, weight: Beginning) -> Tensor:
    """Return Xavier uniform numbers for one of ``matrices`` equal ones that count as one matrix."""
    outputs, inputs = weight.shape
    return uniform(math.sqrt(6 / (inputs + matrices * outputs)))(weight)


def input_uniform(weight: Beginning) -> Tensor:
    """Return numbers uniform within 1 / sqrt(in), as torch initializes linear layers."""
    return uniform(1 / math.sqrt(weight.shape[1]))(weight)


Word = Literal["zeros", "ones", "normal", "matrix", "qkv", "residual"]
Inits = Mapping[str, Word | Init]
CONSTANTS = {"zeros": partial(constant, 0.0), "ones": partial(constant, 1.0)}


def normal_inits(std: float, layers: int) -> dict[str, Init]:
    """Return the initializers of a language model, whose matrices are normal.

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
    }


def xavier_inits(std: float) -> dict[str, Init]:
    """Return the initializers of a diffusion transformer, whose matrices are Xavier uniform.

    Queries, keys and values count as one matrix, as in the original's initialize_weights.
    """
    matrix = partial(xavier, 1)
    return {
        **CONSTANTS,
        "normal": normal(std),
        "matrix": matrix,
        "qkv": partial(xavier, 3),
        "residual": matrix,
    }


def initial_value(model: Any, weight: Beginning) -> Tensor:
    """Return the initial value of a slice of a parameter, as its module's INIT states.

    The model may be on the meta device; its values are not read.

    Raises:
        ValueError: no module has an entry for it.
    """
    path = weight.name.split(".")
    for depth in reversed(range(len(path))):  # from the module that has it up to the model
        module = model.get_submodule(".".join(path[:depth]))
        inits = getattr(module, "INIT", {})
        name = ".".join(path[depth:])
        child, _, parameter = name.rpartition(".")
        if name in inits:
            init = inits[name]
        elif child in inits and parameter in ("weight", "bias"):
            init = "zeros" if parameter == "bias" else inits[child]
        else:
            continue
        if isinstance(init, str):
            init = model.inits[init]
        return init(weight)

    owner = title_of_owner(model, weight.name)
    raise ValueError(
        f"{weight.name} has no initial value: {owner} states none in INIT, "
        "for which model/parts/weights.py has the words; give it one"
    )
