"""Turns of conversations, from ShareGPT's and OpenAI's rows."""

import re
from typing import Any

from runtime.errors import DataError

Turn = dict[str, str]
"""A `role` and a `content`, as chat templates take them."""

ROLES = {
    "system": "system", "developer": "developer", "tool": "tool",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
}  # fmt: skip
"""Roles of ShareGPT's `from` and OpenAI's `role`, by the name that templates know."""
# What a turn or a conversation may have beside its text, and would lose.
_NOT_TAKEN = ("tool_calls", "function_call", "tools", "functions", "reasoning_content", "reasoning", "audio", "images")
_NO_TEXT = re.compile("[\ud800-\udfff]")


def turns_of(row: Any) -> list[Turn]:
    """Return the turns of a row: ShareGPT's `conversations` of from and value, or `messages` of role and content.

    A row is an object, a list of turns, or the DataError of a broken line.

    Raises DataError: no turns, an empty one, an unknown role, or something that a template would not be given.
    """
    if isinstance(row, DataError):
        raise row
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else row
    if not isinstance(turns, list) or not turns:
        raise DataError('has no turns; give them as a list under "messages" or "conversations"')
    if isinstance(row, dict):
        _refuse_extras("it", row)
        turns = [{"role": "system", "content": row["system"]}, *turns] if row.get("system") else turns
    found = [_turn(f"turn {number}", turn) for number, turn in enumerate(turns, start=1)]
    if all(turn["role"] != "assistant" for turn in found):
        raise DataError("no turn is the assistant's, so that nothing carries loss; leave it out")
    return found


def _turn(where: str, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise DataError(f"{where} is no object with a role and a content; repair it")
    _refuse_extras(where, turn)
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where} has the role {role!r:.40}; it must be one of {', '.join(ROLES)}")
    if isinstance(content, list):  # OpenAI's parts
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{where} has a part that is not text; leave the conversation out")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        raise DataError(f"{where} ({role}) is empty; fill it or leave the conversation out")
    if _NO_TEXT.search(content):
        raise DataError(f"{where} holds a lone surrogate, which is no text; remove it")
    return {"role": ROLES[role], "content": content}


def _refuse_extras(where: str, found: dict[str, Any]) -> None:
    for name in _NOT_TAKEN:
        if found.get(name):
            raise DataError(f"{where} has {name}, which would be lost; leave it or the conversation out")
    if found.get("weight", 1) not in (None, 1):
        raise DataError(
            f"{where} has weight {found['weight']!r:.20}, and every assistant's turn counts as 1; remove it"
        )
