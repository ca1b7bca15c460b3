"""Write the generated pages of docs/: flags, Megatron-LM's flags, configurations, code map.

python -m train.config.pages

The pages come from docstrings and comments, so that a flag's help, its page and its code cannot
differ. tests/train/config/test_pages.py fails if a page is not up to date.
"""

import argparse
import ast
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import get_type_hints

from train.config import megatron_flags
from train.config.entries import ENTRIES
from train.config.fields import (
    METAVAR,
    ConfigField,
    config_fields,
    documented,
    fields_by_variant,
    sections_of,
    variant_fields,
    variants_of,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
TREE = "model kernels runtime parallel data train planner tools papers bench slurm".split()
MADE_BY = "Made by `python -m train.config.pages`."


def main() -> None:
    """Write every generated page."""
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(
        "python -m train.config.pages", description=__doc__, formatter_class=raw
    ).parse_args()
    for name, text in pages().items():
        path = (FOLDER / name).resolve()
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


def pages() -> dict[str, str]:
    """Return the text of every generated page, keyed by its path from docs/reference/."""
    return {
        "flags.md": flags_page(),
        "megatron_flags.md": megatron_flags.markdown(),
        "configs.md": configs_page(),
        "../concepts/code.md": code_page(),
    }


def flags_page() -> str:
    """Return docs/reference/flags.md: both entry scripts' flags and defaults, in sections."""
    lines = [
        "# Flags",
        "",
        "Both entries take `--config FILE`, a TOML file ([those of the tree](configs.md)), and",
        "the flags below, which override it. A flag is a key of its section in the file:",
        "`--seq-length 4096` is `seq_length = 4096` in `[train]`. `none` unsets a flag that has",
        "no default. A switch has its opposite: `--bf16`, `--no-bf16`. Most names are",
        "Megatron-LM's; its other flags and their answers here have [a page of their",
        f"own](megatron_flags.md). {MADE_BY}",
    ]
    sections = dict.fromkeys(name for root in ENTRIES.values() for name in get_type_hints(root))
    for section in sections:
        lines += ["", f"## [{section}]", "", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: str) -> Iterable[str]:
    """Yield a section's description and tables: shared flags, each entry's, each variant's."""
    rows = {entry: _rows(root, section) for entry, root in ENTRIES.items()}
    for root in ENTRIES.values():
        if section in get_type_hints(root):
            yield str(inspect.getdoc(get_type_hints(root)[section]))
            break

    gpt, dit = rows.values()
    shared = [row for row in gpt if row in dit]
    tables = {"": shared}
    for entry in ENTRIES:
        tables[f"Only in `{entry}`:"] = [row for row in rows[entry] if row not in shared]
    for root in ENTRIES.values():
        if section != variants_of(root).section:
            continue
        for variants, fields in variant_fields(root).items():
            title = f"Only with `{variants_of(root).name}` {variants}:"
            tables[title] = [_row(field, doc) for field, doc in fields]

    for title, table in tables.items():
        if not table:
            continue
        if title:
            yield from ("", title)
        yield from ("", "| flag | value | default | |", "| --- | --- | --- | --- |", *table)


def _rows(root: type, section: str) -> list[str]:
    """Return a table row for each field that all variants of a section have.

    The list is empty if the entry script lacks the section.
    """
    if section not in sections_of(root):
        return []
    docs = documented(root, sections_of(root)[section])
    shared = set.intersection(*map(set, fields_by_variant(root).values()))
    rows = []
    for field in config_fields(root).values():
        if field.section == section and field.name in shared:
            rows.append(_row(field, docs[field.name]))
    return rows


def _row(field: ConfigField, doc: str) -> str:
    value = METAVAR.get(field.base, "")
    if field.choices:
        value = " ".join(f"`{choice}`" for choice in field.choices)
    if field.many:
        value += " ..."
    default = f"`{field.typed}`" if field.typed else ""
    about = " ".join(doc.split())
    return f"| `{field.flag}` | {value} | {default} | {about} |"


def configs_page() -> str:
    """Return docs/reference/configs.md: the first comment of each TOML file under configs/."""
    lines = [
        "# Configurations",
        "",
        "The first comment of each TOML file under `configs/`. `--config` takes a file, or the",
        f"name of a model, and [flags](flags.md) override it. {MADE_BY}",
    ]
    folders = {
        "Models and runs": "configs/models",
        "Long contexts": "configs/runs",
        "Clusters": "configs/clusters",
    }
    for title, name in folders.items():
        lines += ["", f"## {title}", "", "| file | |", "| --- | --- |"]
        for path in sorted((ROOT / name).glob("*.toml")):
            lines.append(f"| `{path.relative_to(ROOT)}` | {_comment(path)} |")
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


def code_page() -> str:
    """Return docs/concepts/code.md: the first line of each file's docstring, by folder."""
    lines = [
        "# The code",
        "",
        "To read it in an hour: `pretrain_gpt.py`, `train/config/finalize.py`, `train/trainer.py`",
        "and `parallel/apply.py`, a run from its flags to its steps; then in `parallel/context/`",
        "the files `layout.py`, `tiles.py`, `plan.py`, `methods/ring.py`, `executor.py`,",
        "`api.py`; then `tests/test_parity.py`, which states what all of it promises. [One run,",
        "one step, one flag, one checkpoint](one_step.md) follows each from file to file.",
        "",
        "Folders import downwards only; `tests/test_architecture.py` fails for any other import:",
        "",
        "```",
        "entry -> planner -> train -> {model, data, parallel} -> kernels -> runtime",
        "```",
        "",
        "`tools`, `papers`, `bench` and `slurm` import these. Tests mirror the tree by path, and",
        f"[configurations](../reference/configs.md) have a page of their own. {MADE_BY}",
        "",
        "## Entries",
        *_files(sorted(ROOT.glob("pretrain_*.py"))),
    ]
    for name in TREE:
        folder = ROOT / name
        lines += ["", f"## {folder.name}/", "", _first_line(folder / "__init__.py")]
        lines += _files(sorted(folder.rglob("*.py")))
    return "\n".join(lines) + "\n"


def _files(paths: Iterable[Path]) -> list[str]:
    """Return a Markdown table of files and packages, each with its docstring's first line."""
    rows = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix().removesuffix("__init__.py")
        if name.rstrip("/") not in TREE:
            rows.append(f"| `{name}` | {_first_line(path).removesuffix('.')} |")
    return ["", "| path | |", "| --- | --- |", *rows]


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
