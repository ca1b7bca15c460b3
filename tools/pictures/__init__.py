"""Parts that all pictures share: colours of ranks and of text, letters of documents."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
MASKED, LATER, INK, FAINT = "#C9CCD1", "#FFFFFF", "#22262B", "#6B7280"
PALE = 0.28  # of a rank's colour, where it is pale


def colour(rank: int, size: int) -> str:
    """Return a rank's colour as #RRGGBB; beyond eight ranks, from a ramp from dark to light."""
    if size <= len(PALETTE):
        return PALETTE[rank]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](rank / (size - 1)))


def rgb(colour: str) -> tuple[float, float, float]:
    """Return red, green and blue of 0 to 1."""
    return int(colour[1:3], 16) / 255, int(colour[3:5], 16) / 255, int(colour[5:7], 16) / 255


def faded(colour: str) -> tuple[float, float, float]:
    """Return the pale form of a colour: red, green and blue of 0 to 1."""
    red, green, blue = (1 - PALE * (1 - part) for part in rgb(colour))
    return red, green, blue


def ink_on(colour: str) -> str:
    """Return the colour of text that is readable on ``colour``."""
    red, green, blue = rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def letter(document: int) -> str:
    """Return A for document 0, and so on, to Z and from A again."""
    return chr(ord("A") + document % 26)


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def plain(axes: "Axes") -> None:
    """Draw a light grid, and of the frame the left and the lower line alone."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def frameless(axes: "Axes") -> None:
    """Take the frame away."""
    for spine in axes.spines.values():
        spine.set_visible(False)
