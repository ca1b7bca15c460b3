"""Totals of a recorded forward pass, and the memory that its backward pass needs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from planner.diffusion.symbols import Operation, Storage, Symbol, Training
from planner.diffusion.tape import Tape


@dataclass(frozen=True)
class Trace:
    """Totals of a forward pass (weights, FLOPs, bytes), and the memory of its backward pass."""

    parameters: int
    trained: int
    products: int
    """FLOPs of the forward pass's matmuls."""
    backward_products: int
    attention: int
    """FLOPs of attention to local keys in the forward pass."""
    moved: int
    """Bytes that operators between the matmuls read and write in the forward pass."""
    inputs: int
    """Bytes of the inputs that only this part of the model has; checkpointing keeps them."""
    shared: int
    """Bytes of the inputs that all blocks share."""
    saved: int
    """Bytes that autograd keeps for the backward pass."""
    peak: int
    """Peak bytes of the backward pass or, if larger, of the forward pass that it repeats."""


def trace(training: Training, samples: int, forward: Callable[[Tape], Sequence[Symbol]]) -> Trace:
    """Run ``forward``, which returns its outputs, on a new tape; return the totals of the tape."""
    tape = Tape(training, samples)
    outputs = forward(tape)
    inputs = 0
    shared = 0
    for symbol in tape.inputs:
        if symbol.storage.is_counted:
            inputs += symbol.bytes
        else:
            shared += symbol.bytes
    return Trace(
        parameters=tape.parameters,
        trained=tape.trained,
        products=tape.products,
        backward_products=tape.backward_products,
        attention=tape.attention,
        moved=tape.moved,
        inputs=inputs,
        shared=shared,
        saved=saved_bytes(tape.operations),
        peak=max(backward_bytes(tape, outputs), forward_bytes(tape, outputs)),
    )


def saved_bytes(operations: Iterable[Operation]) -> int:
    """Return the bytes of the storages that operators save, each counted once."""
    storages: set[Storage] = set()
    for operation in operations:
        storages.update(operation.saved)
    return sum(storage.bytes for storage in storages if storage.is_counted)


def forward_bytes(tape: Tape, outputs: Iterable[Symbol]) -> int:
    """Return the peak bytes while checkpointing repeats a forward pass.

    A tensor is freed after the last operator that reads it or, if a variable holds it, when the
    forward pass ends. Tensors saved for the backward pass stay. The gradients of the outputs exist
    already. The repetition stops once all tensors that the backward pass needs are saved.
    """
    # Find the last operator that reads each storage, and the last one that saves anything.
    num_operations = 0
    last_use: dict[Storage, int] = {}
    for index, operation in enumerate(tape.operations):
        if operation.saved:
            num_operations = index + 1
        for symbol in (*operation.inputs, operation.output):
            last_use[symbol.storage] = index
    for symbol in tape.variables:
        last_use[symbol.storage] = len(tape.operations)

    # Run up to the last operator that saves anything. The inputs stay in memory throughout.
    pinned = {symbol.storage for symbol in tape.inputs}
    alive = set(pinned)
    peak = 0
    for index, operation in enumerate(tape.operations[:num_operations]):
        pinned.update(operation.saved)
        alive.update(operation.saved)
        alive.add(operation.output.storage)
        num_bytes = sum(storage.bytes for storage in alive if storage.is_counted)
        peak = max(peak, num_bytes + operation.mask)
        for symbol in (*operation.inputs, operation.output):
            if last_use[symbol.storage] <= index and symbol.storage not in pinned:
                alive.discard(symbol.storage)
    return peak + sum(symbol.bytes for symbol in outputs)


def backward_bytes(tape: Tape, outputs: Iterable[Symbol]) -> int:
    """Return the peak bytes of a backward pass: its inputs, saved storages and gradients.

    Operators run in reverse. Each allocates the gradients of its inputs, then frees what it saved
    and the gradient of its output. The gradients of a symbol that several operators read are summed
    in place. Gradients of weights stay.
    """
    memory = _Backward(tape)
    for symbol in outputs:
        memory.add_gradient(symbol)
    for operation in reversed(tape.operations):
        memory.run(operation)
    return memory.peak


class _Backward:
    """Storages that are alive while a backward pass runs."""

    def __init__(self, tape: Tape) -> None:
        self.peak = 0
        self._alive = 0
        self._references: Counter[Storage] = Counter()
        """Number of users of each storage."""
        self._gradients: dict[Symbol, Storage] = {}
        for symbol in tape.inputs:
            self._retain(symbol.storage)
        for operation in tape.operations:
            for storage in operation.saved:
                self._retain(storage)

    def add_gradient(self, symbol: Symbol) -> None:
        """Add the gradient of an output, with which the backward pass begins."""
        storage = Storage(symbol.bytes)
        self._retain(storage)
        self._accumulate(symbol, storage)

    def run(self, operation: Operation) -> None:
        """Run the backward pass of an operator."""
        gradient = self._gradients.pop(operation.output, None)
        if gradient is None:  # no output of the forward pass depends on it
            gradient = Storage(0)
            self._retain(gradient)

        # The gradient of an input is a new storage, or shares that of the output's gradient.
        new_gradients = []
        for symbol in operation.inputs:
            if not symbol.is_tracked:
                continue
            storage = gradient
            if symbol not in operation.passed_to:
                storage = Storage(symbol.bytes)
            self._retain(storage)
            new_gradients.append((symbol, storage))
        self._alive += operation.weight_gradient
        self.peak = max(self.peak, self._alive + operation.temporary)

        # The output's gradient and the saved tensors are no longer needed.
        for symbol, storage in new_gradients:
            self._accumulate(symbol, storage)
        self._release(gradient)
        for storage in operation.saved:
            self._release(storage)

    def _accumulate(self, symbol: Symbol, storage: Storage) -> None:
        """Make a retained storage the symbol's gradient, or add it to the one that it has."""
        if symbol in self._gradients:
            self._release(storage)
        else:
            self._gradients[symbol] = storage

    def _retain(self, storage: Storage) -> None:
        if self._references[storage] == 0 and storage.is_counted:
            self._alive += storage.bytes
        self._references[storage] += 1

    def _release(self, storage: Storage) -> None:
        self._references[storage] -= 1
        if self._references[storage] == 0 and storage.is_counted:
            self._alive -= storage.bytes
