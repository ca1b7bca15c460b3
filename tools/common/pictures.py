"""Parts that all pictures share: colours, axes and files."""

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
MASKED, INK, FAINT = "#C9CCD1", "#22262B", "#6B7280"


def plain(axes: "Axes") -> None:
    """Draw a light grid, and of the frame the left and the lower line alone."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: "Figure", path: Path, flag: str) -> None:
    """Write a picture in the format of its name, and say so. Raises UserError, naming ``flag``: no such format."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise UserError(f"{flag} is {path}, which names no picture format; end it in one of {', '.join(known)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")
