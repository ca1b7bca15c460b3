"""Pages of docs/reference/ that are made from the sources: current, and whole."""

from train.config.entries import ENTRIES
from train.config.fields import config_fields
from train.config.pages import FOLDER, ROOT, pages


def test_the_pages_are_what_the_sources_say_and_have_a_row_for_everything():
    for name, text in pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, (
            "python -m train.config.pages writes it"
        )
    rows = [line for line in pages()["flags.md"].splitlines() if line.startswith("| `--")]
    for root in ENTRIES.values():
        for field in config_fields(root).values():
            assert any(row.startswith(f"| `{field.flag}` |") for row in rows), field.flag
    assert all(len(row.rstrip(" |").rpartition("|")[2]) > 5 for row in rows)
    page = pages()["configs.md"]
    for path in (ROOT / "configs").rglob("*.toml"):
        row = next(
            line for line in page.splitlines() if line.startswith(f"| `{path.relative_to(ROOT)}` |")
        )
        assert len(row) > len(str(path.relative_to(ROOT))) + 40, row
