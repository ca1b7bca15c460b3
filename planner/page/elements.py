"""Elements of the page: text, tables, fills of bars, and the document around them.

The standard library's ElementTree escapes all text and attributes. Fills differ by pattern, not
only by colour, so that the page reads in black and white.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from runtime import __version__

STYLE = Path(__file__).with_name("style.css")
Child = Element | str
CHARACTER = 6.6
"""Width of a character of a label, in pixels, rounded up."""
LABEL_MARGIN = 8
WIDTHS = {"narrow": 330, "middle": 600, "broad": 920}
"""Classes of labels, and the width of a picture in pixels from which style.css shows them."""


@dataclass(frozen=True)
class Fill:
    """Appearance of a bar: a colour, and the path of a pattern over it, 8 by 8 pixels."""

    colour: str
    path: str = ""
    width: float = 1


FILLS = {
    "attention": Fill("#8db4e2"),
    "linear": Fill("#d7e6f6"),
    "recompute": Fill("#d7e6f6", "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"),
    "slices": Fill("#8db4e2", "M0,4 h8 M4,0 v8"),
    "optimizer": Fill("#d7e6f6", "M0,2 h4 M4,6 h4", 4),
    "attention's sends": Fill("#f8c471", "M4,2 v4 M2,4 h4"),
    "tensor parallel": Fill("#fbe3b5", "M0,0 l8,8 M8,0 l-8,8"),
    "pipeline": Fill("#f8c471", "M2,0 v8 M6,0 v8"),
    "data parallel": Fill("#fbe3b5", "M0,4 h8 M4,0 v8"),
    "offload": Fill("#b9dfb4", "M0,2 h8 M0,6 h8"),
    "optimizer offload": Fill("#dcefd9", "M0,4 h8"),
    "wait for other stages": Fill("#ffffff", "M4,3 v2", 2),
    "wait for slower ranks": Fill("#ffffff", "M0,0 l8,8"),
    "forward": Fill("#d7e6f6"),
    "backward": Fill("#8db4e2"),
    "passes": Fill("#b2cdec", "M0,0 l4,8 l4,-8"),
    "activations": Fill("#b9dfb4", "M4,2 v4 M2,4 h4"),
    "weights, gradients, optimizer": Fill("#8db4e2"),
    "a layer's backward, or the logits": Fill("#f8c471", "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"),
    "left for fragmentation": Fill("#ffffff"),
    "on the host, pinned": Fill("#dcefd9", "M0,2 h8 M0,6 h8"),
    "weights": Fill("#d5ccec", "M0,0 l8,8"),
    "gathered weights": Fill("#d7e6f6", "M0,4 h8 M4,0 v8"),
    "gradients": Fill("#d7e6f6", "M2,0 v8 M6,0 v8"),
    "logits": Fill("#f8c471", "M0,2 h8 M0,6 h8"),
    "passing": Fill("#fbe3b5", "M0,0 l8,8 M8,0 l-8,8"),
    "compute": Fill("#8db4e2"),
    "exposed sends and waits": Fill("#f8c471", "M4,2 v4 M2,4 h4"),
    "copies": Fill("#b9dfb4", "M0,2 h8 M0,6 h8"),
    "data": Fill("#d7e6f6", "M2,0 v8 M6,0 v8"),
    "saving": Fill("#dcefd9", "M0,4 h8"),
    "other": Fill("#eeeeee", "M0,0 l8,8 M8,0 l-8,8"),
}
"""Fills of bars, keyed by cause."""
PLAIN = Fill("#eeeeee", "M0,0 h8", 1)
"""Fill of a cause without a row in ``FILLS``."""


def element(tag: str, *children: Child, **attributes: object) -> Element:
    """Return an element with text and elements inside.

    Attributes named ``class_`` or ``stroke_width`` become ``class`` and ``stroke-width``.
    """
    names = {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items()}
    node = Element(tag, names)
    for child in children:
        if isinstance(child, Element):
            node.append(child)
        elif len(node):
            node[-1].tail = (node[-1].tail or "") + child
        else:
            node.text = (node.text or "") + child
    return node


def table(rows: Sequence[Sequence[Child]], name: str, words: Iterable[int] = (0,)) -> Element:
    """Return a table whose first row is its head.

    Args:
        rows: cells of each row.
        name: the id of the table.
        words: columns that have words, aligned to the left; the others have numbers.
    """
    left = set(words)
    lines = []
    for number, cells in enumerate(rows):
        line = element("tr")
        for column, cell in enumerate(cells):
            kind = "words" if column in left else "number"
            line.append(element("td" if number else "th", cell, class_=kind))
        lines.append(line)
    head = element("thead", lines[0])
    body = element("tbody", *lines[1:])
    return element("div", element("table", head, body, id=name), class_="scroll")


def without_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return a table's rows without the columns whose cells below the head are all empty."""
    used = [0]
    for column in range(1, len(rows[0])):
        if any(cells[column] for cells in rows[1:]):
            used.append(column)
    return [[cells[column] for column in used] for cells in rows]


