"""Convert a turn in ShareGPT's or OpenAI's format to the form that chat templates take."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data.chat.calls import CALL_ROLES, calls_of, spoken_calls
from data.chat.keys import (
    MARKS,
    MASKED,
    THOUGHTS,
    Reads,
    is_unread,
    mark_of,
    refuse_pictures,
    says_nothing,
)
from runtime.errors import DataError

Turn = dict[str, Any]
"""A `role` and a `content` as chat templates take them, and other keys that a template reads."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "user": "user",
    "human": "user",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""Maps roles in ShareGPT's `from` and OpenAI's `role` to the names that templates know."""
_TURN = ("role", "from", "content", "value", "tool_calls", "function_call", *THOUGHTS)
_PART = ("type", "text", "value")
_ALL_MARKS = (*MARKS, MASKED)


@dataclass(frozen=True, kw_only=True)
class ReadTurn:
    """A turn as templates take it, with its loss flag and the keys that nothing reads."""

    turn: Turn
    learned: bool | None
    """The turn's own loss flag: True to train on the turn, False not to, None without a flag."""
    unread: list[str]


def read_turn(where: str, turn: Any, reads: Reads) -> ReadTurn:
    """Convert a turn to the form that templates take; read its loss flag, and list unread keys.

    Args:
        where: the start of error messages, such as "turn 3".
        turn: the turn as in the row.
        reads: the names that the template uses; keys of the turn with these names are kept.

    Raises:
        DataError: the turn is empty, its role is unknown, its content is not text, or content would
            be lost.
    """
    if not isinstance(turn, dict):
        raise DataError(f"{where} must be an object with a role and a content; repair the turn")
    name = _either(where, turn, "role", "from")
    content = _either(where, turn, "content", "value")
    role = _role(where, name, reads)
    calls = calls_of(where, turn)
    if name in CALL_ROLES:
        if calls:
            raise DataError(
                f"{where} has the role {name}, so its text is a function call, but it also has "
                "tool_calls; leave out tool_calls"
            )
        calls = spoken_calls(where, content)
        content = None
    content = _content(where, content, reads)
    if not calls:
        _refuse_empty(where, turn, role, content)

    read: Turn = {"role": role}
    if content is not None:
        read["content"] = content
    if calls:
        read["tool_calls"] = calls
    read |= _thought(where, turn, reads)
    unread = []
    for key, value in turn.items():
        if key in (*_TURN, *_ALL_MARKS) or value is None:
            continue
        refuse_pictures(where, key, value)
        if key in reads.names:
            read[key] = value
        elif is_unread(where, key, value):
            unread.append(key)
    return ReadTurn(turn=read, learned=mark_of(where, turn), unread=unread)


def _refuse_empty(where: str, turn: Turn, role: str, content: Any) -> None:
    """Raise DataError if a turn without calls has no text; a tool's result may be empty."""
    if role not in ("system", "developer", "user", "assistant"):
        return
    if any(text.strip() for _, text in texts_in(content, "content")):
        return
    other_keys = []
    for key, value in turn.items():
        if key not in (*_TURN, *MARKS) and not says_nothing(value):
            other_keys.append(str(key))
    hint = f" (it has {', '.join(other_keys[:8])})" if other_keys else ""
    raise DataError(
        f"{where} ({role}) is empty{hint}; fill its content or leave the conversation out"
    )


def _either(where: str, turn: Mapping[str, Any], name: str, other: str) -> Any:
    """Return the value of one of two synonymous keys. Raises DataError if they differ."""
    values = [turn[key] for key in (name, other) if turn.get(key) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise DataError(f"{where} has {name} and {other}, which differ; leave out one of them")
    return values[0] if values else None


def _role(where: str, role: Any, reads: Reads) -> str:
    """Return a turn's role as the template calls it. Raises DataError for an unknown role."""
    if not isinstance(role, str) or (role not in ROLES and role not in reads.texts):
        raise DataError(f"{where} has the role {role!r:.40}; it must be one of {', '.join(ROLES)}")
    name = ROLES.get(role, role)
    if name == "tool" and role in reads.texts and "tool" not in reads.texts:
        return role  # some templates know this role as observation or ipython
    return name


def _content(where: str, content: Any, reads: Reads) -> Any:
    """Return the content as a string, or as a list of parts if the template supports parts.

    Raises DataError if a part is not text.
    """
    if isinstance(content, list):
        texts = [_text_of_part(where, part) for part in content]
        if not reads.parts:
            return "".join(texts)
        return [{"type": "text", "text": text} for text in texts]
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where} has the content {content!r:.40}; it must be text")
    return content


def _text_of_part(where: str, part: Any) -> str:
    """Return the text of one part of a content.

    Raises DataError if the part is not text, or has another key that must not be lost.
    """
    kind = None
    text = part
    if isinstance(part, dict):
        kind = part.get("type")
        text = part.get("text", part.get("value"))
    if kind not in ("text", "input_text", "output_text", None) or not isinstance(text, str):
        raise DataError(f"{where} has a part that is not text ({kind}); leave the conversation out")
    if not isinstance(part, dict):
        return text

    for key, value in part.items():
        if key in _PART or says_nothing(value):
            continue
        # A flag that says "learned" changes nothing: parts are learned with their turn.
        if key in _ALL_MARKS and mark_of(where, {key: value}) is not False:
            continue
        if key in _ALL_MARKS or is_unread(where, key, value):
            raise DataError(
                f"{where} has a part with {key}, but only the text of parts is read; remove "
                f"{key}, or leave the conversation out"
            )
    return text


def _thought(where: str, turn: Mapping[str, Any], reads: Reads) -> Turn:
    """Return a turn's reasoning under each key that templates read, as transformers does.

    Raises DataError if the reasoning is not text, or if the template does not read it.
    """
    thoughts = {name: turn[name] for name in THOUGHTS if not says_nothing(turn.get(name))}
    for name, thought in thoughts.items():
        if not isinstance(thought, str):
            raise DataError(f"{where} has {name} {thought!r:.40}; reasoning must be text")
        if not reads.thoughts:
            raise DataError(
                f"{where} has {name}, reasoning that the chat template does not use, so it would "
                f"be lost; give a template that writes it, or leave out {name} or the conversation"
            )
    if not thoughts:
        return {}
    first = next(iter(thoughts.values()))
    return {"thinking": first, **thoughts, "reasoning_content": first}


def texts_in(value: Any, field_name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (field, text) for every string in a value, including the keys of inner objects."""
    if isinstance(value, str):
        yield field_name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if field_name:
                yield field_name, str(key)
            yield from texts_in(part, f"{field_name}.{key}" if field_name else str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_in(part, field_name)
