"""Fill dataclasses from TOML files and command-line flags; no field is known by name here.

A root dataclass has one field per section, each a frozen dataclass whose fields are the flags and TOML keys. Their
attribute docstrings are the help, `Literal` gives the choices, and names are unique over all sections.
"""

import argparse
import ast
import inspect
import itertools
import math
import os
import re
import sys
import textwrap
import tomllib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from runtime import __version__
from runtime.errors import UserError, did_you_mean, unknown_argument
from runtime.files import not_a_file
from train.config.megatron_flags import drop_redundant_flags
from train.config.megatron_flags import entries as megatron_flags

Root = TypeVar("Root")
EXPECTED = {bool: "true or false", int: "an integer of at most 64 bits", float: "a finite number", str: "a string"}
LONGEST_TOML = 1_000_000
MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
ENTRIES: dict[str, type] = {}
"""Roots by program, to recognise settings that are meant for another one; entries.py names them."""
METAVAR = {int: "N", float: "X", str: "TEXT"}
BINARY = {"k": 1 << 10, "m": 1 << 20}


class ConfigError(UserError):
    """A configuration that cannot run; the message names the field, what was found and the fix."""


def config_file(run: Path) -> Path:
    """Return the configuration in a run's folder. Raises ConfigError if there is none."""
    path = run / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run} holds no config.toml; name the folder that a run saved to")
    return path


def spelled(name: str, value: Any) -> str:
    """Spell a field and its value as on a command line; `value` may come from JSON, with lists for several words."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if value == []:
        return f"leaving out --{flag}"
    words = value if isinstance(value, list) else ["none" if value is None else value]
    return " ".join([f"--{flag}", *map(str, words)])


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
        """Convert a TOML `value` to the field's type; an integer passes for a float. Raises ConfigError."""
        if self.many and isinstance(value, list):
            return tuple(self._replace(many=False).convert(item) for item in value)
        if self.base is float and type(value) is int:
            value = float(value)
        fits = not self.many and type(value) is self.base and (self.choices is None or value in self.choices)
        fits = fits and (self.base is not int or -(1 << 63) <= value < 1 << 63)
        if not fits or (self.base is float and not math.isfinite(value)):
            raise ConfigError(f"{self.name} is {value!r}; it must be {self.expects}")
        if self.base is str and (not value or "\0" in value):  # as from an unset shell variable
            raise ConfigError(f"{self.name} is {value!r}; it must be a text without zero bytes, or left out")
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
            fix = f"; for {short[1]} x {(unit := BINARY[short[2]]):,} give {int(short[1]) * unit}" if short else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not {one.expects}{fix}") from error


def _config_fields(root: type) -> dict[str, Field]:
    """Return every field of every section of `root`, by name.

    Raises TypeError for a duplicate name, and for an annotation or default that cannot be a flag.
    """
    table: dict[str, Field] = {}
    for section, cls in get_type_hints(root).items():
        hints = get_type_hints(cls)
        own = inspect.get_annotations(cls)
        for entry in sorted(fields(cls), key=lambda entry: entry.name not in own):  # inherited ones last
            hint, choices, optional, many = hints[entry.name], None, False, False
            if get_origin(hint) in (Union, types.UnionType):
                kinds = [kind for kind in get_args(hint) if kind is not type(None)]
                hint, optional = (kinds[0], True) if len(kinds) == 1 else (hint, False)
            if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
                hint, many = get_args(hint)[0], True
            if get_origin(hint) is Literal:
                hint, choices = str, get_args(hint)
            # TOML has no null: None is written by leaving the key out, so it must be the default.
            unfit = entry.default is MISSING or (optional and entry.default is not None)
            if unfit or hint not in EXPECTED:
                raise TypeError(f"{cls.__name__}.{entry.name}: no flag can be made of {entry.type} and its default")
            if entry.name in table:
                raise TypeError(f"{entry.name} is a field of both {table[entry.name].section} and {section}")
            table[entry.name] = Field(section, entry.name, hint, choices, optional, many, entry.default)
    return table


config_fields: Callable[[type], dict[str, Field]] = cache(_config_fields)


