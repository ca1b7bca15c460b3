"""The fields of a configuration, which are its flags and TOML keys, as its dataclasses state them.

A root dataclass has one field per section, each a frozen dataclass. A root may have a section of
several classes, one of whose fields chooses among them (``Variants``).
"""

import argparse
import ast
import inspect
import itertools
import math
import re
import textwrap
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from runtime.errors import UserError

EXPECTED = {
    bool: "true or false",
    int: "an integer of at most 64 bits",
    float: "a finite number",
    str: "a string",
}
METAVAR = {int: "N", float: "X", str: "TEXT"}
BINARY = {"k": 1 << 10, "m": 1 << 20}


class ConfigError(UserError):
    """A configuration that cannot run; the message names the field, what was found and the fix."""


class Variants(NamedTuple):
    """The classes of a section, by the value of its field ``name``; the first one is the
    default."""

    section: str
    name: str
    classes: Mapping[str, type]
    passed_over: frozenset[str] = frozenset()
    """Keys that earlier versions wrote for every class: at a default they say nothing."""


class Field(NamedTuple):
    """One field of a section with its parsed annotation; `base` is bool, int, float or str."""

    section: str
    name: str
    base: type
    choices: tuple[str, ...] | None
    optional: bool
    many: bool
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def typed(self) -> str:
        """The default as it is typed; empty where there is none."""
        words = self.default if self.many else () if self.default is None else (self.default,)
        return " ".join(str(word).lower() if self.base is bool else str(word) for word in words)

    @property
    def expects(self) -> str:
        one = "one of " + ", ".join(self.choices) if self.choices else EXPECTED[self.base]
        return f"a list, each {one}" if self.many else one

    def convert(self, value: Any) -> Any:
        """Convert a TOML `value` to the field's type; an integer passes for a float. Raises
        ConfigError."""
        if self.many and isinstance(value, list):
            return tuple(self._replace(many=False).convert(item) for item in value)
        if self.base is float and type(value) is int:
            value = float(value)
        fits = (
            not self.many
            and type(value) is self.base
            and (self.choices is None or value in self.choices)
        )
        fits = fits and (self.base is not int or -(1 << 63) <= value < 1 << 63)
        if not fits or (self.base is float and not math.isfinite(value)):
            raise ConfigError(f"{self.name} is {value!r}; it must be {self.expects}")
        if self.base is str and (not value or "\0" in value):  # as from an unset shell variable
            raise ConfigError(
                f"{self.name} is {value!r}; it must be a text without zero bytes, or left out"
            )
        return value

    def parse(self, text: str) -> Any:
        """Convert a command-line word to the field's type; `none` unsets an optional field."""
        if self.optional and text == "none":
            return None
        one = self._replace(many=False)
        try:
            return one.convert(self.base(text))
        except ValueError as error:
            short = re.fullmatch(r"(\d{1,9})([km])", text.lower()) if self.base is int else None
            fix = (
                f"; for {short[1]} x {(unit := BINARY[short[2]]):,} give {int(short[1]) * unit}"
                if short
                else ""
            )
            raise argparse.ArgumentTypeError(f"{text!r} is not {one.expects}{fix}") from error


hints_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def variants_of(root: Any) -> Variants:
    """Return the section of a root, or of an instance of one, that has several classes; one without
    names if none."""
    return getattr(root, "VARIANTS", Variants("", "", {}))


def sections_of(root: Any, variant: str | None = None) -> dict[str, type]:
    """Return the class of each section of a root, or of an instance of one.

    ``variant`` chooses that of a section with several; by default the first.
    """
    if not isinstance(root, type):
        return {section: type(getattr(root, section)) for section in hints_of(type(root))}
    section, _, classes, _ = variants_of(root)
    chosen = {section: classes[variant or next(iter(classes))]} if classes else {}
    return hints_of(root) | chosen


