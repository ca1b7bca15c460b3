"""Read JSON files from untrusted folders with type checks; errors name the refused entry."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import UserError

CONFIG = "config.json"
_MAX_INT = 2**31 - 1
_KINDS = {
    int: f"a whole number of at most {_MAX_INT}",
    float: "a finite number",
    bool: "true or false",
    list: "a list of whole numbers",
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises UserError, which names the file and the problem."""
    if path.exists() and not path.is_file():  # a named pipe would block
        raise UserError(f"{path} is not a file; download it again")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face model") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(contents, dict):
        raise UserError(f"{path} does not contain a JSON object; download it again")
    return contents


def write_json(path: Path, contents: Mapping[str, Any], *, ensure_ascii: bool = True) -> None:
    """Write a JSON object with the indentation that transformers uses."""
    text = json.dumps(contents, indent=2, ensure_ascii=ensure_ascii)
    path.write_text(text + "\n", encoding="utf-8")


@contextmanager
def naming(path: Path, missing: str = "") -> Iterator[None]:
    """Add the file's path to errors about its entries.

    Args:
        missing: end of the message about a missing entry, such as "this is not a configuration of
            llama".
    """
    try:
        yield
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; {missing}") from None
    except ValueError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{CONFIG}: ')}") from None


def entry(contents: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """Return an entry of config.json of type int, float, bool or list (of int).

    Args:
        default: at most one value, returned if the key is missing; None also allows null.

    Raises:
        KeyError: the key is missing, and there is no default.
        UserError: the entry has another type, is not finite, or is an integer beyond 32 bits,
            which no tensor size needs.
    """
    if key not in contents and default:
        return default[0]
    value = contents[key]
    if value is None and default == (None,):
        return None
    if not _is(value, kind):
        raise UserError(f"{CONFIG}: {key} is {shown(value)}; it must be {_KINDS[kind]}")
    return float(value) if kind is float else value


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(_is(number, int) for number in value)
    if kind is bool or isinstance(value, bool):  # bool is a subclass of int
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) < 1e300 and math.isfinite(value)
    return isinstance(value, int) and abs(value) <= _MAX_INT


def shown(value: Any) -> str:
    """Format a value as JSON, cut to fit into a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unsupported(key: str, value: Any, rest: str, file: str | Path = CONFIG) -> UserError:
    """Return the error for an entry with an unsupported value; ``rest`` ends the message."""
    return UserError(f"{file}: {key} = {shown(value)} is not supported{rest}")


def check_value(
    file: str | Path, key: str, value: Any, supported: Sequence[Any], fix: str = ""
) -> None:
    """Raise UserError unless an entry equals a supported value, in type too."""
    for candidate in supported:
        if type(candidate) is type(value) and candidate == value:
            return
    raise unsupported(key, value, f"; only {' or '.join(map(shown, supported))} is{fix}", file)
