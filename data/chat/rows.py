"""Turns of conversations, from ShareGPT's and OpenAI's rows, with what else a chat template is
given of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.chat.calls import CALL_ROLES, calls_of, parsed, spoken_calls, tools_of, with_calls_joined
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
"""A `role` and a `content`, as chat templates take them, and what else the template reads of a
turn.
"""

ROLES = {
    "system": "system", "developer": "developer", "tool": "tool",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "ai": "assistant",
    "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""Roles of ShareGPT's `from` and OpenAI's `role`, by the name that templates know."""
_SYSTEM = ("system", "system_prompt", "system_message")
_ROW = ("messages", "conversations", "tools", "functions", "chat_template_kwargs", *_SYSTEM)
_TURN = ("role", "from", "content", "value", "tool_calls", "function_call", *THOUGHTS)
_PART = ("type", "text", "value")
_ARGUMENTS = """
    messages conversation add_generation_prompt continue_final_message chat_template tokenize padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs sanitize_control_tokens
"""
_NOT_VARIABLES = frozenset(_ARGUMENTS.split())
"""Arguments of transformers' apply_chat_template that are no variables of a template."""
_NO_TEXT = re.compile("[\ud800-\udfff]")
_DEEPEST = 64


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns, which of them are learned, and the variables that the template is given beside them."""

    turns: Sequence[Turn]
    learned: Sequence[bool]
    """Which turns are learned: the assistant's, but for those that are marked as not to be."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Tools, documents, and others that the template names."""
    unread: Sequence[str] = ()
    """Keys of the row and its turns that nothing reads, each once."""

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """Yield the turn, the field and the text of all that the template is given."""
        for number, turn in enumerate(self.turns, start=1):
            spoken = {key: value for key, value in turn.items() if key != "role"}
            for field_name, text in _texts(spoken):
                yield f"turn {number}", field_name, text
        for field_name, text in _texts(self.variables):
            yield "the conversation", field_name, text


def said(turns: Sequence[Turn]) -> Conversation:
    """Return turns as a conversation of which every turn of the assistant's is learned."""
    return Conversation(turns=turns, learned=[turn["role"] == "assistant" for turn in turns])


def conversation_of(row: Any, reads: Reads = Reads()) -> Conversation:  # noqa: B008, it is frozen
    """Return the conversation of a row: ShareGPT's `conversations` of from and value, or OpenAI's
    `messages`.

    A row is an object, a list of turns, or the DataError of a broken line.

    Args:
        reads: the names that the template uses. What they name of the row and of each turn is
            passed on to it.

    Raises:
        DataError: no turns, an empty one, an unknown role, nothing to learn, or something that
            would be lost.
    """
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        row = {"messages": row}
    turns = with_calls_joined(_listed_turns(row))
    left = [key for key, value in row.items() if _is_left(row, key, value, reads, turns)]
    variables, unnamed = _variables(row, reads)
    unread = dict.fromkeys(f"the row's {key}" for key in (*left, *unnamed))
    read = []
    for number, turn in enumerate(turns, start=1):
        read.append(_turn(f"turn {number}", turn, reads))
        unread |= dict.fromkeys(f"a turn's {key}" for key in read[-1].unread)
    turns = [one.turn for one in read]
    _check_values(turns, variables)
    learned = _learned(mark_of("it", row), read)
    return Conversation(turns=turns, learned=learned, variables=variables, unread=list(unread))


def _listed_turns(row: Mapping[str, Any]) -> list[Any]:
    """Return a row's turns as they stand there, a system text beside them first. Raises DataError."""
    lists = {
        name: row[name] for name in ("messages", "conversations") if not says_nothing(row.get(name))
    }
    if len(lists) == 2 and lists["messages"] != lists["conversations"]:
        raise DataError(
            "has messages and conversations, which are two conversations; leave one out"
        )
    key, turns = next(iter(lists.items()), ("", None))
    if isinstance(turns, str):
        raise DataError(
            f"has {key} as a text; give the turns as a list, a text of JSON as json.loads reads it"
        )
    if not isinstance(turns, list):
        raise DataError(_without_turns(row))
    systems = {name: row[name] for name in _SYSTEM if not says_nothing(row.get(name))}
    if len(systems) > 1:
        raise DataError(f"has {' and '.join(systems)}, which say the same; leave one out")
    for name, text in systems.items():
        first = turns[0] if isinstance(turns[0], dict) else {}
        if first.get("role", first.get("from")) != "system":
            turns = [{"role": "system", "content": text}, *turns]
        elif text not in (first.get("content"), first.get("value")):
            raise DataError(
                f"has {name} and a turn of the system that says something else; leave one out"
            )
    return turns


