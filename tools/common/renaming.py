"""Rename longmesh's packages and custom operators in a source file, for a vendored copy.

Only the bytes of the names change: the syntax tree gives their positions, so that comments, strings
and format stay.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UserError

PACKAGE = "longmesh_attention"
PARTS = {
    "parallel.collectives": "collectives",
    "parallel.comparison": "comparison",
    "parallel.context": "context",
    "parallel.diffusers": "diffusers",
    "parallel.transformers": "transformers",
    "kernels": "kernels",
    "runtime": "runtime",
}
"""Name of each of longmesh's packages inside the vendored package."""
OURS = re.compile(rf"({'|'.join(map(re.escape, PARTS))})\b")
NAMESPACE = "longmesh"
"""Namespace of longmesh's custom operators; a second library with the same name would silently
replace them.
"""


@dataclass(frozen=True, order=True)
class Edit:
    """A replacement in a source file, at a row and a column in bytes (both from 0)."""

    row: int
    column: int
    old: str
    new: str


def renamed(source: bytes, path: Path, name: str = PACKAGE, namespace: str | None = None) -> bytes:
    """Rename longmesh's packages and operators in a source file; all other bytes stay.

    Packages move into the package ``name``; ``namespace`` is the operators' new namespace, by
    default ``name``.

    Raises UserError if the file has a relative import, or an ``import a.b`` of longmesh without
    ``as``: every use of that name in the file would have to change too.
    """
    lines = source.splitlines(keepends=True)
    edits: set[Edit] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            edits.add(_import_from_edit(node, lines, path, name))
        elif isinstance(node, ast.Import):
            edits.update(_import_edits(node, path, name))
        else:
            edits.update(_namespace_edits(node, lines, namespace or name))

    for edit in sorted(edits, reverse=True):  # from the end, so that columns stay valid
        line = lines[edit.row]
        end = edit.column + len(edit.old.encode())
        lines[edit.row] = line[: edit.column] + edit.new.encode() + line[end:]

    return b"".join(lines)


def _import_from_edit(node: ast.ImportFrom, lines: list[bytes], path: Path, name: str) -> Edit:
    """Return the edit of a ``from ... import``. Raises UserError if the import is relative."""
    module = "." * node.level + (node.module or "")
    if node.level:
        raise UserError(
            f"{path}:{node.lineno} imports {module} relative to its folder; "
            "use the module's full name"
        )

    row = node.lineno - 1
    column = lines[row].index(module.encode(), node.col_offset + len("from "))
    return Edit(row, column, module, _moved(module, name))


def _import_edits(node: ast.Import, path: Path, name: str) -> Iterator[Edit]:
    """Yield the edits of an ``import``. Raises UserError for longmesh modules without ``as``."""
    for alias in node.names:
        moved = _moved(alias.name, name)
        if moved != alias.name and not alias.asname:
            raise UserError(
                f"{path}:{node.lineno} imports {alias.name} without an alias; use from ... import"
            )
        yield Edit(alias.lineno - 1, alias.col_offset, alias.name, moved)


def _namespace_edits(node: ast.AST, lines: list[bytes], namespace: str) -> Iterator[Edit]:
    """Yield the edit of an operator's namespace, in ``torch.ops`` or a string "longmesh::..."."""
    if isinstance(node, ast.Attribute) and ast.unparse(node) == f"torch.ops.{NAMESPACE}":
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        column = node.end_col_offset - len(NAMESPACE)
        yield Edit(node.end_lineno - 1, column, NAMESPACE, namespace)
    elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{NAMESPACE}::"):
        row = node.lineno - 1
        column = lines[row].index(f"{NAMESPACE}::".encode(), node.col_offset)
        yield Edit(row, column, NAMESPACE, namespace)


def _moved(module: str, name: str) -> str:
    """Return a longmesh module's name in the vendored package; other modules keep their names."""
    match = OURS.match(module)
    if match is None:
        return module
    return f"{name}.{PARTS[match[0]]}{module[match.end() :]}"
