"""Fill dataclasses from TOML files and command-line flags; no field is known by name here.

A root dataclass has one field per section, each a frozen dataclass whose fields are the flags and
TOML keys. Their attribute docstrings are the help, `Literal` gives the choices, and names are
unique over all sections.
"""

import argparse
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from runtime import __version__
from runtime.errors import did_you_mean, unknown_argument
from runtime.files import not_a_file
from train.config.fields import (
    METAVAR,
    ConfigError,
    Field,
    config_fields,
    documented,
    fields_by_variant,
    hints_of,
    sections_of,
    variant_fields,
    variants_of,
)
from train.config.megatron_flags import drop_redundant_flags
from train.config.megatron_flags import entries as megatron_flags

__all__ = ["ConfigError"]
Root = TypeVar("Root")
LONGEST_TOML = 1_000_000
MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
ENTRIES: dict[str, type] = {}
"""Roots by program, to recognise settings that are meant for another one; entries.py names them."""


def config_file(run: Path) -> Path:
    """Return the configuration in a run's folder. Raises ConfigError if there is none."""
    path = run / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run} holds no config.toml; name the folder that a run saved to")
    return path


def spelled(name: str, value: Any) -> str:
    """Spell a field and its value as on a command line; `value` may come from JSON, with lists for
    several words."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if value == []:
        return f"leaving out --{flag}"
    words = value if isinstance(value, list) else ["none" if value is None else value]
    return " ".join([f"--{flag}", *map(str, words)])


def value_of(config: object, name: str) -> Any:
    """Return the value of a field, whatever its section."""
    return getattr(getattr(config, config_fields(config)[name].section), name)


def build(root: type[Root], values: dict[str, Any]) -> Root:
    """Build a `root` from `values` by field name, with defaults. Raises UserError for a value out
    of range."""
    variant = values.get(variants_of(root).name)
    table, sections = config_fields(root, variant), {}
    for section, cls in sections_of(root, variant).items():
        sections[section] = cls(
            **{name: values[name] for name in values if table[name].section == section}
        )
    return root(**sections)


def with_implied(root: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return values by field name, and those that are set by others of them, by their section's
    IMPLIES."""
    implied: dict[str, Any] = {}
    for section in hints_of(root).values():
        for name, others in getattr(section, "IMPLIES", {}).items():
            if values.get(name) is True:
                implied |= dict.fromkeys(others, True)
    return implied | values


def load(root: type[Root], path: str | Path) -> Root:
    """Read a configuration from a TOML file, with defaults for the rest. UserError names the key or
    field."""
    return build(root, with_implied(root, read_toml(root, path)))


def _hint(
    root: type, name: str, known: Collection[str], variant: str | None, section: str = ""
) -> str:
    """Suggest a fix for a section, key (of ``section``) or flag that `root` lacks; a variant or
    another entry may."""
    key = name.removeprefix("--").replace("-", "_")
    keys = {key, key.removeprefix("no_")} - config_fields(root, variant).keys()
    _, chooser, classes, _ = variants_of(root)
    having = [family for family, table in fields_by_variant(root).items() if keys & table.keys()]
    if having:
        verb = "has" if len(having) == 1 else "have"
        families = " and ".join(filter(None, [", ".join(having[:-1]), having[-1]]))
        return f"{chooser} {variant or next(iter(classes))} has none; {families} {verb} it"
    for entry, other in ENTRIES.items():
        tables = fields_by_variant(other).values()
        if other is not root and (
            name in hints_of(other) or any(keys & table.keys() for table in tables)
        ):
            return f"that is for {entry}"
    if name.startswith("--"):
        answers = {flag: entry.answer for flag, entry in megatron_flags().items()}
        every = dict.fromkeys(known)
        for table in fields_by_variant(root).values():
            every |= dict.fromkeys(field.flag for field in table.values())
        return did_you_mean(name, every, answers) or "--help lists them all"
    here = [
        key for key in known if not section or config_fields(root, variant)[key].section == section
    ]
    return did_you_mean(name, known) or f"known are {', '.join(here)}"


def _is_default(field: Field, value: Any) -> bool:
    """Return whether a TOML value, of the field's type, is its default."""
    try:
        return bool(field.convert(value) == field.default)
    except ConfigError:
        return False


def model_file(name: str | Path) -> Path:
    """Return the TOML file that --config names: a path, or a model of configs/models, such as
    llama3_8b.

    Raises ConfigError listing the models, the most similar first, if a name without a folder is
    none of them.
    """
    path = Path(name)
    moved = (
        path.parent.resolve() == MODELS.parent
    )  # the models' folder before they had one of their own
    is_file = (
        path.exists() and not path.is_dir()
    )  # a folder of a model's name is a download or a run
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


