"""Help texts of flags: the attribute docstrings of a section."""

import ast
import inspect
import itertools
import textwrap
from dataclasses import is_dataclass


def attribute_docs(cls: type) -> dict[str, str]:
    """Return attribute docstrings by field name, inherited ones too, from the sources: Python drops them."""
    docs = {}
    for owner in (owner for owner in reversed(cls.__mro__) if is_dataclass(owner)):
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        assert isinstance(tree.body[0], ast.ClassDef)
        for entry, text in itertools.pairwise(tree.body[0].body):
            if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[ast.unparse(entry.target)] = inspect.cleandoc(str(text.value.value))
    return docs