def config_fields(root: Any, variant: str | None = None) -> dict[str, Field]:
    """Return every field of every section, by name; arguments as in ``sections_of``.

    Raises TypeError for a duplicate name, and for an annotation or default that cannot be a flag.
    """
    variants, declared = variants_of(root), hints_of(root if isinstance(root, type) else type(root))
    sections = tuple(
        (name, cls, declared[name]) for name, cls in sections_of(root, variant).items()
    )
    return _fields_of(sections, variants.name, tuple(variants.classes))


def fields_by_variant(root: type) -> dict[str, dict[str, Field]]:
    """Return ``config_fields`` of each variant; of a root without any, under an empty name."""
    return {variant: config_fields(root, variant) for variant in variants_of(root).classes or ("",)}


@cache
def _fields_of(
    sections: tuple[tuple[str, type, type], ...], chooser: str, variants: tuple[str, ...]
) -> dict[str, Field]:
    table: dict[str, Field] = {}
    for section, cls, declared in sections:
        hints = get_type_hints(cls)
        # Its own first, then those that all variants share, inherited ones last.
        local, shared = inspect.get_annotations(cls), inspect.get_annotations(declared)
        for entry in sorted(
            fields(cls), key=lambda entry: (entry.name not in local, entry.name not in shared)
        ):
            hint, choices, optional, many = hints[entry.name], None, False, False
            if get_origin(hint) in (Union, types.UnionType):
                kinds = [kind for kind in get_args(hint) if kind is not type(None)]
                hint, optional = (kinds[0], True) if len(kinds) == 1 else (hint, False)
            if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
                hint, many = get_args(hint)[0], True
            if get_origin(hint) is Literal:
                hint, choices = str, get_args(hint)
            default = entry.default
            if entry.name == chooser:
                choices, default = variants, variants[0]
            # TOML has no null: None is written by leaving the key out, so it must be the default.
            unfit = entry.default is MISSING or (optional and entry.default is not None)
            if unfit or hint not in EXPECTED:
                raise TypeError(
                    f"{cls.__name__}.{entry.name}: no flag can be made of {entry.type} and its default"
                )
            if entry.name in table:
                raise TypeError(
                    f"{entry.name} is a field of both {table[entry.name].section} and {section}"
                )
            table[entry.name] = Field(section, entry.name, hint, choices, optional, many, default)
    return table


def attribute_docs(cls: type) -> dict[str, str]:
    """Return attribute docstrings by field name, inherited ones too, from the sources: Python drops
    them."""
    docs = {}
    for owner in (owner for owner in reversed(cls.__mro__) if is_dataclass(owner)):
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        assert isinstance(tree.body[0], ast.ClassDef)
        for entry, text in itertools.pairwise(tree.body[0].body):
            if (
                isinstance(entry, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                docs[ast.unparse(entry.target)] = inspect.cleandoc(str(text.value.value))
    return docs


def documented(root: type, cls: type) -> dict[str, str]:
    """Return ``attribute_docs`` of a section's class; the field that chooses a variant says what
    each is."""
    docs, (_, chooser, classes, _) = attribute_docs(cls), variants_of(root)
    if chooser in docs:
        named = (f"{name}: {inspect.getdoc(variant)}" for name, variant in classes.items())
        docs[chooser] = " ".join([docs[chooser], *named])
    return docs


def variant_fields(root: type, shown: Collection[str] = ()) -> dict[str, list[tuple[Field, str]]]:
    """Return the fields that some variants lack, with their docstrings, by the names of the
    variants that have them.

    Those named in ``shown`` are left out.
    """
    tables, classes = fields_by_variant(root), variants_of(root).classes
    having: dict[str, list[str]] = {}
    described: dict[str, tuple[Field, str]] = {}
    for variant, cls in classes.items():
        docs = attribute_docs(cls)
        for name in (name for name in tables[variant] if name in docs and name not in shown):
            having.setdefault(name, []).append(variant)
            described.setdefault(
                name, (tables[variant][name], docs[name])
            )  # a flag stands once: the first's words
    groups: dict[str, list[tuple[Field, str]]] = {}
    for name, variants in having.items():
        if len(variants) < len(tables):
            groups.setdefault(", ".join(variants), []).append(described[name])
    return groups
