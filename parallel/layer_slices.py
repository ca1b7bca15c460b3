"""A layer that takes its sequence slice by slice, to save memory in both passes.

Forward, the layer runs over the slices without a graph, and only its input is saved. Backward, the
keys of all slices are computed again; then the slices run forward and backward again, from the last
to the first, so that the gradients of a slice's keys are complete when it runs back. Inner
activations and the graph thus exist for one slice at a time; of all tokens there are only the
layer's input, its gradients, the keys and values and their gradients (FPDT, Yao et al. 2024,
arXiv:2408.16978, section 4).

Shapes: B sequences, T tokens of this context-parallel rank, C width of the residual stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from kernels.loss import ChunkGradients, graph_of_chunk
from parallel.context.slices.layer import KeysStoredError, Slice, SliceMemory, slice_bounds
from parallel.offload import Layer, unpack


@dataclass
class LayerInSlices:
    """The forward of a layer, in slices: (x [B, T, C], positions, mask, states) -> [B, T, C]."""

    layer: nn.Module
    forward: Callable[..., Any]
    size: int
    """Number of this rank's tokens of each sequence in a slice."""
    begin_layer: Callable[[], Layer] | None = None
    """Begins to keep saved tensors on the host; None keeps them on the device."""

    def __call__(self, x: Any, positions: Any, mask: Any = None, states: Any = None) -> Any:
        if states is not None:  # a cache serves one token or a prompt, without gradients
            return self.forward(x, positions, mask, states)

        hooks: Any = nullcontext()
        if self.begin_layer is not None:
            hooks = saved_tensors_hooks(self.begin_layer().pack, unpack)

        mesh = getattr(x, "device_mesh", None)
        layer_pass = LayerPass(self, positions, mask, mesh)
        tokens = x if mesh is None else x.to_local()  # [B, T / tp, C]
        with hooks, gathered_inside(self.layer, reshard=True):
            # Read in every call, since FSDP replaces shards with whole weights while a layer runs.
            parameters = tuple(self.layer.parameters())
            out = _InSlices.apply(layer_pass, tokens, *parameters)
        return layer_pass.wrapped(out)


@contextmanager
def gathered_inside(layer: nn.Module, *, reshard: bool) -> Iterator[None]:
    """Gather the modules inside a layer that FSDP shards by themselves, once for all slices.

    Such modules have another dtype than the layer. Their own hooks would gather them for each
    slice, and would reduce their gradients before the slices' sums are complete. FSDP reduces these
    at the end of the backward pass, as for modules whose hooks did not run.

    Args:
        reshard: free the gathered weights at the end. False after a backward pass, at whose end
            FSDP frees them.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    inner: list[Any] = []
    for module in layer.modules():
        if module is not layer and isinstance(module, FSDPModule):
            inner.append(module)
    for module in inner:
        module.unshard()
        # In this state the hooks leave the weights as they are.
        module._get_fsdp_state()._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for module in inner:
            module._get_fsdp_state()._training_state = TrainingState.IDLE
            if reshard:
                module.reshard()


@dataclass
class LayerPass:
    """A layer's arguments in one micro-batch, for all of its slices."""

    layer: LayerInSlices
    positions: Any
    mask: Any
    mesh: Any
    """Tensor-parallel ranks that share the tokens; None without tensor parallelism."""

    @property
    def parts(self) -> int:
        """Number of tensor-parallel ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    def slices(self, x: Tensor, memory: SliceMemory, **settings: Any) -> Iterator[Slice]:
        """Yield the slices of x ``[B, T / tp, C]``, in the order of their positions."""
        total = x.shape[1] * self.parts
        bounds = slice_bounds(total, self.layer.size)
        for number, (first, end) in enumerate(bounds):
            yield Slice(memory, number, len(bounds), first, end, total, self.mask, **settings)

    def rows(self, piece: Slice) -> tuple[slice, slice]:
        """Return the index of a slice's tokens in x ``[B, T / tp, C]``."""
        return slice(None), slice(piece.first // self.parts, piece.end // self.parts)

    def run(self, chunk: Tensor, piece: Slice) -> Tensor:
        """Run the layer on a slice's tokens ``[B, n / tp, C]``."""
        _, local = self.rows(piece)

        def take(x: Tensor, dim: int) -> Tensor:
            """Take the slice's tokens of all tensor-parallel ranks, each from its stretch."""
            dim %= x.ndim
            of_ranks = x.unflatten(dim, (self.parts, -1))
            part = of_ranks.narrow(dim + 1, local.start, local.stop - local.start)
            return part.flatten(dim, dim + 1)

        positions = self.positions
        if isinstance(positions, Tensor):
            positions = take(positions, -1)
        elif positions is not None:
            positions = positions.of(take)
        out = self.layer.forward(self.wrapped(chunk), positions, piece, None)
        return out if self.mesh is None else out.to_local()

    def wrapped(self, x: Tensor) -> Any:
        """Return x as the layer takes it: under tensor parallelism, a DTensor over tokens."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer_pass: LayerPass, x: Tensor, *parameters: Tensor) -> Tensor:
        # The parameters do not go through save_for_backward, which would return detached tensors
        # under activation checkpointing.
        ctx.layer_pass = layer_pass
        ctx.parameters = parameters
        ctx.save_for_backward(x)
        memory = SliceMemory()
        out = torch.empty_like(x)
        for piece in layer_pass.slices(x, memory):
            rows = layer_pass.rows(piece)
            out[rows] = layer_pass.run(x[rows], piece)
        ctx.states = memory.states
        ctx.has_keys = memory.keys is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        layer_pass: LayerPass = ctx.layer_pass
        gradients = ChunkGradients(x, ctx.parameters, ctx.needs_input_grad[1:])
        memory = SliceMemory(states=ctx.states)
        slices = list(layer_pass.slices(x, memory))
        try:
            with gathered_inside(layer_pass.layer.layer, reshard=False):
                if ctx.has_keys and len(slices) > 1:  # a single slice stores its keys by itself
                    for piece in layer_pass.slices(x, memory, keys_only=True):
                        _store_keys(layer_pass, x, piece)
                    memory.has_all_keys = True
                for piece in reversed(slices):
                    _add_gradients(layer_pass, gradients, x, dout, piece)
        finally:
            # A slice that failed is still in its graph, and would keep these tensors alive.
            memory.clear()
        return None, *gradients.times()


def _add_gradients(
    layer_pass: LayerPass, gradients: ChunkGradients, x: Tensor, dout: Tensor, piece: Slice
) -> None:
    """Run a slice forward again and backward, and add its gradients."""
    rows = layer_pass.rows(piece)
    chunk = gradients.leaf(x[rows])
    with graph_of_chunk():
        out = layer_pass.run(chunk, piece)
    outputs = [out]
    grads: list[Tensor | None] = [dout[rows]]
    for state, gradient in piece.outgoing_gradients():
        outputs.append(state)
        grads.append(gradient)
    incoming = list(piece.incoming_states.values())
    piece.return_gradients(gradients.add_through(rows, chunk, outputs, grads, incoming))


def _store_keys(layer_pass: LayerPass, x: Tensor, piece: Slice) -> None:
    """Compute and store the keys and values of a slice, without the rest of the layer."""
    try:
        layer_pass.run(x[layer_pass.rows(piece)], piece)
    except KeysStoredError:
        return
    raise RuntimeError(
        "layer_chunk_size stores a layer's keys before its slices run back, but its attention "
        "stored none; leave out layer_chunk_size"
    )
