"""Hooks that make a diffusion transformer compute one rank's tokens, without a change of its code.

The hooks do four things. They cut the arguments of each block to this rank's tokens. They make a
block's self-attention span the ranks. They gather the output of the last projection, so that the
prediction is whole. And they give a block that is recomputed in the backward pass the split (the
division of tokens over ranks) of its own forward, even if other clips have been computed since: the
split is an attribute of the tensor given to the block, which checkpointing keeps.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parallel.context import ContextParallel
from parallel.diffusers.attention import AttentionMode, CrossMode, PoolingMode, ReplacingMode
from parallel.diffusers.families import Argument, Family, TextMask
from parallel.diffusers.inputs import check_same
from parallel.diffusers.split import PackedSplit, TokenSplit
from runtime.errors import UserError

SPLIT = "_longmesh_split"
"""Attribute of a tensor given to a block, with the split of the forward that it belongs to."""
COMPILED = "is compiled, which is not supported with shared clips; leave out torch.compile"
CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of diffusers' models with the function that they call for gradient checkpointing."""


class StandIn(nn.Module):
    """A module that runs a function once in place of all blocks, while clips are packed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class Hooks:
    """The hooks of one model, and the state of its forward in progress."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        group: dist.ProcessGroup | None,
        context_over: Callable[[int], ContextParallel],
    ) -> None:
        """Register the hooks.

        Args:
            context_over: function that returns the context for a number of tokens.
        """
        self.active = True
        self.last_split: TokenSplit | None = None
        """Split of the last forward."""
        self.clip_split: TokenSplit | None = None
        """Split for the forwards of a clip that is being packed; None lets each make its own."""
        self.packed_split: PackedSplit | None = None
        """Split of all clips together, while the blocks run on packed clips."""
        self._model = model
        self._family = family
        self._group = group
        self._context_over = context_over
        self._running = False
        self._split: TokenSplit | None = None
        """Split of the forward in progress; None before its first block or cut input."""
        self._blocks: list[tuple[nn.Module, TokenSplit | PackedSplit]] = []
        """The block that is running, with its split; empty between blocks."""
        self._modes: list[tuple[nn.Module, ReplacingMode]] = []
        self._checkpoint: Callable[..., Any] | None = None
        """The model's own checkpointing function, while another one replaces it."""

        self._names = {module: name for name, module in model.named_modules()}
        self._arguments: dict[nn.Module, Mapping[str, Argument]] = {}
        """The arguments to cut, keyed by block."""
        for name, arguments in family.blocks.items():
            for block in getattr(model, name):
                block = unwrapped(block)
                if "hidden_states" not in inspect.signature(block.forward).parameters:
                    raise UserError(
                        f"{self._names[block]} is a {type(block).__name__}, which hides the "
                        "arguments of the block that it wraps; call shard before wrapping blocks"
                    )
                self._arguments[block] = arguments
        self._modes_of: dict[nn.Module, type[ReplacingMode]] = {}
        """Class that replaces the attention, keyed by attention module."""
        self._handles: list[Any] = []
        self._install()

    def _install(self) -> None:
        self._before(self._model, self._begin_forward)
        self._after(self._model, self._end_forward)
        for block in self._arguments:
            self._before(block, self._begin_block)
            self._after(block, self._end_block)
            self._install_modes(block, self._family.attention, AttentionMode)
            self._install_modes(block, self._family.pooling, PoolingMode)
            if self._family.packing is not None:
                self._install_modes(block, (self._family.packing.cross,), CrossMode)
        self._last: nn.Module | None = None
        self._last_handle: Any = None
        self._hook_last()

    def _hook_last(self) -> None:
        """Gather the output of the last projection, even if an adapter has wrapped it since."""
        last = getattr(self._model, self._family.last)
        if last is not self._last:
            if self._last_handle is not None:
                self._last_handle.remove()
            self._after(last, self._gather)
            self._last_handle = self._handles[-1]
            self._last = last

    def _install_modes(
        self, block: nn.Module, names: tuple[str, ...], mode: type[ReplacingMode]
    ) -> None:
        """Replace the attention in the block's attributes ``names``."""
        for name in names:
            attention = getattr(block, name, None)
            if attention is not None:
                self._modes_of[attention] = mode
                self._before(attention, self._begin_attention)
                self._after(attention, self._end_attention)

    def remove(self) -> None:
        """Remove the hooks, so that the model computes in one process again."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Call ``function(module, args, kwargs)`` before each forward of the module.

        The hook is a closure that ignores other modules. A deep copy of the model contains the
        hook, which does nothing there, but no copy of this object or its process group.
        """

        def hook(called: nn.Module, args: Any, kwargs: Any) -> Any:
            if called is module and self.active:
                return function(module, args, kwargs)
            return None

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Call ``function(module, output)`` after each forward; output is None after an error."""

        def hook(called: nn.Module, args: Any, output: Any) -> Any:
            if called is module and self.active:
                return function(module, output)
            return None

        self._handles.append(module.register_forward_hook(hook, always_call=True))

    def _begin_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Check the inputs, cut those that the family lists, and replace the checkpointing."""
        bound = _bind(model, args, kwargs)
        arguments = bound.arguments
        self._check_forward(arguments)
        check_same(arguments, self._group)
        self._hook_last()
        self._running = True
        self._split = self.clip_split
        self._blocks.clear()
        self._wrap_checkpointing()

        lengths = self._lengths_of_inputs(arguments)
        if lengths is not None:
            if self._split is None:
                self._split = self._split_of(*lengths)
            for name, tokens in self._family.inputs.items():
                if name in arguments:
                    arguments[name] = self._split.cut_argument(name, arguments[name], tokens)
        return _as_passed(bound, args)

    def _check_forward(self, arguments: Mapping[str, Any]) -> None:
        """Raise UserError for refused arguments, compiled modules, and dropout in training."""
        for name, reason in self._family.refused.items():
            if arguments.get(name) is not None:
                raise UserError(f"{name} is given: {reason}")
        for name, module in self._model.named_modules():
            if is_compiled(module):
                raise UserError(f"{name or 'the model'} {COMPILED}")
            if not module.training:
                continue
            rate = module.p if isinstance(module, nn.Dropout) else 0.0
            rate = getattr(module, "dropout_prob", rate)  # of diffusers' LabelEmbedding
            if rate:
                raise UserError(
                    f"{name} has dropout {rate}, which each rank would draw differently; set it to "
                    "0, and drop labels or texts in the data, once for each sample"
                )

    def _lengths_of_inputs(self, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return the numbers of image and text tokens in the model's inputs.

        None if no input holds a value for each image token, so that there is nothing to cut.
        """
        lengths = {"image": 0, "text": 0, "joint": 0}
        for name, tokens in self._family.inputs.items():
            x = arguments.get(name)
            if x is not None and tokens.ndim in (None, x.ndim):
                lengths[tokens.stream] = max(lengths[tokens.stream], x.shape[tokens.dim])
        if lengths["image"] <= 1:  # one value for all tokens
            return None
        return lengths["image"], lengths["text"]

    def _split_of(self, image_len: int, text_len: int) -> TokenSplit:
        return TokenSplit(self._context_over(image_len + text_len), image_len, text_len)

    def _begin_block(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cut the arguments of a block."""
        bound = _bind(block, args, kwargs)
        split = self._split_of_block(block, bound.arguments)
        self._cut(block, bound.arguments, split)
        self._blocks.append((block, split))
        return _as_passed(bound, args)

    def _split_of_block(
        self, block: nn.Module, arguments: Mapping[str, Any]
    ) -> TokenSplit | PackedSplit:
        """Return the split of the forward that this call of a block belongs to.

        Raises UserError if the block is recomputed from a copy of its input, which has no split.
        """
        split: TokenSplit | PackedSplit | None = getattr(arguments["hidden_states"], SPLIT, None)
        if split is None:
            split = self.packed_split  # FSDP2 gives blocks copies of their tensors
        if split is not None:
            return split
        if not self._running:
            raise UserError(
                f"{self._names[block]} is recomputed in the backward pass from a copy of its "
                "input, which has lost its split over ranks; checkpoint blocks with "
                "use_reentrant=False, and do not offload their inputs"
            )
        if self._split is None:
            self._split = self._first_split(block, arguments)
        setattr(arguments["hidden_states"], SPLIT, self._split)
        return self._split

    def _first_split(self, block: nn.Module, arguments: Mapping[str, Any]) -> TokenSplit:
        """Return the split of the tokens that the first block gets, which are not cut yet."""
        text = arguments.get("encoder_hidden_states") if self._family.joint else None
        text_len = 0 if text is None else text.shape[1]
        split = self._split_of(arguments["hidden_states"].shape[1], text_len)
        for name, argument in self._arguments[block].items():
            if isinstance(argument, TextMask) and arguments.get(name) is not None:
                split.read_mask(name, arguments[name])
        return split

    def _cut(
        self, block: nn.Module, arguments: dict[str, Any], split: TokenSplit | PackedSplit
    ) -> None:
        """Replace the arguments of a block by this rank's parts of them."""
        for name, argument in self._arguments[block].items():
            if name in arguments:
                arguments[name] = split.cut_argument(name, arguments[name], argument)
        setattr(arguments["hidden_states"], SPLIT, split)

    def _wrap_checkpointing(self) -> None:
        """Replace the checkpointing by one that cuts a block's arguments before it saves them.

        If they were cut inside the block, the whole tensors would be saved for the backward pass.
        """
        original = getattr(self._model, CHECKPOINT, None)
        if original is None:
            return

        def checkpoint(module: nn.Module, *args: Any) -> Any:
            if isinstance(module, StandIn):
                return module(*args)
            if module not in self._arguments:
                return original(module, *args)
            bound = _bind(module, args, {})
            split = self._split_of_block(module, bound.arguments)
            self._cut(module, bound.arguments, split)
            return original(module, *bound.args)

        self._checkpoint = original
        setattr(self._model, CHECKPOINT, checkpoint)

    def _begin_attention(self, attention: nn.Module, args: Any, kwargs: Any) -> None:
        """Enter the mode that makes this attention span the ranks."""
        _, split = self._blocks[-1]
        if self._modes_of[attention] is CrossMode and not isinstance(split, PackedSplit):
            return  # the text is whole on every rank
        mode = self._modes_of[attention](self._names[attention], split, self._family)
        mode.__enter__()
        self._modes.append((attention, mode))

    def _end_attention(self, attention: nn.Module, output: Any) -> None:
        if not self._modes or self._modes[-1][0] is not attention:
            return  # an error came before the mode
        _, mode = self._modes.pop()
        mode.__exit__(None, None, None)
        if output is not None:
            mode.check_called()

    def _end_block(self, block: nn.Module, output: Any) -> None:
        if not self._blocks or self._blocks[-1][0] is not block:
            return  # an error came before the block
        _, split = self._blocks.pop()
        if not self._running and isinstance(split, TokenSplit):
            split.forget_cuts()  # the cuts of a recomputed block would keep its input alive

    def _gather(self, projection: nn.Module, output: Tensor | None) -> Tensor | None:
        """Return the last projection's output for the image tokens of all ranks."""
        if output is None or self._split is None:
            return None
        return self._split.gather(output)

    def _end_forward(self, model: nn.Module, output: Any) -> None:
        """Release this forward's split and cuts; recomputed blocks get the split with the input."""
        self._running = False
        self.last_split, self._split = self._split, None
        if self.last_split is not None:
            self.last_split.forget_cuts()
        if self._checkpoint is not None:
            setattr(model, CHECKPOINT, self._checkpoint)
            self._checkpoint = None


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile has compiled a module, in place or by wrapping it."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__name__ == "OptimizedModule"


def _as_passed(bound: inspect.BoundArguments, args: tuple[Any, ...]) -> Any:
    """Return positional arguments, as many as the caller passed, and the others as keywords.

    Decorators of diffusers find some arguments only among the keywords.
    """
    positional = bound.args[: len(args)]
    keywords: dict[str, Any] = {}
    parameters = bound.signature.parameters
    for number, (name, value) in enumerate(bound.arguments.items()):
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(value)
        elif number >= len(args) and kind is not inspect.Parameter.VAR_POSITIONAL:
            keywords[name] = value
    return positional, keywords


def unwrapped(block: nn.Module) -> nn.Module:
    """Return the block inside torch's checkpoint wrapper, if it is wrapped."""
    return getattr(block, "_checkpoint_wrapped_module", block)


def _bind(module: nn.Module, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Bind the arguments of a module's forward to their names."""
    return inspect.signature(module.forward).bind(*args, **kwargs)