def value_of(config: object, name: str) -> Any:
    """Return the value of a field, whatever its section."""
    return getattr(getattr(config, config_fields(type(config))[name].section), name)


def build(root: type[Root], values: dict[str, Any]) -> Root:
    """Build a `root` from `values` by field name, with defaults. Raises UserError for a value out of range."""
    table = config_fields(root)
    sections = {}
    for section, cls in get_type_hints(root).items():
        sections[section] = cls(**{name: values[name] for name in values if table[name].section == section})
    return root(**sections)


def with_implied(root: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return values by field name, and those that are set by others of them, by their section's IMPLIES."""
    implied: dict[str, Any] = {}
    for section in get_type_hints(root).values():
        for name, others in getattr(section, "IMPLIES", {}).items():
            if values.get(name) is True:
                implied |= dict.fromkeys(others, True)
    return implied | values


def load(root: type[Root], path: str | Path) -> Root:
    """Read a configuration from a TOML file, with defaults for the rest. UserError names the key or field."""
    return build(root, with_implied(root, read_toml(root, path)))


def _hint(root: type, name: str, known: Collection[str], section: str = "") -> str:
    """Suggest a fix for a section, key (of ``section``) or flag that `root` does not know; another entry may."""
    for entry, other in ENTRIES.items():
        if other is root:
            continue
        table = config_fields(other)
        if name in table or name in get_type_hints(other) or name in {field.flag for field in table.values()}:
            return f"that is for {entry}"
    if name.startswith("--"):
        answers = {flag: entry.answer for flag, entry in megatron_flags().items()}
        return did_you_mean(name, known, answers) or "--help lists them all"
    here = [key for key in known if not section or config_fields(root)[key].section == section]
    return did_you_mean(name, known) or f"known are {', '.join(here)}"


def model_file(name: str | Path) -> Path:
    """Return the TOML file that --config names: a path, or a model of configs/models, such as llama3_8b.

    Raises ConfigError listing the models, the most similar first, if a name without a folder is none of them.
    """
    path = Path(name)
    moved = path.parent.resolve() == MODELS.parent  # the models' folder before they had one of their own
    is_file = path.exists() and not path.is_dir()  # a folder of a model's name is a download or a run
    if is_file or not (moved or path.parent == Path()):
        return path

    models = {file.stem: file for file in sorted(MODELS.glob("*.toml"))}
    model = path.name.lower().removesuffix(".toml").replace("-", "_")
    if model not in models:
        if path.suffix == ".toml":
            return path
        similar = get_close_matches(model, models)
        names = ", ".join(dict.fromkeys([*similar, *models]))
        raise ConfigError(f"the model is {name}; name one of {names}, or give --config FILE")

    file = Path(os.path.relpath(models[model]))
    if moved:
        _tell_moved(path, file)
    return file


@cache  # once a process, however often it reads the file
def _tell_moved(path: Path, file: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {path} has moved to {file}, which is read", file=sys.stderr)


def read_toml(root: type, path: str | Path) -> dict[str, Any]:
    """Read a TOML file's values by field name. Raises ConfigError naming the file, the key and the fix."""
    path = model_file(path)
    try:
        if kind := not_a_file(Path(path)).replace("a symbolic link", ""):  # a link may lead to a file
            raise ConfigError(f"{path}: it is {kind}; name an existing TOML file")
        with Path(path).open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST_TOML + 1)
        if len(text) > LONGEST_TOML:
            raise ConfigError(
                f"{path}: longer than {LONGEST_TOML:,} characters, which no configuration is; name a TOML file"
            )
        tree = tomllib.loads(text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name an existing TOML file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply; a configuration has sections and their keys alone") from error
    table, sections, values = config_fields(root), list(get_type_hints(root)), {}
    for section, content in tree.items():
        if section in table and not isinstance(content, dict):  # [optimizer] has a key of its name
            raise ConfigError(f"{path}: {section} stands outside of a section; move it to [{table[section].section}]")
        if section not in sections or not isinstance(content, dict):
            raise ConfigError(f"{path}: unknown section [{section}]; {_hint(root, section, sections)}")
        for name, value in content.items():
            if name not in table:
                hint = _hint(root, name, table, section)
                raise ConfigError(f"{path}: unknown key {name} in [{section}]; {hint}")
            if table[name].section != section:
                raise ConfigError(f"{path}: {name} stands in [{section}]; move it to [{table[name].section}]")
            try:
                values[name] = table[name].convert(value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
    return values


def write_toml(config: object) -> str:
    """Write `config` as TOML, without None fields; reading it back gives an equal config."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in get_type_hints(type(config))}
    for name, field in config_fields(type(config)).items():
        if (value := value_of(config, name)) is not None:
            tree[field.section][name] = list(value) if field.many else value
    import tomli_w  # late: benches and tests that write no configuration run without it

    return tomli_w.dumps(tree)


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(root: type, introduction: str | None) -> _Parser:
    """Build the parser of all flags; with an introduction, including the help texts."""
    parser = _Parser(
        description=introduction,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=116),
        usage="%(prog)s [--config FILE] [flags]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longmesh {__version__}")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file to begin with, or a model of configs/models, such as llama3_8b"
    )
    table = config_fields(root)
    for section, cls in get_type_hints(root).items():
        docs = attribute_docs(cls) if introduction else {}
        group = parser.add_argument_group(f"[{section}]", inspect.getdoc(cls) if introduction else None)
        for field in (field for field in table.values() if field.section == section):
            options: dict[str, Any] = {"help": docs.get(field.name, "").replace("%", "%%")}
            options["help"] += f" (default: {field.typed})" if field.typed else ""
            if field.base is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif field.choices and not field.optional:
                options["choices"] = field.choices
            else:
                metavar = "{" + ",".join(field.choices) + "}" if field.choices else METAVAR[field.base]
                options |= {"type": field.parse, "metavar": metavar}
            if field.many:
                options["nargs"] = "+"
            group.add_argument(field.flag, **options)
    return parser


def parse(root: type[Root], argv: Sequence[str], introduction: str) -> Root:
    """Parse a command line: `--config FILE`, overridden by other flags.

    `argv` is without the program's name. Raises UserError; with --help prints `introduction` and the help, and exits
    with status 0.
    """
    flags = ["--config", "--help", "--version", *(field.flag for field in config_fields(root).values())]
    # Megatron has --override-opt_param-scheduler, fields have underscores.
    hyphened = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    argv, taken = drop_redundant_flags(hyphened, flags)
    parser = _parser(root, introduction if {"-h", "--help"} & set(argv) else None)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(unknown_argument(unknown[0], lambda flag: _hint(root, flag, flags)))
    values: dict[str, Any] = vars(given)
    path = values.pop("config", None)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    beneath = {} if path is None else with_implied(root, _kept(root, path, values))
    # A file that a run or an import wrote names every field, so that a flag implies others against it.
    config = build(root, beneath | with_implied(root, values))
    for entry in (entry for entry in taken if entry.fits):  # which hold for some values of a field only
        field = config_fields(root).get(entry.field)
        value = value_of(config, field.name) if field else None
        if value not in entry.fits:
            found = f"{entry.field} is {value}" if field else f"this program has no {entry.field}"
            raise ConfigError(f"{entry.flag} is given and {found}; it goes with {', '.join(entry.fits)}: {entry.text}")
    return config


def _kept(root: type, path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's values but for those that a flag leaves no place for; say which these are.

    By its section's REPLACES it takes the place of some, and a flag that is none leaves out its PARTS.
    """
    found, table, sections = read_toml(root, path), config_fields(root), get_type_hints(root)
    for name, value in given.items():
        if value is False:  # --no-mock-data
            continue
        which, does = ("PARTS", "none leaves out") if value is None else ("REPLACES", "takes the place of")
        others = getattr(sections[table[name].section], which, {}).get(name, ())
        left = [other for other in others if found.get(other) and other not in given]
        if left and os.environ.get("RANK", "0") == "0":
            print(f"note: {table[name].flag} {does} {', '.join(left)} of {path}", file=sys.stderr)
        found = {other: value for other, value in found.items() if other not in left}
    return found
