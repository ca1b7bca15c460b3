"""Write the generated pages of docs/: flags, Megatron-LM's flags, configurations, the map of the
code.

python -m train.config.pages
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
    Field,
    config_fields,
    documented,
    fields_by_variant,
    sections_of,
    variant_fields,
    variants_of,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
TREE = [
    *("model", "kernels", "runtime", "parallel", "data", "train"),
    *("planner", "tools", "papers", "bench", "slurm"),
]
MADE_BY = "Made by `python -m train.config.pages`."


def main() -> None:
    """Write every page."""
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(
        "python -m train.config.pages", description=__doc__, formatter_class=raw
    ).parse_args()
    for name, text in pages().items():
        path = (FOLDER / name).resolve()
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


def pages() -> dict[str, str]:
    """Return the text of every generated page, by its name in docs/reference/."""
    return {
        "flags.md": flags_page(),
        "megatron_flags.md": megatron_flags.markdown(),
        "configs.md": configs_page(),
        "../concepts/code.md": code_page(),
    }


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
    """Yield a section's description and tables: flags of both entries, then of each alone, then of
    variants.
    """
    rows = {entry: _rows(root, section) for entry, root in ENTRIES.items()}
    gpt, dit = rows.values()
    about = [
        inspect.getdoc(get_type_hints(root)[section])
        for root in ENTRIES.values()
        if section in get_type_hints(root)
    ]
    yield str(about[0])
    shared = [row for row in gpt if row in dit]
    alone = {entry: [row for row in rows[entry] if row not in shared] for entry in ENTRIES}
    tables = {"": shared, **{f"`{entry}` alone:": own for entry, own in alone.items()}}
    for root in ENTRIES.values():
        name = variants_of(root).name
        if section == variants_of(root).section:
            for variants, fields in variant_fields(root).items():
                tables[f"`{name}` {variants} alone:"] = [_row(field, doc) for field, doc in fields]
    for title, table in tables.items():
        if table:
            yield from ("", title) if title else ()
            yield from ("", "| flag | value | default | |", "| --- | --- | --- | --- |", *table)


def _rows(root: type, section: str) -> list[str]:
    """Return a table row per field of a section that all variants have; none if the entry lacks the
    section.
    """
    cls = sections_of(root).get(section)
    docs = {} if cls is None else documented(root, cls)
    shared = set.intersection(*map(set, fields_by_variant(root).values()))
    return [
        _row(field, docs[field.name])
        for field in config_fields(root).values()
        if field.section == section and field.name in shared
    ]


def _row(field: Field, doc: str) -> str:
    value = (
        " ".join(f"`{choice}`" for choice in field.choices)
        if field.choices
        else METAVAR.get(field.base, "")
    )
    value += " ..." if field.many else ""
    about = " ".join(doc.split())
    return f"| `{field.flag}` | {value} | {field.typed and f'`{field.typed}`'} | {about} |"


def configs_page() -> str:
    """Return docs/reference/configs.md: the first comment of each TOML file under configs/."""
    lines = [
        "# Configurations",
        "",
        "What the TOML files under `configs/` say of themselves. `--config` takes a file, or the name of a model, and",
        f"[flags](flags.md) override it. {MADE_BY}",
    ]
    folders = {
        "Models and runs": "configs/models",
        "Long contexts": "configs/runs",
        "Clusters": "configs/clusters",
    }
    for title, folder in ((title, ROOT / name) for title, name in folders.items()):
        lines += ["", f"## {title}", "", "| file | |", "| --- | --- |"]
        lines += [
            f"| `{path.relative_to(ROOT)}` | {_comment(path)} |"
            for path in sorted(folder.glob("*.toml"))
        ]
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
        "To read it in an hour: `pretrain_gpt.py`, `train/config/finalize.py`, `train/trainer.py` and",
        "`parallel/apply.py`, a run from its flags to its steps; then `parallel/context/` as `layout.py`,",
        "`tiles.py`, `plan.py`, `methods/ring.py`, `executor.py`, `api.py`; then `tests/test_parity.py`,",
        "which says what all of it promises. [One run, one step, one flag, one checkpoint](one_step.md)",
        "follows each from file to file.",
        "",
        "Folders import downwards only (`tests/test_architecture.py` reads the imports and refuses the rest):",
        "",
        "```",
        "entry -> planner -> train -> {model, data, parallel} -> kernels -> runtime",
        "```",
        "",
        "`tools`, `papers`, `bench` and `slurm` stand on these. Tests mirror the tree by path, and",
        f"[configurations](../reference/configs.md) have a page of their own. {MADE_BY}",
        "",
        "## Entries",
        *_files(sorted(ROOT.glob("pretrain_*.py"))),
    ]
    for folder in (ROOT / name for name in TREE):
        lines += ["", f"## {folder.name}/", "", _first_line(folder / "__init__.py")]
        lines += _files(sorted(folder.rglob("*.py")))
    return "\n".join(lines) + "\n"


def _files(paths: Iterable[Path]) -> list[str]:
    """Return a table of files, and of the packages below the first folder by their names."""
    rows = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix().removesuffix("__init__.py")
        if name.rstrip("/") not in TREE:
            rows.append(f"| `{name}` | {_first_line(path).removesuffix('.')} |")
    return ["", "| path | |", "| --- | --- |", *rows]


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
