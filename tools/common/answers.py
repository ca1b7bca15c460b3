"""Answers of a run's model, whose copies over a mesh take turns, and pictures of how many are right."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from runtime.errors import UserError
from runtime.together import gather_results
from train.generation import Writer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


def shared(writer: Writer, batches: Sequence[Sequence[int]], ask: Callable[[Sequence[int]], list[T]]) -> list[T]:
    """Ask every batch, each of one of the writer's copies, and return the answers of all, in order, on every rank."""
    found: dict[int, list[T]] = {}
    error: UserError | None = None
    try:
        for turn in range(writer.replica, len(batches), writer.replicas):
            found[turn] = ask(batches[turn])
    except UserError as caught:  # the other copies wait for these answers
        error = caught

    def own() -> dict[int, list[T]]:
        if error is not None:
            raise error
        return found

    everyone = {turn: answers for part in gather_results(own) for turn, answers in part.items()}
    return [answer for turn in range(len(batches)) for answer in everyone[turn]]


def heat_map(
    shares: Sequence[Sequence[float]], across: Sequence[int], down: Sequence[str], label: str, meaning: str
) -> "Figure":
    """Draw shares of 0 to 1 over lengths in tokens (across) and the rows that ``down`` names (down)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 0.9 * len(across), 1.6 + 0.5 * len(down)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            axes.text(x, y, f"{share:.0%}", ha="center", va="center", color="white" if share < 0.5 else "black")
    axes.set_xticks(range(len(across)), [f"{length:,}" for length in across])
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel="tokens", ylabel=label)
    figure.colorbar(image, label=meaning)
    return figure
