"""Syntax of the sources: their statements, and the modules that they import."""

import ast
from functools import cache

KINDS = ast.Import | ast.ImportFrom | ast.Expr | ast.Attribute


def nodes(path):
    """The nodes of a file's syntax that a promise is about."""
    return parsed(path.read_text(encoding="utf-8"))


@cache
def parsed(text):
    """Return the nodes of these kinds."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, KINDS)]


def imports(path, root):
    """Full names of the modules that a file imports.

    Those imported inside functions or relative to its package are among them.
    """
    package = path.relative_to(root).parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: max(len(package) - node.level + 1, 0)] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from filter(None, [module])
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
