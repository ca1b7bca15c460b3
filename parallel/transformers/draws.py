"""Give ranks that share a sequence different dropout masks, but the NEFTune noise of one process.

Trainers seed these ranks equally, so dropout would drop the same elements of different tokens. Each
rank therefore draws from its own random stream during a forward pass, seeded by the common state
and the rank. NEFTune's noise on the embeddings is instead drawn as one process draws it, for all
tokens of the batch, and then sharded.

After the forward pass the common state is restored, and advanced by one draw if the pass drew
anything, so it stays equal on all ranks. No other state exists: restoring torch's random state from
a checkpoint restores the local streams too.

Shapes: a batch of B rows of T tokens, of which n are this rank's; embeddings have D channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallel.context import ContextParallel
from parallel.transformers.layers import CONTEXT
from runtime.errors import UserError

ALPHA = "neftune_noise_alpha"
"""Attribute of embeddings that makes transformers add noise during training."""
BLOCK = 4096
"""Number of tokens whose noise is drawn at once, since the noise of a whole long sequence would not
fit in memory."""
NUM_SEEDS = 2**62
SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd number that maps consecutive ranks to distant seeds."""


class State(NamedTuple):
    """Random states of the CPU and of the model's device."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "State":
        """Return the current states."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda)

    def set(self, device: torch.device) -> None:
        """Restore these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def same(self, other: "State") -> bool:
        """Return True if nothing was drawn between the two states."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda)


class Forward(NamedTuple):
    """A training forward pass in progress."""

    device: torch.device
    common: State | None
    """Random state common to all ranks, after the noise was drawn; None for one process."""
    local: State | None
    """Initial random state of this rank's own stream, to find out later if anything was drawn."""
    embeddings: nn.Module | None
    """Embeddings that are in evaluation mode meanwhile, so transformers' own hook adds no noise."""
    handle: RemovableHandle | None
    """Handle of the hook that adds Longmesh's noise to the embeddings."""


class Draws:
    """Hooks on a model's forward passes that give each rank its own random stream for dropout."""

    def __init__(self, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        """Lowest global rank of the group that shares a sequence; tells groups apart in noise."""
        self._is_token: WeakKeyDictionary[ContextParallel, Tensor] = WeakKeyDictionary()
        """Mask of real tokens of each batch, keyed by the batch's context."""
        self._running: list[Forward | None] = []
        self._hooked = False

    def __deepcopy__(self, memo: Any) -> "Draws":
        """Return this object itself: it stores nothing about a model, so copies can share it."""
        return self

    def __reduce__(self) -> Any:
        """Allow a model with these hooks to be pickled."""
        return Draws, (self._first_rank,)

    def expect(self, model: nn.Module, context: ContextParallel, is_token: Tensor) -> None:
        """Register a batch's mask of tokens [B, T] under its context; hook the model once."""
        self._is_token[context] = is_token
        if not self._hooked:
            model.register_forward_pre_hook(self._begin, with_kwargs=True)
            model.register_forward_hook(self._end, always_call=True)
            self._hooked = True

    @contextmanager
    def running(self, model: nn.Module, context: ContextParallel) -> Iterator[None]:
        """Give each rank its own stream until the block ends, for a forward in parts."""
        self._begin(model, (), {CONTEXT: context})
        try:
            yield
        finally:
            self._end(model, (), None)

    @torch.compiler.disable
    def _begin(self, module: nn.Module, arguments: Any, kwargs: dict[str, Any]) -> None:
        context = kwargs.get(CONTEXT)
        if not module.training or not isinstance(context, ContextParallel):
            self._running.append(None)
            return

        device = next(module.parameters()).device
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        state_before = State.now(device)
        embeddings, handle = self._add_noise(module, context, device)
        if world_size == 1:
            self._running.append(Forward(device, None, None, embeddings, handle))
            return

        seed = _seed(state_before)
        state_after_noise = State.now(device)
        torch.manual_seed((seed + (1 + dist.get_rank()) * SEED_STRIDE) % NUM_SEEDS)
        forward = Forward(device, state_after_noise, State.now(device), embeddings, handle)
        self._running.append(forward)

    @torch.compiler.disable
    def _end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        forward = self._running.pop() if self._running else None
        if forward is None:
            return

        if forward.handle is not None and forward.embeddings is not None:
            forward.handle.remove()
            forward.embeddings.training = True
        if forward.common is None or forward.local is None:
            return

        has_drawn = not forward.local.same(State.now(forward.device))
        forward.common.set(forward.device)
        if has_drawn:
            torch.rand(1)  # so that the next forward draws other numbers

    def _add_noise(
        self, model: nn.Module, context: ContextParallel, device: torch.device
    ) -> tuple[nn.Module | None, RemovableHandle | None]:
        """Replace transformers' NEFTune noise with Longmesh's for one forward pass.

        Meanwhile the embeddings are in evaluation mode, in which transformers' own hook adds none.
        """
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        alpha = getattr(embeddings, ALPHA, None)
        if alpha is None or not embeddings.training:
            return None, None
        if context not in self._is_token:
            raise UserError(
                "the batch was made for another model; call the model with the inputs of its own "
                "cp.batch"
            )

        noise = local_noise(
            context,
            self._is_token[context],
            alpha,
            int(embeddings.embedding_dim),
            embeddings.weight.dtype,
            device,
            self._first_rank,
        )

        def add(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return output + noise.to(output.dtype)

        embeddings.training = False
        return embeddings, embeddings.register_forward_hook(add)


def _seed(state: State) -> int:
    """Return a seed derived from a state, without advancing it."""
    generator = torch.Generator()
    generator.set_state(state.cpu)
    return int(torch.randint(NUM_SEEDS, (1,), generator=generator))


def local_noise(
    context: ContextParallel,
    is_token: Tensor,
    alpha: float,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    first_rank: int = 0,
) -> Tensor:
    """Return this rank's part of the noise that one process would draw, [1, n, D]; 0 in padding.

    The scale is alpha / sqrt(T D), as in transformers, where T is the length of a whole row. Every
    group draws different noise, since groups hold different sequences.
    """
    num_rows, row_length = is_token.shape
    limit = alpha / (row_length * width) ** 0.5
    generator = None
    if first_rank:
        seed = (_seed(State.now(device)) + first_rank * SEED_STRIDE) % NUM_SEEDS
        generator = torch.Generator(device).manual_seed(seed)
        torch.rand(1)

    # [N]: index in the flattened rows [B T] of each packed token
    index_in_rows = is_token.flatten().nonzero()[:, 0].to(device)
    positions = context.positions.to(device)  # [n]
    is_real = positions < len(index_in_rows)  # the layout may pad the sequence
    local_index = index_in_rows[positions[is_real]]

    noise = torch.zeros(len(positions), width, dtype=dtype, device=device)  # [n, D]
    real_noise = noise[is_real]
    for start in range(0, num_rows * row_length, BLOCK):
        count = min(BLOCK, num_rows * row_length - start)
        block = torch.empty(count, width, dtype=dtype, device=device)
        block.uniform_(-limit, limit, generator=generator)
        in_block = (local_index >= start) & (local_index < start + count)
        real_noise[in_block] = block[local_index[in_block] - start]
    noise[is_real] = real_noise
    return noise[None]
