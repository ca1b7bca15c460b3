"""Figures that stay in the tree, as JSON lines: what holds for all of them first, then a line for each row.

A result is a dictionary. Those of its values that are lists of rows, or rows by name, become lines of their own, with
the value's name under "of" and the row's under "key"; all others stand on the first line.
"""

import json
from pathlib import Path
from typing import Any

from runtime.files import write_text

DIGITS = 12
"""Significant digits of a float; no figure is quoted with as many, and differences of losses keep four of theirs."""


def lines_of(result: dict[str, Any]) -> list[str]:
    """The lines of a result's file.

    Raises:
        ValueError: a row has a field named "of" or "key".
    """
    result = _short(result)
    first, rows = {}, []
    for name, value in result.items():
        if not (table := _rows(value)):
            first[name] = value
        for key, row in table:
            if clash := row.keys() & {"of", "key"}:
                raise ValueError(f"a row of {name} has a field {min(clash)!r}, which the file needs; rename it")
            rows.append({"of": name, **({} if key is None else {"key": key}), **row})
    return [json.dumps(line) for line in (first, *rows)]


def write_records(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all; its folder is made."""
    write_text(path, "\n".join(lines_of(result)) + "\n")


def read_records(path: Path) -> dict[str, Any]:
    """A result as ``write_records`` took it, but for digits of floats and the order of its fields.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not JSON, or no object.
    """
    result: dict[str, Any] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(line, dict) or (number > 1 and "of" not in line):
            raise ValueError(f"{path}:{number} is no row of a result: {text[:60]}")
        if number == 1:
            result |= line
        elif "key" in line:
            result.setdefault(line.pop("of"), {})[line.pop("key")] = line
        else:
            result.setdefault(line.pop("of"), []).append(line)
    return result


def _rows(value: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """A table's rows, each with its key where it has one; of what is no table, none."""
    found = list(value.items()) if isinstance(value, dict) else []
    found = [(None, row) for row in value] if isinstance(value, list) else found
    return found if all(isinstance(row, dict) for _, row in found) else []


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