def _without_turns(row: Mapping[str, Any]) -> str:
    """Say what to do with a row of another kind."""
    given = {key for key, value in row.items() if not says_nothing(value)}
    kind = 'give them as a list under "messages" or "conversations"'
    if given & {"chosen", "rejected"}:
        kind = 'it is a pair of preferences: write "chosen", as turns, under "messages" and leave "rejected" out'
    elif {"prompt", "completion"} <= given:
        kind = 'it is a prompt and its completion: join both as turns under "messages", earlier answers "train": false'
    elif isinstance(row.get("prompt"), list):
        kind = 'its prompt is a list of turns: write them and the answer under "messages"'
    elif given & {"instruction", "output", "response", "answer"}:
        kind = 'it is an instruction and its answer: write both as turns of user and assistant under "messages"'
    elif given & {"text", "content"}:
        kind = "it is text: prepare it without --chat"
    names = f" (it has {', '.join(sorted(map(str, given))[:8])})" if given else ""
    return f"has no turns{names}; {kind}"


def _is_left(
    row: Mapping[str, Any], key: str, value: Any, reads: Reads, turns: Sequence[Any]
) -> bool:
    """Return whether a key of a row is one to tell of. Raises DataError if it must not be left."""
    refuse_pictures("it", key, value)
    if key in _ROW and (key not in ("tools", "functions") or "tools" in reads.variables):
        return False
    if key in (*MARKS, MASKED) or (key in reads.variables and key not in _NOT_VARIABLES):
        return False
    if key == "tools" and isinstance(value, str) and value.strip() == "[]":
        return False
    contents = (turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict))
    if key == "prompt" and isinstance(value, str) and value in contents:
        return False  # the first question once more
    return is_unread("it", key, value)


def _variables(row: Mapping[str, Any], reads: Reads) -> tuple[dict[str, Any], list[str]]:
    """Return what a template is given beside the turns, as transformers and TRL give it, and what
    it does not name.

    Raises DataError: a variable of another type, one that is given twice, or one that would be lost
    with harm.
    """
    given = row.get("chat_template_kwargs")
    if isinstance(given, str) and given.strip():
        given = parsed("it has chat_template_kwargs", given)
    if not says_nothing(given) and not isinstance(given, dict):
        raise DataError(
            f"it has chat_template_kwargs {given!r:.40}; they must be an object of variables"
        )
    variables: dict[str, Any] = {}
    unnamed: list[str] = []
    for name, value in row.items():
        if name in reads.variables and name not in (*_ROW, *_NOT_VARIABLES) and value is not None:
            variables[name] = value
    if "tools" in reads.variables and (tools := tools_of(row)) is not None:
        variables["tools"] = tools
    for name, value in (given or {}).items():
        if name in _NOT_VARIABLES:
            raise DataError(
                f"it has chat_template_kwargs with {name}, which is no variable of a template; remove it"
            )
        if name in variables and variables[name] != value:
            raise DataError(f"it has {name} and another one in chat_template_kwargs; leave one out")
        if name not in reads.variables and not says_nothing(value):
            is_unread("its chat_template_kwargs", name, value)  # which refuses tools and documents
            unnamed.append(f"chat_template_kwargs {name}")
        variables[name] = tools_of({"tools": value}) if name == "tools" else value
    documents = variables.get("documents")
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
    ):
        raise DataError(f"it has documents {documents!r:.40}; they must be a list of objects")
    return variables, unnamed


@dataclass(frozen=True, kw_only=True)
class _Read:
    turn: Turn
    mark: bool | None
    unread: Sequence[str]


def _turn(where: str, turn: Any, reads: Reads) -> _Read:
    """Return one turn as templates take it. Raises DataError."""
    if not isinstance(turn, dict):
        raise DataError(f"{where} is no object with a role and a content; repair it")
    name, content = _either(where, turn, "role", "from"), _either(where, turn, "content", "value")
    role = _role(where, name, reads)
    calls = calls_of(where, turn)
    if name in CALL_ROLES:
        if calls:
            raise DataError(f"{where} has the role {name} and tool_calls; write its calls once")
        calls, content = spoken_calls(where, content), None
    content = _content(where, content, reads)
    empty = not any(text.strip() for _, text in _texts(content, "content"))
    if empty and not calls and role in ("system", "developer", "user", "assistant"):
        others = [
            str(key)
            for key, value in turn.items()
            if key not in (*_TURN, *MARKS) and not says_nothing(value)
        ]
        beside = f" (it has {', '.join(others[:8])})" if others else ""
        raise DataError(
            f"{where} ({role}) is empty{beside}; fill its content or leave the conversation out"
        )
    read: Turn = {"role": role}
    if content is not None:
        read["content"] = content
    if calls:
        read["tool_calls"] = calls
    read |= _thought(where, turn, reads)
    unread = []
    for key, value in turn.items():
        if key in (*_TURN, *MARKS, MASKED) or value is None:
            continue
        refuse_pictures(where, key, value)
        if key in reads.names:
            read[key] = value
        elif is_unread(where, key, value):
            unread.append(key)
    return _Read(turn=read, mark=mark_of(where, turn), unread=unread)


