"""Replace a conversation's texts by numbers, to see which texts a template writes, and where.

A template may drop a turn, change its text or leave out its reasoning, and a model would then learn
something that is not in the data. Searching the rendered text for a turn's text does not detect
this, because a short text such as "4" may be found by chance. So the conversation is rendered once
more, with a number between two marks in place of each text, each called function with its
arguments, and each tool's name. The marks are characters that the conversation does not contain.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.chat.keys import THOUGHTS, is_unread
from data.chat.rows import Conversation
from data.chat.turns import Turn
from runtime.errors import DataError


class Watched(dict[str, Any]):
    """A turn that records which of its keys a template reads."""

    def __init__(self, turn: Turn) -> None:
        """Copy the keys of a turn."""
        super().__init__(turn)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default, and record the key as read."""
        self.read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        """Return all keys with their values, and record all as read."""
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        """Return all values, and record all keys as read."""
        self.read.update(self)
        return super().values()


@dataclass(frozen=True)
class Spoken:
    """A text of a turn or a tool that the template must write."""

    turn: int | None
    """Number of the turn that has the text, from 0; None for a tool."""
    kind: str
    """Kind of text: "content", "reasoning", "tool_calls" or "tools"."""
    text: str | None
    """The text itself if the template must write it unchanged; None if it may change it."""
    in_json: bool = False
    """True for arguments given as a JSON string, which a template may quote a second time."""


class StandIns:
    """Copy of a conversation with numbers in place of its texts, to render with a template."""

    def __init__(self, conversation: Conversation, begin: str, end: str) -> None:
        """Replace the texts by numbers between the marks ``begin`` and ``end``."""
        self._begin = begin
        self._end = end
        self.spoken: list[Spoken] = []
        self.turns: list[Watched] = []
        for number, turn in enumerate(conversation.turns):
            self.turns.append(Watched(self._turn(number, turn)))
        self.variables: dict[str, Any] = dict(conversation.variables)
        if tools := self.variables.get("tools"):
            self.variables["tools"] = [self._tool(tool) for tool in tools]

    def positions(self, text: str) -> dict[int, list[int]]:
        """Return the offsets of each number in a rendered text, keyed by number."""
        positions: dict[int, list[int]] = {}
        for match in re.finditer(f"{self._begin}(\\d+){self._end}", text):
            positions.setdefault(int(match[1]), []).append(match.start())
        return positions

    def unread(self) -> list[str]:
        """Return notes on keys of turns that the template did not read, each once.

        Raises DataError if such a key must not be lost (`is_unread`).
        """
        notes: dict[str, None] = {}
        for number, turn in enumerate(self.turns, start=1):
            for key, value in dict.items(turn):  # turn.items() would mark all keys as read
                if key in ("role", "content", "tool_calls", *THOUGHTS) or key in turn.read:
                    continue
                if is_unread(f"turn {number}", key, value):
                    notes[f"a turn's {key}, which nothing reads"] = None
        return list(notes)

    def _number(self, spoken: Spoken) -> str:
        self.spoken.append(spoken)
        return f"{self._begin}{len(self.spoken) - 1}{self._end}"

    def _turn(self, number: int, turn: Turn) -> Turn:
        changed = dict(turn)
        for name in THOUGHTS:
            thought = turn.get(name)
            if not isinstance(thought, str):
                continue
            if thought.strip():
                stand_in = self._number(Spoken(number, "reasoning", thought))
                changed.update({name: stand_in for name in THOUGHTS if name in turn})
            break  # the other keys hold the same reasoning

        content = turn.get("content")
        if isinstance(content, list):
            parts = [part | {"text": self._content(number, part["text"])} for part in content]
            changed["content"] = parts
        elif content is not None:
            changed["content"] = self._content(number, content)
        if "tool_calls" in turn:
            changed["tool_calls"] = [self._call(number, call) for call in turn["tool_calls"]]
        return changed

    def _content(self, number: int, text: str) -> str:
        return self._number(Spoken(number, "content", text)) if text.strip() else text

    def _call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", call))
        function["name"] = self._number(Spoken(number, "tool_calls", function["name"]))
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and arguments:
            function["arguments"] = self._arguments(number)
        elif isinstance(arguments, str) and arguments.strip() not in ("", "{}"):
            function["arguments"] = json.dumps(self._arguments(number), ensure_ascii=False)
            self.spoken[-1] = Spoken(number, "tool_calls", None, in_json=True)
        return call | {"function": function} if "function" in call else function

    def _arguments(self, number: int) -> dict[str, str]:
        name = self._number(Spoken(number, "tool_calls", None))
        return {name: self._number(Spoken(number, "tool_calls", None))}

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return tool
        stand_in = self._number(Spoken(None, "tools", function["name"]))
        renamed_function = function | {"name": stand_in}
        if "function" not in tool:
            return renamed_function
        return tool | {"function": renamed_function}


class RenderedText:
    """The text that a template wrote, to search for contents in the order of the turns."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._cursor = 0
        self._squeezed: str | None = None

    def holds(self, content: str) -> bool:
        """Return whether the text contains a content, either unchanged or escaped as in JSON.

        White space around the content is ignored.
        """
        stripped = content.strip()
        for form in (stripped, json.dumps(stripped, ensure_ascii=False)[1:-1]):
            position = self.text.find(form, self._cursor)
            if position >= 0:
                self._cursor = position
                return True
            if form in self.text:
                return True
        if "</think>" not in stripped:
            return False
        # Templates put line breaks around reasoning that is part of the content.
        if self._squeezed is None:
            self._squeezed = "".join(self.text.split())
        return "".join(stripped.split()) in self._squeezed


def check_written(
    name: str,
    stand_ins: StandIns,
    positions: Mapping[int, Sequence[int]],
    numbered_text: str,
    text: str,
) -> list[str]:
    """Check that a template writes every text; return notes on what it may leave out or change.

    Args:
        name: the template's name, for messages.
        stand_ins: the copy of the conversation with numbers.
        positions: offsets of the numbers in ``numbered_text``.
        numbered_text: the rendered text of that copy.
        text: the rendered text of the conversation itself.

    Raises:
        DataError: the template drops or changes the content of a turn.
    """
    turns = stand_ins.turns
    notes: dict[str, None] = {}
    last_question = -1
    for number, turn in enumerate(turns):
        if turn["role"] == "user":
            last_question = number

    rendered = RenderedText(text)
    for number, spoken in enumerate(stand_ins.spoken):
        subject = "its tools"
        if spoken.turn is not None:
            subject = f"turn {spoken.turn + 1} ({dict.get(turns[spoken.turn], 'role')})"
        if spoken.kind not in ("content", "tools"):
            subject = f"the {spoken.kind} of {subject}"
        if number not in positions:
            if (
                spoken.kind == "reasoning"
                and spoken.turn is not None
                and spoken.turn < last_question
            ):
                notes[
                    "a turn's reasoning, which the template writes only after the last question"
                ] = None
                continue
            raise DataError(f"the chat template {name} drops {subject}; use one that writes it")
        if spoken.text is not None and not rendered.holds(spoken.text):
            raise DataError(f"the chat template {name} changes {subject}; use one that does not")
        first = positions[number][0]
        if spoken.in_json and numbered_text[max(0, first - 2) : first] == '\\"':
            notes[
                "arguments of tool_calls given as the JSON of an object, which the template writes "
                "as a quoted string"
            ] = None
    return [*notes, *stand_ins.unread()]
