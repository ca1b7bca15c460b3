"""Parts that all pictures share: colours and axes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
MASKED, INK, FAINT = "#C9CCD1", "#22262B", "#6B7280"


def plain(axes: "Axes") -> None:
    """Draw a light grid, and of the frame the left and the lower line alone."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
