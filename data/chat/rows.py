"""Read conversations from rows in ShareGPT's or OpenAI's format.

Only the assistant's turns are learned (carry loss); a loss flag of a row or a turn can remove loss
but not add it to another role. A conversation without any loss is refused: it would take up space
in the samples and teach nothing, and that is more often an error in the data than intended.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.chat.calls import parsed, tools_of, with_calls_joined
from data.chat.keys import (
    MARKS,
    MASKED,
    Reads,
    is_unread,
    mark_of,
    refuse_pictures,
    says_nothing,
)
from data.chat.turns import ReadTurn, Turn, read_turn, texts_in
from runtime.errors import DataError

_SYSTEM = ("system", "system_prompt", "system_message")
_ROW = ("messages", "conversations", "tools", "functions", "chat_template_kwargs", *_SYSTEM)
_ARGUMENTS = """
    messages conversation add_generation_prompt continue_final_message chat_template tokenize
    padding truncation max_length return_tensors return_dict return_assistant_tokens_mask
    tokenizer_kwargs sanitize_control_tokens
"""
_NOT_VARIABLES = frozenset(_ARGUMENTS.split())
"""Arguments of transformers' apply_chat_template that are not template variables."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation: its turns, which of them are learned, and other template variables."""

    turns: Sequence[Turn]
    learned: Sequence[bool]
    """True for each turn of the assistant, except those marked as not learned."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Tools, documents and other variables that the template names."""
    unread: Sequence[str] = ()
    """Keys of the row and its turns that neither the template nor this module reads, each once."""

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """Yield (turn, field, text) for every text that is passed to the template."""
        for number, turn in enumerate(self.turns, start=1):
            content = {key: value for key, value in turn.items() if key != "role"}
            for field_name, text in texts_in(content):
                yield f"turn {number}", field_name, text
        for field_name, text in texts_in(self.variables):
            yield "the conversation", field_name, text


def conversation_of_turns(turns: Sequence[Turn]) -> Conversation:
    """Return turns as a conversation in which every turn of the assistant is learned."""
    return Conversation(turns=turns, learned=[turn["role"] == "assistant" for turn in turns])


def conversation_of(row: Any, reads: Reads = Reads()) -> Conversation:  # noqa: B008, it is frozen
    """Return the conversation in a row.

    A row is one of three: an object with ShareGPT's `conversations` (from, value) or OpenAI's
    `messages`; a list of turns; or the DataError of a broken line, which is then raised.

    Args:
        row: the row.
        reads: the names that the template uses; keys of the row and its turns with these names are
            passed on to the template.

    Raises:
        DataError: there are no turns, a turn is empty, a role is unknown, no turn is learned, or
            content would be lost.
    """
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        row = {"messages": row}
    listed_turns = with_calls_joined(_listed_turns(row))
    unread: dict[str, None] = {}
    for key, value in row.items():
        if _is_unread_key(row, key, value, reads, listed_turns):
            unread[f"the row's {key}"] = None
    variables, unnamed = _variables(row, reads)
    unread |= dict.fromkeys(f"the row's {name}" for name in unnamed)

    read_turns = []
    for number, turn in enumerate(listed_turns, start=1):
        read = read_turn(f"turn {number}", turn, reads)
        read_turns.append(read)
        unread |= dict.fromkeys(f"a turn's {key}" for key in read.unread)
    turns = [read.turn for read in read_turns]
    _check_values(turns, variables)
    learned = _learned(mark_of("it", row), read_turns)
    return Conversation(turns=turns, learned=learned, variables=variables, unread=list(unread))


def _listed_turns(row: Mapping[str, Any]) -> list[Any]:
    """Return a row's turns, preceded by the row's system text. Raises DataError without turns."""
    lists = _filled(row, ("messages", "conversations"))
    if len(lists) == 2 and lists["messages"] != lists["conversations"]:
        raise DataError(
            "has messages and conversations with different turns; remove one of these keys"
        )
    key, turns = next(iter(lists.items()), ("", None))
    if isinstance(turns, str):
        raise DataError(
            f"has {key} as a string; give the turns as a list (parse a JSON string first)"
        )
    if not isinstance(turns, list):
        raise DataError(_without_turns(row))

    systems = _filled(row, _SYSTEM)
    if len(systems) > 1:
        raise DataError(f"has {' and '.join(systems)}, which mean the same; leave one out")
    for name, text in systems.items():
        first = turns[0] if isinstance(turns[0], dict) else {}
        if first.get("role", first.get("from")) != "system":
            turns = [{"role": "system", "content": text}, *turns]
        elif text not in (first.get("content"), first.get("value")):
            raise DataError(
                f"has {name} and also a system turn with a different text; remove one of them"
            )
    return turns


