"""Numbers that stand in for what a conversation says, to see what of it a chat template writes, and
where.

A short text such as "4" would be found by chance. So a conversation is written once more with a
number between two marks in the place of each text, of each called function and its arguments, and
of each tool's name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.chat.keys import THOUGHTS, is_unread
from data.chat.rows import Conversation, Turn
from runtime.errors import DataError


class Watched(dict[str, Any]):
    """A turn that notes which of its keys are read."""

    def __init__(self, turn: Turn) -> None:
        """Take the keys of a turn."""
        super().__init__(turn)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        self.read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        """Return all keys with their values."""
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        """Return all values."""
        self.read.update(self)
        return super().values()


@dataclass(frozen=True)
class Spoken:
    """One text of a turn, or of the tools, that must be in what a template writes."""

    turn: int | None
    """Number of its turn, from 0; None for a tool."""
    kind: str
    """content, thought, tool_calls or tools."""
    text: str | None
    """The text itself, if a template is to write it as it is."""
    in_json: bool = False
    """True for arguments that are the JSON of an object, which a template may quote once more."""


class StandIns:
    """A conversation of numbers, in the order in which its texts are."""

    def __init__(self, conversation: Conversation, begin: str, end: str) -> None:
        """Put numbers between ``begin`` and ``end`` in the place of the texts."""
        self._begin, self._end = begin, end
        self.spoken: list[Spoken] = []
        self.turns = [
            Watched(self._turn(number, turn)) for number, turn in enumerate(conversation.turns)
        ]
        self.variables: dict[str, Any] = dict(conversation.variables)
        if tools := self.variables.get("tools"):
            self.variables["tools"] = [self._tool(tool) for tool in tools]

    def places(self, text: str) -> dict[int, list[int]]:
        """Return where each number stands in a text."""
        places: dict[int, list[int]] = {}
        for match in re.finditer(f"{self._begin}(\\d+){self._end}", text):
            places.setdefault(int(match[1]), []).append(match.start())
        return places

    def unread(self) -> list[str]:
        """Return the keys of turns that a template was given and has not read, each once. DataError
        as `is_unread`.
        """
        keys: dict[str, None] = {}
        for number, turn in enumerate(self.turns, start=1):
            for key, value in dict.items(turn):
                given = key in ("role", "content", "tool_calls", *THOUGHTS) or key in turn.read
                if not given and is_unread(f"turn {number}", key, value):
                    keys[f"a turn's {key}, which nothing reads"] = None
        return list(keys)

    def _number(self, spoken: Spoken) -> str:
        self.spoken.append(spoken)
        return f"{self._begin}{len(self.spoken) - 1}{self._end}"

    def _turn(self, number: int, turn: Turn) -> Turn:
        changed = dict(turn)
        thought = next((turn[name] for name in THOUGHTS if isinstance(turn.get(name), str)), "")
        if thought.strip():
            stand_in = self._number(Spoken(number, "thought", thought))
            changed |= {name: stand_in for name in THOUGHTS if name in turn}
        content = turn.get("content")
        if isinstance(content, list):
            changed["content"] = [
                part | {"text": self._content(number, part["text"])} for part in content
            ]
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
        named = function | {"name": self._number(Spoken(None, "tools", function["name"]))}
        return tool | {"function": named} if "function" in tool else named


class Written:
    """A text in which contents are looked for, in their order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._cursor = 0
        self._squeezed: str | None = None

    def holds(self, content: str) -> bool:
        """Return whether a content is in the text: as it is, or as in JSON, but for white space
        around it.
        """
        stripped = content.strip()
        for form in (stripped, json.dumps(stripped, ensure_ascii=False)[1:-1]):
            place = self.text.find(form, self._cursor)
            if place >= 0:
                self._cursor = place
                return True
            if form in self.text:
                return True
        if "</think>" not in stripped:
            return False
        if (
            self._squeezed is None
        ):  # templates set a thought that stands in the content apart by line breaks
            self._squeezed = "".join(self.text.split())
        return "".join(stripped.split()) in self._squeezed


def check_written(
    name: str, stand_ins: StandIns, places: Mapping[int, Sequence[int]], written: str, text: str
) -> list[str]:
    """Return what a template leaves out or changes by its own rule, which a user is told of.

    Args:
        name: of the template, for messages.
        places: of the numbers in what it writes of them.
        written: what it writes of the numbers.
        text: what it writes of the conversation.

    Raises:
        DataError: it drops or changes what a turn says.
    """
    turns, told = stand_ins.turns, dict[str, None]()
    question = max(
        (number for number, turn in enumerate(turns) if turn["role"] == "user"), default=-1
    )
    whole = Written(text)
    for number, spoken in enumerate(stand_ins.spoken):
        where = "its tools"
        if spoken.turn is not None:
            where = f"turn {spoken.turn + 1} ({dict.get(turns[spoken.turn], 'role')})"
        what = where if spoken.kind in ("content", "tools") else f"the {spoken.kind} of {where}"
        if number not in places:
            if spoken.kind == "thought" and spoken.turn is not None and spoken.turn < question:
                told[
                    "a turn's thought, which the template writes after the last question alone"
                ] = None
                continue
            raise DataError(f"the chat template {name} drops {what}; use one that keeps it")
        if spoken.text is not None and not whole.holds(spoken.text):
            raise DataError(f"the chat template {name} changes {what}; use one that keeps it")
        if spoken.in_json and written[max(0, places[number][0] - 2) : places[number][0]] == '\\"':
            told[
                "arguments of tool_calls that are the JSON of an object, which the template quotes as a text"
            ] = None
    return [*told, *stand_ins.unread()]
