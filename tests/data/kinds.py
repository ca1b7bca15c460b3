"""The tables of docs/reference/data_kinds.md, against the tests that they list."""

import re

from tests.starts import ROOT

PAGE = ROOT / "docs" / "reference" / "data_kinds.md"
RESULTS = ("right", "told", "refused")


def rows_of_page(section):
    """The rows of one section's table, as pairs of a kind and its result."""
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {section}\n")
    table, _, _ = rest.partition("\n## ")
    rows = re.findall(r"^\| (.+?) \| (\w+).*? \|$", table, flags=re.M)
    return [(kind, result) for kind, result in rows if kind != "kind" and set(kind) != {"-"}]


def check_page(section, kinds):
    """Assert that a section lists exactly the tested (kind, result) pairs, in order."""
    pairs = [(kind, result) for kind, result in kinds]
    assert {result for _, result in pairs} <= set(RESULTS)
    assert rows_of_page(section) == pairs
