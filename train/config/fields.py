"""Read the fields of a configuration's dataclasses; each field is a flag and a TOML key.

A root dataclass has one field per section, each a frozen dataclass. One section of a root may have
several classes, the variants; one of the section's fields chooses among them (``Variants``).

The tables come from annotations and docstrings, so that a new setting is one line in the dataclass
that uses it: its flag, TOML key, help text and row in docs/reference/flags.md follow.
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
    """A configuration that cannot run; the message names the field, its value and the fix."""


class Variants(NamedTuple):
    """Classes of a section, keyed by the value of the field ``name``; the first is the default."""

    section: str
    name: str
    classes: Mapping[str, type]
    passed_over: frozenset[str] = frozenset()
    """Keys that earlier versions wrote for every class; ignored if their value is the default."""

    @property
    def default(self) -> str:
        """The key of the class that is used if nothing chooses one."""
        return next(iter(self.classes))


class ConfigField(NamedTuple):
    """A configuration field with its parsed annotation; `base` is bool, int, float or str."""

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
        """The default as typed on a command line; empty if there is none."""
        if self.many:
            words = self.default
        elif self.default is None:
            words = ()
        else:
            words = (self.default,)

        if self.base is bool:
            return " ".join(str(word).lower() for word in words)
        return " ".join(map(str, words))

    @property
    def expects(self) -> str:
        """A description of the values that the field accepts, for an error message."""
        if self.choices:
            expected = "one of " + ", ".join(self.choices)
        else:
            expected = EXPECTED[self.base]
        return f"a list, each {expected}" if self.many else expected

    def convert(self, value: Any) -> Any:
        """Convert a TOML `value` to the field's type; an integer is accepted as a float.

        Raises ConfigError if the value does not fit.
        """
        if self.many and isinstance(value, list):
            item_field = self._replace(many=False)
            return tuple(item_field.convert(item) for item in value)

        if self.base is float and type(value) is int:
            value = float(value)
        if not self._fits(value):
            raise ConfigError(f"{self.name} is {value!r}; it must be {self.expects}")

        # An unset shell variable gives an empty text.
        if self.base is str and (not value or "\0" in value):
            raise ConfigError(
                f"{self.name} is {value!r}; it must be nonempty text without NUL bytes, or left out"
            )
        return value

    def _fits(self, value: Any) -> bool:
        """Return True if a single value has the field's type and lies in its range."""
        if self.many or type(value) is not self.base:
            return False
        if self.choices is not None and value not in self.choices:
            return False
        if isinstance(value, int) and self.base is int:
            return -(1 << 63) <= value < 1 << 63
        return not isinstance(value, float) or math.isfinite(value)

    def parse(self, text: str) -> Any:
        """Convert a command-line word to the field's type; `none` unsets an optional field."""
        if self.optional and text == "none":
            return None

        item_field = self._replace(many=False)
        try:
            return item_field.convert(self.base(text))
        except ValueError as error:
            fix = ""
            suffixed = re.fullmatch(r"(\d{1,9})([km])", text.lower())
            if self.base is int and suffixed:
                unit = BINARY[suffixed[2]]
                fix = f"; for {suffixed[1]} x {unit:,} give {int(suffixed[1]) * unit}"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {item_field.expects}{fix}"
            ) from error


hints_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def variants_of(root: Any) -> Variants:
    """Return the ``VARIANTS`` of a root class or instance; an empty ``Variants`` if it has none."""
    return getattr(root, "VARIANTS", Variants("", "", {}))


def sections_of(root: Any, variant: str | None = None) -> dict[str, type]:
    """Return the class of each section of a root class or an instance of it.

    ``variant`` chooses the class of the section that has several, by default the first one.
    """
    if not isinstance(root, type):
        return {section: type(getattr(root, section)) for section in hints_of(type(root))}

    variants = variants_of(root)
    if not variants.classes:
        return dict(hints_of(root))  # not the cached table itself
    return hints_of(root) | {variants.section: variants.classes[variant or variants.default]}