def read_toml(root: type, path: str | Path, variant: str | None = None) -> dict[str, Any]:
    """Read a TOML file's values by field name, which are those of the ``variant``, by default of
    the file's own.

    A value of another variant's field is passed over if it is that field's default: earlier
    versions wrote all.

    Raises ConfigError naming the file, the key and the fix.
    """
    path = model_file(path)
    try:
        if kind := not_a_file(Path(path)).replace(
            "a symbolic link", ""
        ):  # a link may lead to a file
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
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name an existing TOML file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: nested too deeply; a configuration has sections and their keys alone"
        ) from error
    variant = variant or _variant_in(root, tree)
    table, sections, values = config_fields(root, variant), list(hints_of(root)), {}
    for section, content in tree.items():
        if section in table and not isinstance(content, dict):  # [optimizer] has a key of its name
            raise ConfigError(
                f"{path}: {section} stands outside of a section; move it to [{table[section].section}]"
            )
        if section not in sections or not isinstance(content, dict):
            raise ConfigError(
                f"{path}: unknown section [{section}]; {_hint(root, section, sections, variant)}"
            )
        for name, value in content.items():
            if name not in table:
                others = (
                    fields[name] for fields in fields_by_variant(root).values() if name in fields
                )
                passed_over = name in variants_of(root).passed_over
                if passed_over and any(
                    section == field.section and _is_default(field, value) for field in others
                ):
                    continue
                hint = _hint(root, name, table, variant, section)
                raise ConfigError(f"{path}: unknown key {name} in [{section}]; {hint}")
            if table[name].section != section:
                raise ConfigError(
                    f"{path}: {name} stands in [{section}]; move it to [{table[name].section}]"
                )
            try:
                values[name] = table[name].convert(value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
    return values


def _variant_in(root: type, tree: Mapping[str, Any]) -> str | None:
    """Return the variant that a TOML file names, if it names one that is."""
    section, name, classes, _ = variants_of(root)
    content = tree.get(section)
    named = content.get(name) if isinstance(content, dict) else None
    return named if isinstance(named, str) and named in classes else None


def write_toml(config: object) -> str:
    """Write `config` as TOML, without None fields; reading it back gives an equal config."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in sections_of(config)}
    for name, field in config_fields(config).items():
        if (value := value_of(config, name)) is not None:
            tree[field.section][name] = list(value) if field.many else value
    import tomli_w  # late: benches and tests that write no configuration run without it

    return tomli_w.dumps(tree)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(root: type, introduction: str | None, variant: str | None) -> _Parser:
    """Build the parser of a variant's flags; with an introduction, of those of the others too, and
    the help texts."""
    parser = _Parser(
        description=introduction,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=34, width=116
        ),
        usage="%(prog)s [--config FILE] [flags]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longmesh {__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file to begin with, or a model of configs/models, such as llama3_8b",
    )
    table = config_fields(root, variant)
    for section, cls in sections_of(root, variant).items():
        docs = documented(root, cls) if introduction else {}
        group = parser.add_argument_group(
            f"[{section}]", inspect.getdoc(cls) if introduction else None
        )
        for field in (field for field in table.values() if field.section == section):
            _add_flag(group, field, docs.get(field.name, ""))
        if introduction and section == variants_of(root).section:
            for title, others in variant_fields(root, table).items():
                group = parser.add_argument_group(f"[{section}] of {title}")
                for field, doc in others:
                    _add_flag(group, field, doc)
    return parser


def _add_flag(group: Any, field: Field, doc: str) -> None:
    options: dict[str, Any] = {"help": doc.replace("%", "%%")}
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


def parse(root: type[Root], argv: Sequence[str], introduction: str) -> Root:
    """Parse a command line: `--config FILE`, overridden by other flags.

    `argv` is without the program's name. Raises UserError; with --help prints `introduction` and
    the help, and exits with status 0.
    """
    # Megatron has --override-opt_param-scheduler, fields have underscores.
    hyphened = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    informed = {"-h", "--help", "--version"} & set(hyphened)  # whatever else is wrong
    try:
        variant = _requested_variant(root, hyphened)
    except ConfigError:
        if not informed:
            raise
        variant = None
    flags = [
        "--config",
        "--help",
        "--version",
        *(field.flag for field in config_fields(root, variant).values()),
    ]
    argv, taken = drop_redundant_flags(hyphened, flags)
    parser = _parser(root, introduction if {"-h", "--help"} & set(argv) else None, variant)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(
            unknown_argument(unknown[0], lambda flag: _hint(root, flag, flags, variant))
        )
    values: dict[str, Any] = vars(given)
    path = values.pop("config", None)
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    beneath = {} if path is None else with_implied(root, _kept(root, path, values))
    # A file that a run or an import wrote names every field, so that a flag implies others against
    # it.
    config = build(root, beneath | with_implied(root, values))
    for entry in (
        entry for entry in taken if entry.fits
    ):  # which hold for some values of a field only
        field = config_fields(config).get(entry.field)
        value = value_of(config, field.name) if field else None
        if value not in entry.fits:
            found = f"{entry.field} is {value}" if field else f"this program has no {entry.field}"
            raise ConfigError(
                f"{entry.flag} is given and {found}; it goes with {', '.join(entry.fits)}: {entry.text}"
            )
    return config


def _requested_variant(root: type, argv: Sequence[str]) -> str | None:
    """Return the variant that a command line asks for, or else its file; None if neither does."""
    _, name, classes, _ = variants_of(root)
    if not classes:
        return None
    chooser = _Parser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
    chooser.add_argument(config_fields(root)[name].flag, choices=tuple(classes))
    chooser.add_argument("--config")
    requested = vars(chooser.parse_known_args(argv)[0])
    if name not in requested and "config" in requested:
        return read_toml(root, requested["config"]).get(name)
    return requested.get(name)


def _kept(root: type, path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's values but for those that a flag leaves no place for; say which these are.

    By its section's REPLACES it takes the place of some, and a flag that is none leaves out its
    PARTS.
    """
    variant = given.get(variants_of(root).name)
    found = read_toml(root, path, variant)
    table, sections = (
        config_fields(root, variant or found.get(variants_of(root).name)),
        hints_of(root),
    )
    for name, value in given.items():
        if value is False:  # --no-mock-data
            continue
        which, does = (
            ("PARTS", "none leaves out") if value is None else ("REPLACES", "takes the place of")
        )
        others = getattr(sections[table[name].section], which, {}).get(name, ())
        left = [other for other in others if found.get(other) and other not in given]
        if left and os.environ.get("RANK", "0") == "0":
            print(f"note: {table[name].flag} {does} {', '.join(left)} of {path}", file=sys.stderr)
        found = {other: value for other, value in found.items() if other not in left}
    return found
