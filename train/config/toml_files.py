"""Read and write configurations as TOML files; a section's dataclass defines its keys.

A file is never accepted in part: an unknown or misplaced key is refused with the file, the key and
the fix, since a setting that is silently ignored may cost a training run.
"""

import os
import sys
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from runtime.files import not_a_file
from train.config.fields import (
    ConfigError,
    ConfigField,
    config_fields,
    fields_by_variant,
    hints_of,
    sections_of,
    value_of,
    variants_of,
)
from train.config.suggest import suggestion

Root = TypeVar("Root")
LONGEST_TOML = 1_000_000
MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"


def config_file(run: Path) -> Path:
    """Return the configuration in a run's folder. Raises ConfigError if there is none."""
    path = run / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run} has no config.toml; name the folder that a run saved to")
    return path


def build(root: type[Root], values: dict[str, Any]) -> Root:
    """Build a `root` from `values`, keyed by field name, with defaults for the rest.

    Raises UserError for a value out of range.
    """
    variant = values.get(variants_of(root).name)
    table = config_fields(root, variant)
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(table[name].section, {})[name] = value

    sections = {}
    for section, cls in sections_of(root, variant).items():
        sections[section] = cls(**by_section.get(section, {}))
    return root(**sections)


def with_implied(root: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, and those that they imply according to their sections' IMPLIES tables."""
    implied: dict[str, Any] = {}
    for section in hints_of(root).values():
        for name, others in getattr(section, "IMPLIES", {}).items():
            if values.get(name) is True:
                implied |= dict.fromkeys(others, True)
    return implied | values


def load(root: type[Root], path: str | Path) -> Root:
    """Read a configuration from a TOML file; fields that it does not set have their defaults.

    Raises UserError naming the key or field.
    """
    return build(root, with_implied(root, read_toml(root, path)))


def model_file(name: str | Path) -> Path:
    """Return the TOML file that --config names: a path, or a model such as llama3_8b.

    Models are those of configs/models.

    Raises ConfigError listing the models, the most similar first, if a name without a folder is
    none of them.
    """
    path = Path(name)
    # In earlier versions the models were in configs/ itself.
    moved = path.parent.resolve() == MODELS.parent
    # A folder with a model's name is a download or a run, not a TOML file.
    is_file = path.exists() and not path.is_dir()
    if is_file or not (moved or path.parent == Path()):
        return path

    models = {file.stem: file for file in sorted(MODELS.glob("*.toml"))}
    model = path.name.lower().removesuffix(".toml").replace("-", "_")
    if model not in models:
        if path.suffix == ".toml":
            return path
        similar = get_close_matches(model, models)
        names = ", ".join(dict.fromkeys([*similar, *models]))
        raise ConfigError(f"there is no model {name}; name one of {names}, or give --config FILE")

    file = Path(os.path.relpath(models[model]))
    if moved:
        _note_moved(path, file)
    return file


@cache  # once per process, however often it reads the file
def _note_moved(path: Path, file: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {path} has moved to {file}; the new file is read", file=sys.stderr)


def read_toml(root: type, path: str | Path, variant: str | None = None) -> dict[str, Any]:
    """Read a TOML file's values, keyed by field name.

    The fields are those of the ``variant``, by default the one that the file names. A key of
    another variant is ignored if earlier versions wrote it for all variants and its value is the
    default.

    Raises ConfigError naming the file, the key and the fix.
    """
    path = model_file(path)
    tree = _parse_toml(path)
    variant = variant or _variant_in(root, tree)
    table = config_fields(root, variant)
    sections = list(hints_of(root))

    values = {}
    for section, content in tree.items():
        is_section = isinstance(content, dict)
        if section in table and not is_section:  # a key and a section are both named optimizer
            raise ConfigError(
                f"{path}: {section} is outside of a section; move it to [{table[section].section}]"
            )
        if section not in sections or not is_section:
            fix = suggestion(root, section, sections, variant)
            raise ConfigError(f"{path}: unknown section [{section}]; {fix}")

        for name, value in content.items():
            if name not in table:
                if _is_passed_over(root, section, name, value):
                    continue
                fix = suggestion(root, name, table, variant, section)
                raise ConfigError(f"{path}: unknown key {name} in [{section}]; {fix}")
            if table[name].section != section:
                raise ConfigError(
                    f"{path}: {name} is in the section [{section}]; "
                    f"move it to [{table[name].section}]"
                )
            try:
                values[name] = table[name].convert(value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
    return values


def _parse_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError naming the file and the fix."""
    try:
        kind = not_a_file(path)
        if kind not in ("", "a symbolic link"):  # a link may lead to a file
            raise ConfigError(f"{path}: this is {kind}; name an existing TOML file")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST_TOML + 1)
        if len(text) > LONGEST_TOML:
            raise ConfigError(
                f"{path}: more than {LONGEST_TOML:,} characters are too many for a configuration; "
                "name a TOML file"
            )
        return tomllib.loads(text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name an existing TOML file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; correct it") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: nested too deeply; a configuration has only sections with keys"
        ) from error


def _is_passed_over(root: type, section: str, name: str, value: Any) -> bool:
    """Return True if an earlier version wrote this key for every variant, with its default."""
    if name not in variants_of(root).passed_over:
        return False
    for table in fields_by_variant(root).values():
        field = table.get(name)
        if field and field.section == section and _is_default(field, value):
            return True
    return False


def _is_default(field: ConfigField, value: Any) -> bool:
    try:
        return bool(field.convert(value) == field.default)
    except ConfigError:
        return False


def _variant_in(root: type, tree: Mapping[str, Any]) -> str | None:
    """Return the variant that a TOML file names; None if it names none or an unknown one."""
    variants = variants_of(root)
    content = tree.get(variants.section)
    if not isinstance(content, dict):
        return None
    name = content.get(variants.name)
    return name if isinstance(name, str) and name in variants.classes else None


def write_toml(config: object) -> str:
    """Write `config` as TOML, without None fields; reading it back gives an equal config."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in sections_of(config)}
    for name, field in config_fields(config).items():
        value = value_of(config, name)
        if value is not None:
            tree[field.section][name] = list(value) if field.many else value

    import tomli_w  # imported here: benches and tests that write no configuration run without it

    return tomli_w.dumps(tree)