def _either(where: str, turn: Mapping[str, Any], name: str, other: str) -> Any:
    """Return one of two keys that mean the same. Raises DataError if they differ."""
    values = [turn[key] for key in (name, other) if turn.get(key) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise DataError(f"{where} has {name} and {other}, which differ; leave one out")
    return values[0] if values else None


def _role(where: str, role: Any, reads: Reads) -> str:
    """Return the role by the name that the template knows. Raises DataError."""
    if not isinstance(role, str) or (role not in ROLES and role not in reads.texts):
        raise DataError(f"{where} has the role {role!r:.40}; it must be one of {', '.join(ROLES)}")
    name = ROLES.get(role, role)
    if name == "tool" and role in reads.texts and "tool" not in reads.texts:
        return role  # as of templates that know an observation, or ipython
    return name


def _content(where: str, content: Any, reads: Reads) -> Any:
    """Return a text, or its parts if the template reads these. Raises DataError: a part that is not
    text.
    """
    if isinstance(content, list):
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("text", part.get("value")) if isinstance(part, dict) else part
            if kind not in ("text", "input_text", "output_text", None) or not isinstance(text, str):
                raise DataError(
                    f"{where} has a part that is not text ({kind}); leave the conversation out"
                )
            if isinstance(part, dict):
                _refuse_unread_of_part(where, part)
            parts.append({"type": "text", "text": text})
        content = parts if reads.parts else "".join(part["text"] for part in parts)
    if content is not None and not isinstance(content, (str, list)):
        raise DataError(f"{where} has the content {content!r:.40}; it must be text")
    return content


def _refuse_unread_of_part(where: str, part: Mapping[str, Any]) -> None:
    """Raise DataError for keys of a part of a content beside its text, but for those that say
    nothing.
    """
    for key, value in part.items():
        if key in _PART or says_nothing(value):
            continue
        if key in (*MARKS, MASKED) and mark_of(where, {key: value}) is not False:
            continue
        if key in (*MARKS, MASKED) or is_unread(where, key, value):
            raise DataError(
                f"{where} has a part with {key}, and of parts the text alone is read; remove it, or leave the "
                "conversation out"
            )


def _thought(where: str, turn: Mapping[str, Any], reads: Reads) -> Turn:
    """Return a turn's thought under all names that templates read, as transformers gives it. Raises
    DataError.
    """
    thoughts = {name: turn[name] for name in THOUGHTS if not says_nothing(turn.get(name))}
    for name, thought in thoughts.items():
        if not isinstance(thought, str):
            raise DataError(f"{where} has {name} {thought!r:.40}; a thought must be text")
        if not reads.thoughts:
            raise DataError(
                f"{where} has {name}, a thought that the chat template does not name, so that it would be lost; give a "
                "template that writes it, or leave it or the conversation out"
            )
    if not thoughts:
        return {}
    first = next(iter(thoughts.values()))
    return {"thinking": first, **thoughts, "reasoning_content": first}


def _learned(mark: bool | None, read: Sequence[_Read]) -> list[bool]:
    """Return which turns are learned, by the mark of the row and those of the turns. Raises
    DataError.
    """
    learned = []
    for number, part in enumerate(read, start=1):
        ours = part.turn["role"] == "assistant"
        if part.mark and not ours:
            raise DataError(
                f"turn {number} ({part.turn['role']}) is marked as learned, and only the assistant's turns are; remove "
                "the mark"
            )
        if part.mark and mark is False:
            raise DataError(
                f"turn {number} is marked as learned and its row as not; leave one of the marks out"
            )
        wanted = mark is not False if part.mark is None else part.mark
        learned.append(ours and wanted)
    if all(part.turn["role"] != "assistant" for part in read):
        raise DataError("no turn is the assistant's, so that nothing carries loss; leave it out")
    if not any(learned):
        raise DataError(
            "every turn of the assistant is marked as not learned, so that nothing carries loss"
        )
    return learned


def _check_values(turns: Sequence[Turn], variables: Mapping[str, Any]) -> None:
    """Raise DataError for values that are nested too deeply, or hold what is no text."""
    values: list[tuple[str, Any, int]] = [("it", variables, 0)]
    values += [(f"turn {number}", turn, 0) for number, turn in enumerate(turns, start=1)]
    while values:
        where, value, depth = values.pop()
        if depth > _DEEPEST:
            raise DataError(f"{where} is nested more than {_DEEPEST} levels deep; repair it")
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise DataError(f"{where} holds a lone surrogate, which is no text; remove it")
        if isinstance(value, dict):
            values += [(where, part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple)):
            values += [(where, part, depth + 1) for part in value]


def _texts(value: Any, field_name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the field and the text of all that a value holds, the keys of inner objects too."""
    if isinstance(value, str):
        yield field_name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if field_name:
                yield field_name, str(key)
            yield from _texts(part, f"{field_name}.{key}" if field_name else str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, field_name)
