"""Convert a row's tools and tool calls to the form that chat templates take.

This is OpenAI's form: `tools` are objects with a `function`, and a turn's `tool_calls` have a
`function` with a name and arguments. The arguments may be an object or its JSON and are passed on
unchanged, since templates write the two differently. Older and other forms are converted.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.chat.keys import mark_of, says_nothing
from runtime.errors import DataError

Call = dict[str, Any]
CALL_ROLES = ("function_call", "tool_call")
"""Roles of turns whose text is the JSON of function calls."""


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return a row's tools as a list of objects; None if it has no tools.

    They come from `tools` or from OpenAI's older `functions`, as a list or as its JSON.

    Raises DataError if both keys are given, the value is neither a list nor the JSON of one, or a
    tool is not an object.
    """
    tools = _listed("tools", row.get("tools"))
    functions = _listed("functions", row.get("functions"))
    if tools and functions:
        raise DataError("it has tools and functions, which mean the same; leave one out")
    if functions:
        tools = [{"type": "function", "function": function} for function in functions]
    return tools


def _listed(name: str, value: Any) -> list[Any] | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = parsed(f"it has {name}", value)
        if value is None:
            return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"its {name} are {value!r:.40}; they must be a list of objects, or the JSON of such a "
            "list"
        )
    return value


def calls_of(where: str, turn: Mapping[str, Any]) -> list[Call]:
    """Return a turn's function calls, from `tool_calls` or from OpenAI's older `function_call`.

    Raises DataError if both keys are given, a call has no name, or its arguments are neither an
    object nor its JSON.
    """
    calls = turn.get("tool_calls")
    older = turn.get("function_call")
    if isinstance(calls, str) and calls.strip():
        calls = parsed(f"{where} has tool_calls", calls)
    if not says_nothing(calls) and not says_nothing(older):
        raise DataError(
            f"{where} has tool_calls and function_call, which mean the same; leave one out"
        )
    if not says_nothing(older):
        return _called(where, older)
    if says_nothing(calls):
        return []
    if not isinstance(calls, list):
        raise DataError(f"{where} has tool_calls {calls!r:.40}; they must be a list of calls")
    for call in calls:
        _check(where, call)
    return calls


def holds_null(value: Any) -> bool:
    """Return whether a value contains a null, which columnar files write for missing keys."""
    if isinstance(value, dict):
        return any(map(holds_null, value.values()))
    return value is None or (isinstance(value, (list, tuple)) and any(map(holds_null, value)))


def with_calls_joined(turns: Sequence[Any]) -> list[Any]:
    """Join consecutive function calls of ShareGPT's roles into one turn, as ms-swift reads them.

    Raises DataError if the turns have different loss flags.
    """
    joined: list[Any] = []
    for number, turn in enumerate(turns, start=1):
        if not joined or not _is_call(turn) or not _is_call(joined[-1]):
            joined.append(turn)
            continue
        previous = joined[-1]
        where = f"turn {number}"
        previous_where = f"turn {number - 1}"
        if mark_of(where, turn) != mark_of(previous_where, previous):
            raise DataError(
                f"{where} is a function call right after another one, but the two have different "
                "loss flags; give both the same flag"
            )
        calls = spoken_calls(previous_where, _content(previous))
        calls += spoken_calls(where, _content(turn))
        joined[-1] = {**turn, **previous, "content": calls, "value": calls}
    return joined


def _is_call(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role", turn.get("from")) in CALL_ROLES


def _content(turn: Mapping[str, Any]) -> Any:
    return turn.get("content", turn.get("value"))


def spoken_calls(where: str, content: Any) -> list[Call]:
    """Return the calls of a turn that has ShareGPT's role function_call or tool_call.

    The turn's text is the JSON of one call, or of a list of calls.
    """
    if isinstance(content, str):
        content = parsed(f"{where} is a function call with the text", content)
    return _called(where, content)


def _called(where: str, calls: Any) -> list[Call]:
    """Convert bare calls, each a name and its arguments, to the form that templates take."""
    if isinstance(calls, str):
        calls = parsed(f"{where} has function_call", calls)
    if not isinstance(calls, list):
        calls = [calls]
    called: list[Call] = []
    for call in calls:
        _check(where, call)
        function = dict(call.get("function", call))
        function.setdefault("arguments", function.pop("parameters", {}))
        if isinstance(function["arguments"], str):
            function["arguments"] = parsed(
                f"{where} calls {function['name']} with the text", function["arguments"]
            )
        called.append({"type": "function", "function": function})
    return called


def _check(where: str, call: Any) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise DataError(
            f"{where} has tool_calls with {call!r:.60}, but the call has no function name; add it"
        )
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (dict, str)):
        raise DataError(
            f"{where} calls {function['name']} with arguments {arguments!r:.40}; they must be an "
            "object, or the JSON of one"
        )


def parsed(subject: str, text: str) -> Any:
    """Parse a JSON text. An invalid one raises a DataError that begins with ``subject``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{subject} {text!r:.60}, which is not JSON ({error}); repair the JSON"
        ) from error