def config_fields(root: Any, variant: str | None = None) -> dict[str, ConfigField]:
    """Return every field of every section, keyed by name; arguments as in ``sections_of``.

    Raises TypeError for a duplicate name, and for an annotation or default that cannot be a flag.
    """
    variants = variants_of(root)
    declared = hints_of(root if isinstance(root, type) else type(root))
    sections = []
    for name, cls in sections_of(root, variant).items():
        sections.append((name, cls, declared[name]))
    return _fields_of(tuple(sections), variants.name, tuple(variants.classes))


def fields_by_variant(root: type) -> dict[str, dict[str, ConfigField]]:
    """Return ``config_fields`` of each variant; the key is empty if the root has no variants."""
    return {variant: config_fields(root, variant) for variant in variants_of(root).classes or ("",)}


def value_of(config: object, name: str) -> Any:
    """Return the value of a configuration's field, whatever its section."""
    return getattr(getattr(config, config_fields(config)[name].section), name)


@cache
def _fields_of(
    sections: tuple[tuple[str, type, type], ...], chooser: str, variants: tuple[str, ...]
) -> dict[str, ConfigField]:
    """Return the fields of ``sections``, tuples of (name, class, class that the root declares)."""
    table: dict[str, ConfigField] = {}
    for section, cls, declared in sections:
        hints = get_type_hints(cls)
        # Help lists first the fields that a class adds, then those that all variants share, and
        # last the other inherited ones.
        local = inspect.get_annotations(cls)
        shared = inspect.get_annotations(declared)
        ordered = sorted(
            fields(cls), key=lambda entry: (entry.name not in local, entry.name not in shared)
        )

        for entry in ordered:
            base, choices, optional, many = _parse_annotation(hints[entry.name])
            default = entry.default
            if entry.name == chooser:
                choices = variants
                default = variants[0]

            # TOML has no null: None is written by leaving the key out, so it must be the default.
            unfit = entry.default is MISSING or (optional and entry.default is not None)
            if unfit or base not in EXPECTED:
                raise TypeError(
                    f"{cls.__name__}.{entry.name}: no flag can be made of {entry.type} "
                    "and its default"
                )
            if entry.name in table:
                raise TypeError(
                    f"{entry.name} is a field of both {table[entry.name].section} and {section}"
                )
            table[entry.name] = ConfigField(
                section, entry.name, base, choices, optional, many, default
            )
    return table


def _parse_annotation(hint: Any) -> tuple[Any, tuple[str, ...] | None, bool, bool]:
    """Return an annotation's base type, choices, and whether None and several values are allowed.

    An annotation that cannot be a flag is returned as the base type.
    """
    choices = None
    optional = False
    many = False

    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        if len(members) == 1:
            hint = members[0]
            optional = True
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        hint = get_args(hint)[0]
        many = True
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        hint = str
    return hint, choices, optional, many


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the docstrings under a class's fields, keyed by field name, including inherited ones.

    They are read from the source, since Python does not keep them at run time.
    """
    docs = {}
    for owner in reversed(cls.__mro__):
        if not is_dataclass(owner):
            continue
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
    """Return the field docstrings of a section's class, keyed by field name.

    The docstring of the field that chooses a variant also lists the variants' own docstrings.
    """
    docs = attribute_docs(cls)
    variants = variants_of(root)
    if variants.name in docs:
        sentences = [docs[variants.name]]
        for name, variant in variants.classes.items():
            sentences.append(f"{name}: {inspect.getdoc(variant)}")
        docs[variants.name] = " ".join(sentences)
    return docs


def variant_fields(
    root: type, shown: Collection[str] = ()
) -> dict[str, list[tuple[ConfigField, str]]]:
    """Return the fields that some variants lack, grouped by the variants that have them.

    Each field comes with its docstring; fields named in ``shown`` are left out.
    """
    tables = fields_by_variant(root)
    owners: dict[str, list[str]] = {}
    described: dict[str, tuple[ConfigField, str]] = {}
    for variant, cls in variants_of(root).classes.items():
        docs = attribute_docs(cls)
        for name, field in tables[variant].items():
            if name not in docs or name in shown:
                continue
            owners.setdefault(name, []).append(variant)
            # A flag is listed once, with the docstring of the first variant that has it.
            described.setdefault(name, (field, docs[name]))

    groups: dict[str, list[tuple[ConfigField, str]]] = {}
    for name, variants in owners.items():
        if len(variants) < len(tables):
            groups.setdefault(", ".join(variants), []).append(described[name])
    return groups
