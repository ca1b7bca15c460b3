"""Keep figures in the tree as JSON lines: one line for what they share, then one per row.

A result is a dictionary. Its values that are lists of rows, or rows by name, become a line per row, with the value's
name under "of" and the row's under "key"; all other values go on the first line.
"""

import json
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import write_text

DIGITS = 12
"""Significant digits of a float: more than any figure quotes, and enough for four digits of differences of losses."""


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the lines of a result's file. Raises UserError: a row has a field named "of" or "key"."""
    result = _short(result)
    first, rows = {}, []
    for name, value in result.items():
        if not (table := _rows(value)):
            first[name] = value
        for key, row in table:
            if clash := row.keys() & {"of", "key"}:
                raise UserError(f"a row of {name} has a field {min(clash)!r}, which the file needs; rename it")
            rows.append({"of": name, **({} if key is None else {"key": key}), **row})
    return [json.dumps(line) for line in (first, *rows)]


def write_records(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all, and make its folder."""
    write_text(path, "\n".join(lines_of(result)) + "\n")


def read_records(path: Path) -> dict[str, Any]:
    """Read the result that ``write_records`` wrote; digits of floats and the order of fields may differ.

    Raises OSError: the file cannot be read; UserError: a line is not JSON, or not an object.
    """
    result: dict[str, Any] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(line, dict) or (number > 1 and "of" not in line):
            raise UserError(f"{path}:{number} is no row of a result: {text[:60]}")
        if number == 1:
            result |= line
        elif "key" in line:
            result.setdefault(line.pop("of"), {})[line.pop("key")] = line
        else:
            result.setdefault(line.pop("of"), []).append(line)
    return result


def _rows(value: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """Return a table's rows with their keys, None in a list; an empty list if ``value`` is no table."""
    found = list(value.items()) if isinstance(value, dict) else []
    found = [(None, row) for row in value] if isinstance(value, list) else found
    return found if all(isinstance(row, dict) for _, row in found) else []


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
