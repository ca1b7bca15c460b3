"""Density and names of the sources, folder by folder: what tests/test_architecture.py asserts.

python -m tests.style                    # one row per folder
python -m tests.style train/checkpoint   # one row per file, then the lines to rewrite
"""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "model data parallel kernels runtime train planner tools slurm papers bench docs tests configs"
).split()
MAX_COLUMNS = 100
EMPTY_NAMES = frozenset(
    "found own one wide most least said asked kept held of at known there places here then still "
    "stays told given taken made seen wanted".split()
)
"""Pronouns, prepositions and participles: as names they do not say what they hold."""
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass
class Count:
    """Counts of a file or a folder."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    comprehensions: int = 0
    ternaries: int = 0
    tuple_assignments: int = 0
    names: int = 0
    letters: int = 0
    """Letters of all assigned names and arguments."""
    long_lines: list[str] = field(default_factory=list)
    empty_names: list[str] = field(default_factory=list)

    def add(self, other: "Count") -> None:
        """Add the counts of a file."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def per_line(self) -> float:
        """Return the syntax nodes per line."""
        return self.nodes / max(1, self.lines)

    def per_thousand(self, count: int) -> float:
        """Return a count per 1,000 lines."""
        return 1000 * count / max(1, self.lines)

    def row(self, title: str) -> str:
        """Return the row of the table."""
        rates = [
            self.per_thousand(count)
            for count in (self.comprehensions, self.ternaries, self.tuple_assignments)
        ]
        return (
            f"{title:34} {self.files:5} {self.lines:7,} {self.nodes:8,} {self.per_line():7.2f}"
            f" {rates[0]:7.1f} {rates[1]:7.1f} {rates[2]:7.1f}"
            f" {len(self.long_lines):7} {self.letters / max(1, self.names):7.1f}"
            f" {len(self.empty_names):7}"
        )


TITLE = (
    f"{'':34} {'files':>5} {'lines':>7} {'nodes':>8} {'a line':>7} {'compr.':>7} {'ternary':>7}"
    f" {'tuples':>7} {'> 100':>7} {'letters':>7} {'empty':>7}"
)


def sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a checkout, without environments and runs."""
    yield from sorted(root.glob("*.py"))
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def assigned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every assigned variable and every argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


@cache
def counted(path: Path) -> Count:
    """Count a file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    count = Count(files=1, lines=len(lines))

    for node in ast.walk(tree):
        count.nodes += 1
        count.comprehensions += isinstance(node, COMPREHENSIONS)
        count.ternaries += isinstance(node, ast.IfExp)
        count.tuple_assignments += isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Tuple) for target in node.targets
        )

    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            count.long_lines.append(f"{path}:{number}: {len(line)} columns")

    for number, name in assigned_names(tree):
        count.names += 1
        count.letters += len(name)
        if name in EMPTY_NAMES:
            count.empty_names.append(f"{path}:{number}: {name}")
    return count


def by_folder(root: Path) -> dict[str, Count]:
    """Return the counts of each top-level folder, and of the programs beside them as "entry"."""
    counts: dict[str, Count] = {}
    for path in sources(root):
        parts = path.relative_to(root).parts
        folder = parts[0] if len(parts) > 1 else "entry"
        counts.setdefault(folder, Count()).add(counted(path))
    return counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders, each file a row")
    paths: list[Path] = parser.parse_args().paths

    print(TITLE)
    if not paths:
        without_tests = Count()
        for folder, count in by_folder(ROOT).items():
            print(count.row(folder))
            if folder != "tests":
                without_tests.add(count)
        print(without_tests.row("without tests"))
        return

    total = Count()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            print(counted(file).row(str(file)))
            total.add(counted(file))
    print(total.row("sum"))
    print(*total.long_lines, *total.empty_names, sep="\n")


if __name__ == "__main__":
    main()
