"""Record a forward pass on symbols: weights, FLOPs, memory traffic, and backward memory.

A class of diffusers is described by its forward pass, written once with symbols in place of tensors
(wan.py, flux.py, hunyuan.py). Every operator here knows what torch's does: how many weights it has,
what autograd saves for it, and how many bytes it reads and writes. So the same lines give the
number of parameters, the FLOPs, the bytes kept for a backward pass and the peak of that pass, with
all weights trained or with adapters, in any dtype. Tests compare each with diffusers' modules.

Shapes: a symbol has rows, the tokens of all samples, and a width, ``[rows, width]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.diffusion.symbols import Operation, Storage, Symbol, Training

STATISTIC = 4
"""Bytes of a row's statistic, in float32: a norm's mean or scale, or attention's LSE."""
ATTENTION = 4
"""FLOPs per (query, key) pair and channel in a forward pass: 2 matmuls (Dao 2023)."""


@dataclass
class Tape:
    """Operators of a forward pass, in order, and the totals of their weights, FLOPs and bytes."""

    training: Training
    samples: int = 1
    parameters: int = 0
    trained: int = 0
    products: int = 0
    """FLOPs of the forward pass's matmuls."""
    backward_products: int = 0
    """FLOPs of the backward pass's matmuls."""
    attention: int = 0
    """Forward FLOPs of attention to local keys; joint attention is counted from its plan."""
    moved: int = 0
    """Bytes that operators between the matmuls read and write in the forward pass."""
    operations: list[Operation] = field(default_factory=list)
    inputs: list[Symbol] = field(default_factory=list)
    variables: list[Symbol] = field(default_factory=list)
    """Symbols that variables of the forward pass hold until it ends."""

    @property
    def size(self) -> int:
        """Return the bytes of an element of activations."""
        return self.training.element_size

    def input(
        self, rows: int, width: int, *, is_tracked: bool = True, is_shared: bool = False
    ) -> Symbol:
        """Return an argument of the forward pass; a shared one is the same in every block."""
        storage = Storage(rows * width * self.size, is_counted=not is_shared)
        symbol = Symbol(rows, width, self.size, is_tracked, storage)
        self.inputs.append(symbol)
        return symbol

    def hold(self, *symbols: Symbol) -> None:
        """Note that variables of the forward pass hold these symbols until it ends."""
        self.variables.extend(symbols)

    def parameter(self, rows: int, width: int) -> Symbol:
        """Return a weight outside of linear modules, such as a table of shifts."""
        self._count_weights(rows * width)
        storage = Storage(rows * width * self.size, is_counted=False)
        return Symbol(rows, width, self.size, self.training.trains_all, storage)

    def linear(self, x: Symbol, width: int, name: str) -> Symbol:
        """Return a linear module's output plus its adapter's; the weight is [width, x.width]."""
        weights = (x.width + 1) * width
        self._count_weights(weights)
        flops = 2 * x.rows * x.width * width
        self.products += flops
        if x.is_tracked:
            self.backward_products += flops

        # The input is saved for the weight's gradient alone, so a frozen weight saves nothing.
        if self.training.trains_all:
            self.backward_products += flops
            out = self._new(x.rows, width, self.size, is_tracked=True)
            gradient = weights * self.size
            self._record((x,), out, (x.storage,), weight_gradient=gradient)
            return out

        out = self._new(x.rows, width, self.size, x.is_tracked)
        self._record((x,), out)

        # An adapter beside it reads the same input.
        if self.training.has_adapter(name):
            return self.add(out, self._adapter(x, width))
        return out

    def _adapter(self, x: Symbol, width: int) -> Symbol:
        """Return the scaled output of an adapter's two matmuls."""
        rank = self.training.lora_rank or 0
        symbol = x
        for next_width in (rank, width):
            weights = symbol.width * next_width
            self.parameters += weights
            self.trained += weights
            flops = 2 * symbol.rows * weights
            self.products += flops
            self.backward_products += flops * (1 + symbol.is_tracked)

            out = self._new(symbol.rows, next_width, self.size, is_tracked=True)
            gradient = weights * self.size
            self._record((symbol,), out, (symbol.storage,), weight_gradient=gradient)
            symbol = out
        return self.copy(symbol)

    def layer_norm(self, x: Symbol, *, is_affine: bool = False) -> Symbol:
        """Return the layer norm, which saves its input and two statistics of each row."""
        is_trained = False
        if is_affine:
            self._count_weights(2 * x.width)
            is_trained = self.training.trains_all
        return self._norm(x, 2 * STATISTIC * x.rows, is_trained)

    def rms_norm(self, x: Symbol, heads: int = 1) -> Symbol:
        """Return torch's RMSNorm over each of ``heads`` parts of a row."""
        if not self.training.fused_norms:
            return self.cast(self._unfused_norm(x, heads, product_size=4), x.size)
        self._count_weights(x.width // heads)
        return self._norm(x, STATISTIC * x.rows * heads, self.training.trains_all)

    def _norm(self, x: Symbol, statistics: int, is_trained: bool) -> Symbol:
        out = self._new(x.rows, x.width, x.size, x.is_tracked or is_trained)
        self.moved += x.bytes + out.bytes
        self._record((x,), out, (x.storage, Storage(statistics)))
        return out

    def eager_rms_norm(self, x: Symbol, heads: int) -> Symbol:
        """Return diffusers' RMSNorm, which is several operators on any device."""
        return self._unfused_norm(x, heads, product_size=x.size)

    def _unfused_norm(self, x: Symbol, heads: int, product_size: int) -> Symbol:
        """Return the output of an RMSNorm that consists of several operators.

        Args:
            product_size: bytes of an element in the product with the weight. In float32 the
                float32 copy is scaled, otherwise the input itself.
        """
        in_float32 = self.cast(x, 4)
        squares = self._pointwise(in_float32, saved=(in_float32.storage,))
        scale = self._new(x.rows, heads, 4, x.is_tracked)
        self.moved += squares.bytes + 2 * scale.bytes
        self._record((squares,), scale)

        unscaled = x
        if product_size == 4:
            unscaled = in_float32
        scaled = self.multiply(unscaled, scale)
        weight = self.parameter(1, x.width // heads)
        return self.multiply(self.cast(scaled, product_size), weight)

    def activation(self, x: Symbol) -> Symbol:
        """Return GELU or SiLU, which save their input."""
        return self._pointwise(x, saved=(x.storage,))

    def cast(self, x: Symbol, size: int) -> Symbol:
        """Return x in a dtype of ``size`` bytes; x itself if it has this size already."""
        if x.size == size:
            return x
        return self._pointwise(x, saved=(), size=size)

    def copy(self, x: Symbol) -> Symbol:
        """Return x in a new storage, possibly multiplied by a number."""
        return self._pointwise(x, saved=())

    def rotate(self, x: Symbol, moved_in_bf16: int, moved_in_float32: int) -> Symbol:
        """Return x with rotary positions, an operator that saves only their tables.

        Args:
            moved_in_bf16, moved_in_float32: bytes per element that the operators read and write.
        """
        elements = x.rows * x.width
        moved = moved_in_float32
        if x.size == 2:
            moved = moved_in_bf16
        self.moved += moved * elements
        out = self._new(x.rows, x.width, x.size, x.is_tracked)
        self._record((x,), out, temporary=2 * 4 * elements)
        return out

    def multiply(self, a: Symbol, b: Symbol) -> Symbol:
        """Return the product; one factor may have only one row per sample, or one row in all."""
        out = self._broadcast(a, b)

        # Each factor is saved for the other's gradient.
        saved: tuple[Storage, ...] = ()
        if b.is_tracked:
            saved += (a.storage,)
        if a.is_tracked:
            saved += (b.storage,)
        temporary = 0
        if a.is_tracked and b.is_tracked and a.rows != b.rows:
            temporary = out.bytes  # a gradient before its sum over rows
        self._record((a, b), out, saved, temporary=temporary)
        return out

    def add(self, a: Symbol, b: Symbol | None = None) -> Symbol:
        """Return the sum of two symbols, or of one and a number."""
        symbols = (a,) if b is None else (a, b)
        out = self._broadcast(*symbols)
        same = tuple(symbol for symbol in symbols if symbol.bytes == out.bytes)
        self._record(symbols, out, passed_to=same)
        return out

    def _broadcast(self, *symbols: Symbol) -> Symbol:
        """Return a new symbol of the largest shape and dtype, and count the traffic."""
        out = self._new(
            max(symbol.rows for symbol in symbols),
            max(symbol.width for symbol in symbols),
            max(symbol.size for symbol in symbols),
            any(symbol.is_tracked for symbol in symbols),
        )
        self.moved += out.bytes
        for symbol in symbols:
            self.moved += symbol.bytes
        return out

    def modulate(self, x: Symbol, scale: Symbol, shift: Symbol) -> Symbol:
        """Return x * (1 + scale) + shift."""
        scaled = self.multiply(x, self.add(scale))
        return self.add(scaled, shift)

    def join_tokens(self, *symbols: Symbol) -> Symbol:
        """Concatenate symbols along their rows, such as the tokens of text and image."""
        rows = sum(symbol.rows for symbol in symbols)
        return self._join(symbols, rows, symbols[0].width)

    def join_channels(self, *symbols: Symbol) -> Symbol:
        """Concatenate symbols along their width."""
        width = sum(symbol.width for symbol in symbols)
        return self._join(symbols, symbols[0].rows, width)

    def _join(self, symbols: tuple[Symbol, ...], rows: int, width: int) -> Symbol:
        is_tracked = any(symbol.is_tracked for symbol in symbols)
        out = self._new(rows, width, symbols[0].size, is_tracked)
        self.moved += 2 * out.bytes
        self._record(symbols, out, passed_to=symbols)
        return out

    def columns(self, x: Symbol, parts: int) -> list[Symbol]:
        """Return equal parts of the channels, as views."""
        views = []
        for _ in range(parts):
            views.append(self._view(x, x.rows, x.width // parts))
        return views

    def some_tokens(self, x: Symbol, rows: int, *, is_contiguous: bool = False) -> Symbol:
        """Return some of the tokens: a view, or a copy if several samples must be contiguous."""
        if rows == x.rows:
            return x
        view = self._view(x, rows, x.width)
        if is_contiguous and self.samples > 1:
            return self.copy(view)
        return view

    def _view(self, x: Symbol, rows: int, width: int) -> Symbol:
        view = Symbol(rows, width, x.size, x.is_tracked, x.storage)
        self._record((x,), view)
        return view

    def local_attention(self, q: Symbol, k: Symbol, v: Symbol, heads: int) -> Symbol:
        """Return the attention to keys that every rank has, without communication."""
        keys = k.rows // self.samples
        self.attention += ATTENTION * q.rows * keys * q.width
        return self._attend(q, k, v, heads)

    def joint_attention(
        self, q: Symbol, k: Symbol, v: Symbol, heads: int, *, has_mask: bool = False
    ) -> Symbol:
        """Return the attention to the tokens of all ranks; ``parallel.diffusers`` orders them.

        Args:
            has_mask: True if the module makes a mask of all pairs of tokens, although it is unused.
        """
        mask = 0
        if has_mask:  # the module repeats it, then joins it with its transpose
            mask = 2 * q.rows * (q.rows // self.samples)
            self.moved += 2 * mask
        if not self.training.sharded:
            return self._attend(q, k, v, heads, mask=mask)

        # Tokens are put in the split's order and padded, and the output is put back.
        q = self.copy(self.copy(q))
        k = self.copy(self.copy(k))
        v = self.copy(self.copy(v))
        training = self.training
        outputs = training.attention_outputs
        buffers = training.attention_buffers
        out = self._attend(q, k, v, heads, outputs=outputs, buffers=buffers, mask=mask)
        return self.copy(self.copy(out))

    def _attend(
        self,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        heads: int,
        *,
        outputs: int = 1,
        buffers: int = 0,
        mask: int = 0,
    ) -> Symbol:
        is_tracked = q.is_tracked or k.is_tracked or v.is_tracked
        out = self._new(q.rows, q.width, q.size, is_tracked)
        lse = Storage(STATISTIC * q.rows * heads)
        others = Storage((outputs - 1) * out.bytes)
        saved = (q.storage, k.storage, v.storage, out.storage, lse, others)
        results = q.bytes + k.bytes + v.bytes
        self._record((q, k, v), out, saved, temporary=max(0, buffers - results), mask=mask)
        return out

    def _pointwise(self, x: Symbol, saved: Sequence[Storage], size: int | None = None) -> Symbol:
        """Return an operator's output of the same shape, and count its traffic."""
        out = self._new(x.rows, x.width, size or x.size, x.is_tracked)
        self.moved += x.bytes + out.bytes
        self._record((x,), out, saved)
        return out

    def _new(self, rows: int, width: int, size: int, is_tracked: bool) -> Symbol:
        storage = Storage(rows * width * size)
        return Symbol(rows, width, size, is_tracked, storage)

    def _count_weights(self, count: int) -> None:
        self.parameters += count
        if self.training.trains_all:
            self.trained += count

    def _record(
        self,
        inputs: Sequence[Symbol],
        output: Symbol,
        saved: Sequence[Storage] = (),
        *,
        weight_gradient: int = 0,
        passed_to: tuple[Symbol, ...] = (),
        temporary: int = 0,
        mask: int = 0,
    ) -> None:
        """Record an operator, if it has a backward pass."""
        if output.is_tracked:
            operation = Operation(
                inputs=tuple(inputs),
                output=output,
                saved=tuple(saved),
                weight_gradient=weight_gradient,
                passed_to=passed_to,
                temporary=temporary,
                mask=mask,
            )
            self.operations.append(operation)