def bar(start: float, share: float, cause: str, hint: str, top: float, height: float) -> Element:
    """Return a rectangle of a picture; ``start`` and ``share`` are shares of its width.

    ``hint`` is shown when the pointer is over it.
    """
    return element(
        "rect",
        element("title", hint),
        x=_percent(start),
        width=_percent(share),
        y=f"{top:g}",
        height=f"{height:g}",
        class_="bar" if share > 0.004 else "thin",
        fill=f"url(#{_pattern_name(cause)})",
    )


def label(start: float, share: float, texts: Sequence[str], base: float) -> list[Element]:
    """Return the texts that name a bar: for each width of the page the longest that fits.

    Args:
        start: the bar's start as a share of the picture's width.
        share: the bar's width, likewise.
        texts: texts to choose from, the longest first.
        base: the baseline of the text in pixels.
    """
    chosen: dict[str, str] = {}
    for width_class, pixels in WIDTHS.items():
        for text in texts:
            if len(text) * CHARACTER + LABEL_MARGIN <= share * pixels:
                chosen[width_class] = text
                break

    elements = []
    for width_class, text in chosen.items():
        x = _percent(start)
        classes = f"label {width_class}"
        elements.append(element("text", text, x=x, dx="4", y=f"{base:g}", class_=classes))
    return elements


def heading(text: str, short: str, base: float) -> list[Element]:
    """Return the text above a bar; ``short`` replaces it on a narrow page."""
    elements = []
    for width_class in WIDTHS:
        shown = short if width_class == "narrow" else text
        classes = f"heading {width_class}"
        elements.append(element("text", shown, x="0", y=f"{base:g}", class_=classes))
    return elements


def picture(children: Iterable[Element], height: float, title: str) -> Element:
    """Return a picture as wide as the page; ``title`` is its description for a screen reader."""
    described = element("title", title)
    return element("svg", described, *children, width="100%", height=f"{height:g}", role="img")


def legend(causes: Iterable[str]) -> Element:
    """Return a list of the fills with the causes that they stand for."""
    items = []
    for cause in dict.fromkeys(causes):
        fill = f"url(#{_pattern_name(cause)})"
        swatch = element("rect", x="0.5", y="0.5", width="27", height="15", class_="bar", fill=fill)
        shown = element("svg", swatch, width="28", height="16", aria_hidden="true")
        items.append(element("li", shown, f" {cause}"))
    return element("ul", *items, class_="legend")


def patterns() -> Element:
    """Return the definitions of all fills, which the pictures of the page refer to."""
    defined = []
    for cause, fill in {**FILLS, "plain": PLAIN}.items():
        ground = element("rect", width="8", height="8", fill=fill.colour)
        lines = element(
            "path",
            d=fill.path or "M0,0",
            stroke="#444",
            stroke_width=f"{fill.width:g}",
            fill="none",
        )
        defined.append(
            element(
                "pattern",
                ground,
                lines,
                id=_pattern_name(cause),
                width="8",
                height="8",
                patternUnits="userSpaceOnUse",
            )
        )
    return element("svg", element("defs", *defined), width="0", height="0", class_="defs")


def _pattern_name(cause: str) -> str:
    if cause not in FILLS:
        cause = "plain"
    words = "".join(letter if letter.isalpha() else " " for letter in cause).split()
    return "-".join(["fill", *words])


def _percent(share: float) -> str:
    return f"{100 * share:.4f}%"


def document(title: str, sections: Iterable[Element]) -> str:
    """Return the page: one file that needs no other."""
    viewport = element("meta", name="viewport", content="width=device-width, initial-scale=1")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        viewport,
        element("meta", name="generator", content=f"longmesh {__version__}"),
        element("title", title),
        element("style", STYLE.read_text(encoding="utf-8")),
    )
    body = element("body", patterns(), element("main", element("h1", title), *sections))
    html = element("html", head, body, lang="en")
    return f"<!DOCTYPE html>\n{tostring(html, encoding='unicode', method='html')}\n"
