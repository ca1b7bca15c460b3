"""Split a model by tensor parallelism with sequence parallelism.

Sources: Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.2.

The tp ranks hold the same tokens. Each computes some heads of every attention, some columns of
every feed-forward layer and the logits of some vocabulary entries. Norms and residual sums need all
channels of a token, so there each rank holds some of the tokens instead. The all-reduce thereby
becomes a reduce-scatter and an all-gather, which together send as many bytes. Sequence parallelism
is on whenever tp > 1: every parameter is then a DTensor, and partial gradients of norms are summed.

Each part of a model states in words, as its ``SPLIT``, how its weights are split.
``model/parts/weights.py`` explains the words; here they become parallel styles.

Shapes: B sequences, T tokens of this context-parallel rank (a multiple of tp), C width of the
residual stream, D width of a head, V vocabulary entries. ``Shard(1)`` of [B, T, C] is over tokens,
``Shard(-1)`` over channels.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    SequenceParallel,
    parallelize_module,
)

from parallel.tensor.styles import (
    AllTokens,
    Entries,
    GatheredNorm,
    JointNorm,
    LocalTokens,
    Matrix,
    PerHead,
    Replicated,
    wrap_tokens,
)
from runtime.tensors import title_of_owner

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "columns": partial(Matrix, 0),
    "rows": partial(Matrix, 1),
    "all_heads": JointNorm,
    "whole": Replicated,
    "tokens": SequenceParallel,
    "positions": LocalTokens,
    "entries": Entries,
    "last_norm": GatheredNorm,
    "logits": partial(ColwiseParallel, use_local_output=False),
}
"""Parallel styles, keyed by the words of SPLIT that determine a style by themselves. ``_style_of``
handles "kv_heads" and "all_tokens", which depend on the module; ``split_model`` handles "heads"."""


def split_model(model: Any, mesh: DeviceMesh) -> None:
    """Split a model on the meta device over the ranks of ``mesh``, in place.

    Call it before any other parallelism. Each part of the model states how it is split, and the
    model states its ``STREAM`` (``model/parts/weights.py``). A language model takes tokens [B, T],
    the same on all ranks, and returns logits [B, T, V] as a DTensor sharded over the vocabulary,
    for ``cross_entropy_sum`` of vocabulary.py. A model with a plain stream takes whole inputs and
    returns a whole result, both on all ranks. Pipeline stages send each other the hidden states of
    one rank's tokens, [B, T / size, C], as plain tensors.

    In a plain stream, conditions [B, C] are the same on all ranks, but each rank modulates only its
    own tokens: the gradients of the modulations and of the conditions' embedders are partial, and
    are summed.

    The query heads and the feed-forward width must be multiples of the mesh's size, and the key and
    value heads a multiple or a divisor of it: with fewer key and value heads than ranks, every rank
    keeps all of them and computes only the one that its query heads attend to. The vocabulary and
    the position table need not divide evenly: each rank holds V / size entries, rounded up, and the
    last one the rest, at least one.

    Raises:
        ValueError: the model has a parameter for which no part states a split; even on one rank.
    """
    words = split_words(model)
    if mesh.size() == 1:
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for path, part in list(model.named_modules()):
        head_names = [name for name, word in words[path].items() if word == "heads"]
        if head_names:
            parallelize_module(part, mesh, PerHead(head_names))
        for name, word in words[path].items():
            module = attrgetter(name)(part)
            if word == "heads" or module is None:
                continue
            if isinstance(module, nn.Parameter):
                module = part  # the norm that owns the weight
            style = _style_of(word, part, module, mesh, plain=model.STREAM.plain)
            parallelize_module(module, mesh, style)
            _split_adapters(module, mesh, style, inputs=word == "rows")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)  # styles create new parameters
    _split_stream(model, mesh)


def split_words(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return each part's words, keyed by the part's path in the model and then by name.

    A word says how the parameter or child of that name is split. The word of a child that has its
    own SPLIT is left out, unless it is "all_tokens".

    Raises:
        ValueError: a word is unknown, or a parameter has no word.
    """
    words: dict[str, dict[str, str]] = {}
    stated: set[str] = set()
    for path, part in model.named_modules():
        words[path] = {}
        for name, word in getattr(part, "SPLIT", {}).items():
            if word not in WORDS:
                title = type(part).__name__
                all_words = ", ".join(WORDS)
                raise ValueError(
                    f"{title}.SPLIT gives {name} the unknown word {word}; use one of {all_words}"
                )
            if word == "all_tokens":
                words[path][name] = word
            elif not hasattr(attrgetter(name)(part), "SPLIT"):
                words[path][name] = word
                stated.add(f"{path}.{name}".lstrip("."))
    for name, _ in model.named_parameters():
        module_path = name.rpartition(".")[0]
        owners = {name, module_path}
        linear_path, _, last = module_path.rpartition(".")
        if last in ADAPTERS:
            owners.add(linear_path)  # an adapter is split like the linear layer around it
        if not stated.intersection(owners):
            owner = title_of_owner(model, name)
            raise ValueError(
                f"tensor parallelism cannot split {name}, since {owner} has no entry for it in "
                "SPLIT; add one with a word from model/parts/weights.py"
            )
    return words


