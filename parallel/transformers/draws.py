"""Random numbers of a training forward whose tokens are on several ranks.

Ranks that share a sequence have one random state, as trainers seed them, and would drop the same
elements of different tokens. So each draws from a stream of its own within a forward. NEFTune's
noise on the embeddings is drawn as one process draws it, for all tokens of the batch, and cut.

Outside of forwards the ranks' states go on alike, by draws that all of them make; nothing else is
kept, so that a restored state resumes both.

Shapes: a batch of B rows of T tokens, of which n are this rank's; embeddings have D channels.
"""

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
"""Attribute of embeddings to which transformers adds noise in training."""
BLOCK = 4096
"""Tokens whose noise is drawn at once: a long sequence's would not fit beside the model."""
SEEDS = 2**62
STRIDE = 0x9E3779B97F4A7C15
"""An odd number that takes consecutive ranks to distant seeds."""


class State(NamedTuple):
    """Random states of the CPU and of the model's device."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "State":
        """Return the states as they are."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def set(self, device: torch.device) -> None:
        """Make these the states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def same(self, other: "State") -> bool:
        """Return True if nothing was drawn between the two."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda)


class Forward(NamedTuple):
    """A forward in training that has begun."""

    device: torch.device
    common: State | None
    """The state of all ranks as the forward began and noise was drawn; None for one process."""
    local: State | None
    """The state of this rank's stream at its beginning."""
    noisy: nn.Module | None
    """Embeddings to which transformers would add noise, unless they seem to evaluate."""
    handle: RemovableHandle | None


class Draws:
    """Hooks on a model's forwards, which give each rank draws of its own."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        """The lowest of the ranks that share a sequence."""
        self._rows: WeakKeyDictionary[ContextParallel, Tensor] = WeakKeyDictionary()
        self._running: list[Forward | None] = []
        self._hooked = False

    def __deepcopy__(self, memo: Any) -> "Draws":
        """Serve a copy of the model too: nothing here is one model's."""
        return self

    def __reduce__(self) -> Any:
        """Let a model be pickled with its hooks."""
        return Draws, (self._first,)

    def expect(self, model: nn.Module, context: ContextParallel, tokens: Tensor) -> None:
        """Know a batch by its context: which of its rows' tokens [B, T] are no padding."""
        self._rows[context] = tokens
        if not self._hooked:
            model.register_forward_pre_hook(self._begin, with_kwargs=True)
            model.register_forward_hook(self._end, always_call=True)
            self._hooked = True

    @torch.compiler.disable
    def _begin(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        context = named.get(CONTEXT)
        if not module.training or not isinstance(context, ContextParallel):
            self._running.append(None)
            return

        device = next(module.parameters()).device
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        common = State.now(device)
        noisy, handle = self._with_noise(module, context, device)
        if ranks == 1:
            self._running.append(Forward(device, None, None, noisy, handle))
            return

        seed = _seed(common)
        common = State.now(device)  # after the noise
        torch.manual_seed((seed + (1 + dist.get_rank()) * STRIDE) % SEEDS)
        self._running.append(Forward(device, common, State.now(device), noisy, handle))

    @torch.compiler.disable
    def _end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        forward = self._running.pop() if self._running else None
        if forward is None:
            return

        if forward.handle is not None and forward.noisy is not None:
            forward.handle.remove()
            forward.noisy.training = True
        if forward.common is None or forward.local is None:
            return

        drawn = not forward.local.same(State.now(forward.device))
        forward.common.set(forward.device)
        if drawn:
            torch.rand(1)  # for the next forward to have other draws

    def _with_noise(
        self, model: nn.Module, context: ContextParallel, device: torch.device
    ) -> tuple[nn.Module | None, RemovableHandle | None]:
        """Take NEFTune's noise over for one forward; transformers' own hook adds none where a
        module evaluates.
        """
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        alpha = getattr(embeddings, ALPHA, None)
        if alpha is None or not embeddings.training:
            return None, None
        if context not in self._rows:
            raise UserError(
                "the batch is another model's; call the model with the inputs of its own cp.batch"
            )

        tokens = self._rows[context]
        width = int(embeddings.embedding_dim)
        noise = local_noise(
            context, tokens, alpha, width, embeddings.weight.dtype, device, self._first
        )

        def add(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return output + noise.to(output.dtype)

        embeddings.training = False
        return embeddings, embeddings.register_forward_hook(add)


def _seed(common: State) -> int:
    """Return a seed that a state decides, and leave the state as it is."""
    generator = torch.Generator()
    generator.set_state(common.cpu)
    return int(torch.randint(SEEDS, (1,), generator=generator))


def local_noise(
    context: ContextParallel,
    tokens: Tensor,
    alpha: float,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    first: int = 0,
) -> Tensor:
    """Return this rank's part [1, n, D] of the noise on a batch, drawn as in one process; 0 in
    padding.

    The scale is alpha / sqrt(T D), as in transformers, where T is the length of a whole row. Groups
    whose ``first`` rank is not 0 have noise of their own.
    """
    rows, length = tokens.shape
    limit = alpha / (length * width) ** 0.5
    generator = None
    if first:
        seed = _seed(State.now(device))
        generator = torch.Generator(device).manual_seed((seed + first * STRIDE) % SEEDS)
        torch.rand(1)

    in_rows = tokens.flatten().nonzero()[:, 0].to(device)  # of the packed tokens
    positions = context.positions.to(device)
    real = positions < len(in_rows)
    local = in_rows[positions[real]]

    noise = torch.zeros(len(positions), width, dtype=dtype, device=device)
    part = noise[real]
    for start in range(0, rows * length, BLOCK):
        count = min(BLOCK, rows * length - start)
        block = torch.empty(count, width, dtype=dtype, device=device).uniform_(
            -limit, limit, generator=generator
        )
        inside = (local >= start) & (local < start + count)
        part[inside] = block[local[inside] - start]
    noise[real] = part
    return noise[None]
