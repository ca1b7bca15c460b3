"""What the page of packed documents says is what plans count."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench import packed_layouts
from bench.packed_layouts import DRAWS, figures, layouts_row, main
from parallel.context import make_plan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "packed.md"


@pytest.mark.parametrize("kind", ["log-normal, at most a quarter", "one document, window 1,024"])
def test_the_page_has_what_is_counted(kind: str) -> None:
    assert layouts_row(kind, 16_384, 8, draws=3) in PAGE.read_text().splitlines()


def test_one_document_by_hand() -> None:
    """Of four blocks of 16 tokens the last sees 3.5 others; half of the rows of a ring are of earlier blocks."""
    make = partial(make_plan, "exchange", seq_len=64, size=4, documents=(0, 64))
    pairs = [16 * 17 / 2 + 16 * 16 * rank for rank in range(4)]
    assert figures(make(layout="contiguous")) == pytest.approx((max(pairs) / np.mean(pairs), 6 / 12))
    assert figures(make(layout="balanced")) == pytest.approx((1, 0.75))


@pytest.mark.parametrize("kind", DRAWS)
def test_documents_fill_the_sequence(kind: str) -> None:
    documents = DRAWS[kind][0](0, 4096)
    assert documents[0] == 0
    assert documents[-1] == 4096
    assert np.all(np.diff(documents) > 0)


def test_all_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "2048", "8", "--draws", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| `") for line in lines) == len(packed_layouts.METHODS)
    assert len([line for line in lines if line.startswith("| ")]) == len(DRAWS) + len(packed_layouts.METHODS) + 4