ADAPTERS = ("lora_A", "lora_B")
"""Names of the adapter matrices inside a linear layer (``model.parts.lora``)."""
WORDS = (*STYLES, "kv_heads", "heads", "all_tokens")


def _style_of(word: str, part: Any, module: Any, mesh: DeviceMesh, plain: bool) -> ParallelStyle:
    """Return the parallel style of ``module``, given the word that SPLIT of ``part`` has for it."""
    if word == "all_tokens":
        return AllTokens(plain)
    if word != "kv_heads":
        return STYLES[word]()
    ranks = mesh.size()
    heads = module.out_features // part.head_dim
    if heads % ranks == 0:
        return Matrix(0)
    head = mesh.get_local_rank() * heads // ranks
    return Replicated(slice(head * part.head_dim, (head + 1) * part.head_dim))


def _split_adapters(
    linear: nn.Module,
    mesh: DeviceMesh,
    style: ParallelStyle,
    *,
    inputs: bool,
) -> None:
    """Split the adapters inside a linear layer without additional communication.

    In a layer split by output channels, B is split in the same way, and A is replicated. In a layer
    split by input channels, A is split in the same way, and the replicated B maps partial sums to
    partial sums. Gradients of a replicated adapter are partial.
    """
    for name, is_split in (("lora_A", inputs), ("lora_B", not inputs)):
        adapter = getattr(linear, name, None)
        if adapter is not None:
            parallelize_module(adapter, mesh, style if is_split else Replicated())


def _split_stream(model: Any, mesh: DeviceMesh) -> None:
    """Convert the model's inputs to this rank's tokens, and its output to the caller's form."""
    size = mesh.size()
    rank = mesh.get_local_rank()

    def wrap(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return wrap_tokens(inputs[0], mesh), *inputs[1:]

    def unwrap(_: nn.Module, inputs: Any, x: DTensor) -> Tensor:
        return x.to_local().clone()  # a view would make FSDP warn

    def chunk(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        local_inputs = list(inputs)
        for name, dim in dims.items():
            position = names.index(name)
            local_inputs[position] = inputs[position].chunk(size, dim)[rank]
        return tuple(local_inputs)

    def gather(_: nn.Module, inputs: Any, x: Tensor) -> Tensor:
        whole: Tensor = wrap_tokens(x, mesh).full_tensor()
        return whole.clone()

    if not model.STREAM.plain:
        model.register_forward_pre_hook(wrap)
        if not model.is_last:
            model.register_forward_hook(unwrap)
        return
    names = list(signature(model.forward).parameters)
    dims = dict(model.STREAM.inputs)
    if not model.is_first:
        dims.pop(names[0], None)  # hidden states arrive for this rank's tokens only
    model.register_forward_pre_hook(chunk)
    if model.is_last:
        model.register_forward_hook(gather)
