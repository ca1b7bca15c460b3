"""Write the generated pages of docs/reference/: flags, Megatron-LM's flags, configurations.

python -m train.config.pages
"""

import argparse
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import get_type_hints

from train.config import megatron_flags
from train.config.entries import ENTRIES
from train.config.flags import METAVAR, Field, attribute_docs, config_fields

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
MADE_BY = "Made by `python -m train.config.pages`."


def main() -> None:
    """Write every page."""
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("python -m train.config.pages", description=__doc__, formatter_class=raw).parse_args()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"written: {(FOLDER / name).relative_to(ROOT)}")


def pages() -> dict[str, str]:
    """Return the text of every generated page, by its name in docs/reference/."""
    return {"flags.md": flags_page(), "megatron_flags.md": megatron_flags.markdown(), "configs.md": configs_page()}


def flags_page() -> str:
    """Return docs/reference/flags.md: the flags of both entries, by section, with defaults."""
    lines = [
        "# Flags",
        "",
        "Both entries take `--config FILE`, a TOML file ([those of the tree](configs.md)), and each flag below",
        "over it. A flag is a key of its section in the file: `--seq-length 4096` is `seq_length = 4096` in `[train]`.",
        "`none` unsets a flag that has no default. A switch has its opposite: `--bf16`, `--no-bf16`. Most names are",
        f"Megatron-LM's; [what its others are here](megatron_flags.md). {MADE_BY}",
    ]
    sections = dict.fromkeys(name for root in ENTRIES.values() for name in get_type_hints(root))
    for section in sections:
        lines += ["", f"## [{section}]", "", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: str) -> Iterable[str]:
    """Yield a section's description and tables: flags of both entries, then of each alone."""
    rows = {entry: _rows(root, section) for entry, root in ENTRIES.items()}
    gpt, dit = rows.values()
    about = [
        inspect.getdoc(get_type_hints(root)[section]) for root in ENTRIES.values() if section in get_type_hints(root)
    ]
    yield str(about[0])
    shared = [row for row in gpt if row in dit]
    alone = {entry: [row for row in rows[entry] if row not in shared] for entry in ENTRIES}
    for title, table in {"": shared, **{f"`{entry}` alone:": own for entry, own in alone.items()}}.items():
        if table:
            yield from ("", title) if title else ()
            yield from ("", "| flag | value | default | |", "| --- | --- | --- | --- |", *table)


def _rows(root: type, section: str) -> list[str]:
    """Return a table row per field of a section; none if the entry lacks the section."""
    cls = get_type_hints(root).get(section)
    docs = {} if cls is None else attribute_docs(cls)
    return [_row(field, docs[field.name]) for field in config_fields(root).values() if field.section == section]


def _row(field: Field, about: str) -> str:
    value = " ".join(f"`{choice}`" for choice in field.choices) if field.choices else METAVAR.get(field.base, "")
    value += " ..." if field.many else ""
    default = field.typed
    return f"| `{field.flag}` | {value} | {default and f'`{default}`'} | {' '.join(about.split())} |"


def configs_page() -> str:
    """Return docs/reference/configs.md: the first comment of each TOML file under configs/."""
    lines = [
        "# Configurations",
        "",
        "What the TOML files under `configs/` say of themselves. `--config configs/NAME.toml` takes one, and",
        f"[flags](flags.md) override it. {MADE_BY}",
    ]
    folders = {"Models and runs": "configs", "Long contexts": "configs/runs", "Clusters": "configs/clusters"}
    for title, folder in ((title, ROOT / name) for title, name in folders.items()):
        lines += ["", f"## {title}", "", "| file | |", "| --- | --- |"]
        lines += [f"| `{path.relative_to(ROOT)}` | {_comment(path)} |" for path in sorted(folder.glob("*.toml"))]
    return "\n".join(lines) + "\n"


def _comment(path: Path) -> str:
    """Return a file's first comment, without its command."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        words.append(line.lstrip("# "))
    text = " ".join(words).partition(" Add the data")[0]
    return text.strip().removesuffix(":")


if __name__ == "__main__":
    main()
