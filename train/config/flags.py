"""Fill configuration dataclasses from command-line flags, which override a TOML file.

A root dataclass has one field per section, each a frozen dataclass whose fields are the flags and
TOML keys. Their attribute docstrings are the help, `Literal` gives the choices, and names are
unique over all sections. No field is named in this module.
"""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from runtime import __version__
from runtime.errors import unknown_argument
from train.config.fields import (
    METAVAR,
    ConfigError,
    ConfigField,
    config_fields,
    documented,
    hints_of,
    sections_of,
    value_of,
    variant_fields,
    variants_of,
)
from train.config.megatron_flags import drop_redundant_flags
from train.config.suggest import suggestion
from train.config.toml_files import (
    MODELS,
    build,
    config_file,
    load,
    model_file,
    read_toml,
    with_implied,
    write_toml,
)

__all__ = [
    "MODELS",
    "ConfigError",
    "build",
    "config_file",
    "load",
    "model_file",
    "parse",
    "read_toml",
    "spelled",
    "value_of",
    "write_toml",
]
Root = TypeVar("Root")


def spelled(name: str, value: Any) -> str:
    """Return a field and its value in the form of a command-line flag.

    `value` may come from JSON, in which several words are a list.
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if value == []:
        return f"leaving out --{flag}"

    if not isinstance(value, list):
        value = ["none" if value is None else value]
    return " ".join([f"--{flag}", *map(str, value)])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=116)


def _parser(root: type, introduction: str | None, variant: str | None) -> _Parser:
    """Build the argument parser for a variant's flags.

    With an introduction the parser also has the help texts, and the other variants' flags.
    """
    parser = _Parser(
        description=introduction,
        formatter_class=_help_formatter,
        usage="%(prog)s [--config FILE] [flags]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longmesh {__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file that the flags override, or a model of configs/models, such as llama3_8b",
    )

    table = config_fields(root, variant)
    for section, cls in sections_of(root, variant).items():
        docs: dict[str, str] = {}
        about = None
        if introduction:
            docs = documented(root, cls)
            about = inspect.getdoc(cls)
        group = parser.add_argument_group(f"[{section}]", about)
        for field in table.values():
            if field.section == section:
                _add_flag(group, field, docs.get(field.name, ""))

        if introduction and section == variants_of(root).section:
            for title, others in variant_fields(root, table).items():
                group = parser.add_argument_group(f"[{section}] of {title}")
                for field, doc in others:
                    _add_flag(group, field, doc)
    return parser


def _add_flag(group: Any, field: ConfigField, doc: str) -> None:
    text = doc.replace("%", "%%")
    if field.typed:
        text += f" (default: {field.typed})"

    options: dict[str, Any] = {"help": text}
    if field.base is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif field.choices and not field.optional:
        options["choices"] = field.choices
    elif field.choices:
        options["type"] = field.parse
        options["metavar"] = "{" + ",".join(field.choices) + "}"
    else:
        options["type"] = field.parse
        options["metavar"] = METAVAR[field.base]
    if field.many:
        options["nargs"] = "+"
    group.add_argument(field.flag, **options)


def parse(root: type[Root], argv: Sequence[str], introduction: str) -> Root:
    """Parse a command line: `--config FILE`, overridden by other flags.

    `argv` is without the program's name. Raises UserError; with --help prints `introduction` and
    the help, and exits with status 0.
    """
    # Accept underscores in flags: Megatron-LM has --override-opt_param-scheduler.
    words = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    try:
        variant = _requested_variant(root, words)
    except ConfigError:
        # --help and --version must work on any command line, even an invalid one.
        if not {"-h", "--help", "--version"} & set(words):
            raise
        variant = None

    flags = ["--config", "--help", "--version"]
    flags += [field.flag for field in config_fields(root, variant).values()]
    words, redundant = drop_redundant_flags(words, flags)
    with_help = {"-h", "--help"} & set(words)
    parser = _parser(root, introduction if with_help else None, variant)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(
            unknown_argument(unknown[0], lambda flag: suggestion(root, flag, flags, variant))
        )

    values: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        values[name] = tuple(value) if isinstance(value, list) else value
    path = values.pop("config", None)
    from_file: dict[str, Any] = {}
    if path is not None:
        from_file = with_implied(root, _file_values(root, path, values))
    # The fields that a flag implies override the file too, because a file that a run or an import
    # wrote names every field.
    config = build(root, from_file | with_implied(root, values))

    for entry in redundant:
        if not entry.fits:
            continue  # the flag holds for every configuration
        field = config_fields(config).get(entry.field)
        value = value_of(config, field.name) if field else None
        if value not in entry.fits:
            actual = f"{entry.field} is {value}" if field else f"this program has no {entry.field}"
            raise ConfigError(
                f"{entry.flag} is given, but {actual}; the flag needs {', '.join(entry.fits)}: "
                f"{entry.text}"
            )
    return config


def _requested_variant(root: type, argv: Sequence[str]) -> str | None:
    """Return the variant that the flags or else the TOML file name; None if neither does."""
    variants = variants_of(root)
    if not variants.classes:
        return None

    chooser = _Parser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
    chooser.add_argument(config_fields(root)[variants.name].flag, choices=tuple(variants.classes))
    chooser.add_argument("--config")
    requested = vars(chooser.parse_known_args(argv)[0])
    if variants.name not in requested and "config" in requested:
        return read_toml(root, requested["config"]).get(variants.name)
    return requested.get(variants.name)


def _file_values(root: type, path: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a TOML file's values without those that a flag replaces, and print a note on these.

    A section's REPLACES lists the fields that a flag replaces; its PARTS lists the fields that the
    flag removes if it is given as `none`.
    """
    chooser = variants_of(root).name
    variant = flags.get(chooser)
    values = read_toml(root, path, variant)
    table = config_fields(root, variant or values.get(chooser))

    for name, value in flags.items():
        if value is False:  # --no-mock-data
            continue
        rule = "REPLACES"
        verb = "replaces"
        if value is None:
            rule = "PARTS"
            verb = "none removes"
        section = hints_of(root)[table[name].section]
        others = getattr(section, rule, {}).get(name, ())
        replaced = [other for other in others if values.get(other) and other not in flags]
        if replaced and os.environ.get("RANK", "0") == "0":
            print(
                f"note: {table[name].flag} {verb} {', '.join(replaced)} of {path}", file=sys.stderr
            )
        values = {other: entry for other, entry in values.items() if other not in replaced}
    return values
