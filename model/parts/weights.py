"""Statements of a part about its weights: how each begins, and how tensor parallelism splits it.

A part is a module of ours. It has two class attributes, tables by the names of its parameters and
of its children; a name may reach further in, such as mlp.0. What a child states of its own
parameters comes before what the part states of the child. A parameter of which nobody states
something is refused by its name, on one process too: there is no default. Where construction
decides, such as a gate's first bias, the table is an attribute of the object.

    class MLP(nn.Module):
        INIT: ClassVar[Inits] = {"up": "matrix", "down": "residual"}
        SPLIT: ClassVar[Splits] = {"up": "columns", "down": "rows"}

``INIT`` has a word or an ``Init``. A word about a child is of its weight; its bias, if it has one,
begins at 0.

* zeros, ones
* normal: a normal of the model's standard deviation
* matrix: a linear layer, as the model begins its matrices
* qkv: a linear layer that makes queries, keys or values, which some models begin as one matrix
* residual: a linear layer that writes into the residual stream

The model says what the words mean in it: its attribute ``inits``, from ``normal_inits`` or
``xavier_inits``.

``SPLIT`` has one of the words of ``Split``, which ``parallel/tensor/split.py`` turns into styles.
Of linear layers:

* columns: split by output channels; takes all tokens, returns this rank's channels
* rows: split by input channels, the bias by entries; returns partial sums, which ``all_tokens``
  adds up
* kv_heads: columns of key or value heads as wide as the part's ``head_dim``; where there are fewer
  heads than ranks, every rank has all and computes the one that its query heads attend to

Adapters (``model.parts.lora``) follow the linear layer in which they lie. Of what belongs to heads:

* heads: a number per head, or several: a parameter that is a vector, a tuple, or the number of
  heads itself. The part's ``forward`` takes this rank's entries of such a parameter as an argument
  of its name
* all_heads: an RMS norm over the channels of all heads at once, with or without a weight
* whole: on every rank, applied to what the rank has: its heads, or its tokens as plain tensors;
  gradients are summed

Of the residual stream, whose tokens the ranks share:

* tokens: a norm, on every rank, of this rank's tokens
* all_tokens: an attention or a feed-forward, which takes all tokens and whose output is summed; it
  states its own parts
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
    """A model's hidden states under tensor parallelism, each rank with some of the tokens.

    A model states it as ``STREAM``. Its ``is_last`` is whether it has what follows the layers, and
    of a plain stream ``is_first`` whether it has what is before them: a stage of a pipeline may
    lack either.
    """

    plain: bool
    """They are plain tensors; otherwise DTensors, sharded by the embedding or wrapped between
    stages."""
    inputs: Mapping[str, int] = {}
    """Inputs of a plain stream that are split, by name, and their dimension of tokens. Later stages
    get the first input split."""


class Beginning(NamedTuple):
    """A part of a parameter whose initial value is asked for."""

    name: str
    shape: Sequence[int]
    """The whole parameter's."""
    seed: int
    part: Part = ()


Init = Callable[[Beginning], Tensor]
"""Returns the initial value (float32, on the CPU). It depends on the name, the shape and the seed
alone: not on mesh, pipeline split or order of construction."""


def constant(value: float, weight: Beginning) -> Tensor:
    """Return one number everywhere; an ``Init`` once it has the number."""
    return torch.full(tuple(weight.shape), value)[weight.part]


def drawn(fill: Callable[..., Tensor], weight: Beginning) -> Tensor:
    """Return random numbers that ``fill`` draws, as the functions of ``torch.nn.init`` do."""
    return initial_weight_slice(fill, *weight)


def normal(std: float) -> Init:
    """Return an Init of normals of this standard deviation."""
    return partial(drawn, partial(nn.init.normal_, std=std))


def uniform(bound: float) -> Init:
    """Return an Init of numbers uniform from -bound to bound."""
    return partial(drawn, partial(nn.init.uniform_, a=-bound, b=bound))


def xavier(matrices: int, weight: Beginning) -> Tensor:
    """Return Xavier uniform numbers, for ``matrices`` alike that count as one."""
    outputs, inputs = weight.shape
    return uniform(math.sqrt(6 / (inputs + matrices * outputs)))(weight)


def input_uniform(weight: Beginning) -> Tensor:
    """Return numbers uniform within 1 / sqrt(in), as torch begins linear layers."""
    return uniform(1 / math.sqrt(weight.shape[1]))(weight)


Word = Literal["zeros", "ones", "normal", "matrix", "qkv", "residual"]
Inits = Mapping[str, Word | Init]
CONSTANTS = {"zeros": partial(constant, 0.0), "ones": partial(constant, 1.0)}


def normal_inits(std: float, layers: int) -> dict[str, Init]:
    """Return the words' meaning in a language model, whose matrices begin as normals.

    Those that write into the residual stream have it divided by sqrt(2 * layers), so that its
    variance does not grow with depth (Radford et al. 2019, section 2.3; Megatron-LM's
    scaled_init_method_normal).
    """
    plain, scaled = normal(std), normal(std / math.sqrt(2 * layers))
    return {**CONSTANTS, "normal": plain, "matrix": plain, "qkv": plain, "residual": scaled}


def xavier_inits(std: float) -> dict[str, Init]:
    """Return the words' meaning in a diffusion transformer, whose matrices begin Xavier uniform.

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
    """Return the initial value of a parameter of the model, as the part that has it states.

    The model may be on the meta device; its values are not read.

    Raises:
        ValueError: no part states how it begins.
    """
    path = weight.name.split(".")
    for depth in reversed(range(len(path))):  # from the module that has it up to the model
        part = model.get_submodule(".".join(path[:depth]))
        inits, name = getattr(part, "INIT", {}), ".".join(path[depth:])
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