def _filled(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of these keys that are neither null nor empty."""
    return {name: row[name] for name in names if not says_nothing(row.get(name))}


def _without_turns(row: Mapping[str, Any]) -> str:
    """Return the error message for a row without turns, with advice on how to convert it."""
    keys = {key for key, value in row.items() if not says_nothing(value)}
    advice = 'give them as a list under "messages" or "conversations"'
    if keys & {"chosen", "rejected"}:
        advice = (
            'it is a preference pair: write "chosen", as turns, under "messages" and leave '
            '"rejected" out'
        )
    elif {"prompt", "completion"} <= keys:
        advice = (
            'it is a prompt and its completion: join both as turns under "messages", '
            'and mark earlier answers with "train": false'
        )
    elif isinstance(row.get("prompt"), list):
        advice = 'its prompt is a list of turns: write them and the answer under "messages"'
    elif keys & {"instruction", "output", "response", "answer"}:
        advice = (
            "it is an instruction and its answer: write both as turns of user and assistant "
            'under "messages"'
        )
    elif keys & {"text", "content"}:
        advice = "it is text: prepare it without --chat"
    names = f" (it has {', '.join(sorted(map(str, keys))[:8])})" if keys else ""
    return f"has no turns{names}; {advice}"


def _is_unread_key(
    row: Mapping[str, Any], key: str, value: Any, reads: Reads, turns: Sequence[Any]
) -> bool:
    """Return whether to report a key of a row as unread. Raises DataError like `is_unread`."""
    refuse_pictures("it", key, value)
    if key in _ROW and (key not in ("tools", "functions") or "tools" in reads.variables):
        return False
    if key in (*MARKS, MASKED) or (key in reads.variables and key not in _NOT_VARIABLES):
        return False
    if key == "tools" and isinstance(value, str) and value.strip() == "[]":
        return False
    if key == "prompt" and isinstance(value, str):
        for turn in turns:
            if isinstance(turn, dict) and turn.get("content", turn.get("value")) == value:
                return False  # the prompt repeats a turn
    return is_unread("it", key, value)


def _variables(row: Mapping[str, Any], reads: Reads) -> tuple[dict[str, Any], list[str]]:
    """Return the template's variables besides the turns, and names that the template ignores.

    The variables are those that transformers and TRL pass. Raises DataError if a variable has the
    wrong type, is given twice, or must not be lost but the template does not read it.
    """
    kwargs = _template_kwargs(row)
    variables: dict[str, Any] = {}
    for name, value in row.items():
        if name in reads.variables and name not in (*_ROW, *_NOT_VARIABLES) and value is not None:
            variables[name] = value
    if "tools" in reads.variables and (tools := tools_of(row)) is not None:
        variables["tools"] = tools

    unnamed: list[str] = []
    for name, value in kwargs.items():
        if name in _NOT_VARIABLES:
            raise DataError(
                f"it has chat_template_kwargs with {name}, but that is not a template variable; "
                f"remove {name}"
            )
        if name in variables and variables[name] != value:
            raise DataError(
                f"it has {name} and a different {name} in chat_template_kwargs; remove one of them"
            )
        if name not in reads.variables and not says_nothing(value):
            is_unread("its chat_template_kwargs", name, value)  # raises for tools and documents
            unnamed.append(f"chat_template_kwargs {name}")
        variables[name] = tools_of({"tools": value}) if name == "tools" else value

    documents = variables.get("documents")
    if documents is None:
        return variables, unnamed
    if not isinstance(documents, list) or not all(isinstance(part, dict) for part in documents):
        raise DataError(f"its documents are {documents!r:.40}; they must be a list of objects")
    return variables, unnamed


def _template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's chat_template_kwargs.

    Raises DataError if they are neither an object nor its JSON.
    """
    kwargs = row.get("chat_template_kwargs")
    if isinstance(kwargs, str) and kwargs.strip():
        kwargs = parsed("it has chat_template_kwargs", kwargs)
    if not says_nothing(kwargs) and not isinstance(kwargs, dict):
        raise DataError(
            f"its chat_template_kwargs are {kwargs!r:.40}; they must be a JSON object of template "
            "variables and their values"
        )
    return kwargs or {}


def _learned(row_mark: bool | None, turns: Sequence[ReadTurn]) -> list[bool]:
    """Return which turns are learned, according to the loss flags of the row and of the turns.

    Raises DataError if flags contradict each other, or if no turn is learned.
    """
    learned = []
    has_answer = False
    for number, read in enumerate(turns, start=1):
        role = read.turn["role"]
        is_answer = role == "assistant"
        has_answer = has_answer or is_answer
        if read.learned and not is_answer:
            raise DataError(
                f"turn {number} ({role}) is marked as learned, but only the assistant's turns can "
                "be; remove the mark"
            )
        if read.learned and row_mark is False:
            raise DataError(
                f"turn {number} is marked as learned, but its row is marked as not learned; remove "
                "one of the marks"
            )
        mark = row_mark if read.learned is None else read.learned
        learned.append(is_answer and mark is not False)
    if not has_answer:
        raise DataError(
            "no turn is the assistant's, so nothing carries loss; leave the conversation out"
        )
    if not any(learned):
        raise DataError(
            "every turn of the assistant is marked as not learned, so nothing carries loss; leave "
            "the conversation out, or remove a mark"
        )
    return learned


def _check_values(turns: Sequence[Turn], variables: Mapping[str, Any]) -> None:
    """Raise DataError if a value is nested too deeply or has a lone surrogate character."""
    values: list[tuple[str, Any, int]] = [("it", variables, 0)]
    for number, turn in enumerate(turns, start=1):
        values.append((f"turn {number}", turn, 0))
    while values:
        where, value, depth = values.pop()
        if depth > _MAX_DEPTH:
            raise DataError(f"{where} is nested more than {_MAX_DEPTH} levels deep; repair it")
        if isinstance(value, str) and _SURROGATES.search(value):
            raise DataError(f"{where} has a lone surrogate character; remove the character")
        parts: list[Any] = []
        if isinstance(value, dict):
            for pair in value.items():
                parts += pair
        elif isinstance(value, (list, tuple)):
            parts = list(value)
        values += [(where, part, depth + 1) for part in parts]
