"""Chat templates: a conversation's token ids, and which of them the assistant has to learn.

Templates are those of Hugging Face, jinja2 in a sandbox with what `transformers` gives them, but for the date of today
(`strftime_now`), which would make the bytes depend on the day. Learned is what a template puts between
`{% generation %}` and `{% endgeneration %}`. Without these marks, a turn of the assistant is what the conversation
through it adds to the conversation before it with the generation prompt, if both are prefixes of the whole; white space
at its end, which follows the token that ends it, is not.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from data.chat.conversations import MARKS, Turn
from data.errors import DataError
from data.tokenizer import HuggingFaceTokenizer, special_tokens, tokenizer_config

if TYPE_CHECKING:
    from jinja2 import Template

_BEGIN, _END, _NAME, _NAMED = MARKS
Spans = list[tuple[int, int]]
"""Characters [begin, end) of a text."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, and the tokens that it may name."""

    name: str
    """Its file, for messages."""
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens, such as bos_token."""

    def render(self, turns: Sequence[Turn], prompt: bool = False) -> tuple[str, Spans]:
        """Return the text of a conversation, and what of it is marked as the assistant's.

        Args:
            prompt: end with what precedes the assistant's answer.

        Raises:
            DataError: the template is wrong, or fails on these turns.
        """
        template = _compiled(self.name, self.source)
        try:
            text = template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=prompt, **dict(self.tokens)
            )
        except Exception as error:  # a template is a program: it can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(
                f"the chat template {self.name} fails ({reason}); repair the turns or the template"
            ) from error
        return _without_marks(text)

    def tokenize(self, tokenizer: HuggingFaceTokenizer, turns: Sequence[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, int64 [T], and which are learned, bool [T].

        Raises:
            DataError: the template fails, drops or changes a turn, or does not say exactly what is the assistant's; a
                turn spells a special token.
        """
        for number, turn in enumerate(turns, start=1):
            if spelled := tokenizer.special.search(turn["content"]):
                raise DataError(
                    f"turn {number} spells the special token {spelled[0]!r}, which would end it; spell it another way"
                )
        text, marks = self.render(turns)
        marks_hold = self._check(turns, text)
        ids, places = tokenizer.tokenize_special(text)
        offsets = np.array(places, dtype=np.int64).reshape(-1, 2)
        across = None
        for spans in self._spans(turns, text, marks if marks_hold else None):
            if (learned := _tokens_of(offsets, spans, len(text))) is not None:
                return np.array(ids, dtype=np.int64), learned
            across = across or _across(places, spans)
        if across is not None:
            raise DataError(
                f"the token of {text[slice(*across)]!r} lies across the edge of an assistant's turn, so that it would "
                "be learned in part; set turns apart in the template, as by a special token"
            )
        raise DataError(
            f"the chat template {self.name} does not say exactly which tokens are the assistant's: neither by "
            "generation marks around its turns alone, nor by turns that only add text; put {% generation %} and "
            "{% endgeneration %} around them"
        )

    def _check(self, turns: Sequence[Turn], text: str) -> bool:
        """Raise DataError if a turn is dropped or changed; return whether the marks are around the assistant's alone.

        Numbers between noncharacters stand in for the turns' contents, so that a short one is not found by chance.
        """
        found, marks = self.render([turn | {"content": f"{_NAME}{n}{_NAMED}"} for n, turn in enumerate(turns)])
        hold = bool(marks)
        for number, turn in enumerate(turns):
            places = [place.start() for place in re.finditer(f"{_NAME}{number}{_NAMED}", found)]
            if not places or turn["content"].strip() not in text:
                done = "changes" if places else "drops"
                raise DataError(
                    f"the chat template {self.name} {done} turn {number + 1} ({turn['role']}); use one that keeps it"
                )
            for place in places:
                inside = any(begin <= place < end for begin, end in marks)
                hold = hold and inside == (turn["role"] == "assistant")
        return hold

    def _spans(self, turns: Sequence[Turn], text: str, marks: Spans | None) -> Iterator[Spans]:
        """Yield what is the assistant's: by the marks, and then by prefixes of the text, where these hold."""
        if marks is not None:
            yield marks
        spans: Spans = []
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before, through = self.render(turns[:number], True)[0], self.render(turns[: number + 1])[0]
                if not text.startswith(through) or not through.startswith(before):
                    return
                spans.append((len(before), len(through.rstrip())))
        yield spans


def load_template(tokenizer: str, file: str | None = None) -> ChatTemplate:
    """Read `file`, else chat_template.jinja or tokenizer_config.json beside a tokenizer.json; DataError if none."""
    if Path(tokenizer).suffix != ".json":
        raise DataError(
            f"tokenizer {tokenizer} is no tokenizer.json, whose special tokens a chat template needs; give one"
        )
    config, own = tokenizer_config(tokenizer), Path(tokenizer).with_name("chat_template.jinja")
    path = Path(file) if file is not None else own
    try:
        source = path.read_text(encoding="utf-8") if file is not None or own.is_file() else _named(config)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the chat template {path} ({error}); check --chat-template") from error
    if source is None:
        raise DataError(
            f"{tokenizer} has no chat template, neither in a {own.name} nor in a tokenizer_config.json beside it; give "
            "--chat-template FILE"
        )
    name = str(path if path.is_file() else own.with_name("tokenizer_config.json"))
    _compiled(name, source)
    none = {name: "" for name, value in config.items() if name.endswith("_token") and value is None}
    return ChatTemplate(name=name, source=source, tokens=tuple((none | special_tokens(config)).items()))


def _named(config: dict[str, Any]) -> str | None:
    """Return the template of a tokenizer_config.json, of several the default one."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


@cache
def _compiled(name: str, source: str) -> "Template":
    """Compile a template as transformers does (its chat_template_utils.py): a sandbox, loop controls, marks."""
    from jinja2 import TemplateError, Undefined, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012, jinja2's own

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    class Unnamed(Undefined):
        def __str__(self) -> str:
            name = self._undefined_name or ""
            if name.endswith("_token"):
                raise TemplateError(f"it has {name}, which tokenizer_config.json does not name; write it there")
            return ""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # jinja2's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], undefined=Unnamed
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(
            f"the chat template {name} is none of jinja2 ({' '.join(str(error).split())}); repair it"
        ) from error


def _without_marks(text: str) -> tuple[str, Spans]:
    pieces, spans = re.split(f"([{_BEGIN}{_END}])", text), []
    at = [0, *accumulate(map(len, pieces[::2]))]  # the characters before each mark
    for number, mark in enumerate(pieces[1::2], start=1):
        if mark == _BEGIN:
            begin = at[number]
        else:
            spans.append((begin, at[number]))
    return "".join(pieces[::2]), spans


def _across(places: Sequence[tuple[int, int]], spans: Spans) -> tuple[int, int] | None:
    """Return where the first token lies that is in a span in part, if one is."""
    edges = [edge for span in spans for edge in span]
    return next((place for place in places if any(place[0] < edge < place[1] for edge in edges)), None)


def _tokens_of(offsets: np.ndarray, spans: Spans, length: int) -> np.ndarray | None:
    """Return which tokens [T] of ``offsets`` [T, 2] lie in the spans; None if one lies in part."""
    steps = np.zeros(length + 2, dtype=np.int64)
    for begin, end in spans:
        steps[begin] += 1
        steps[end] -= 1
    inside = np.concatenate(([0], np.cumsum(np.cumsum(steps) > 0)))  # [length + 3]: characters of spans before each
    begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)  # empty ones as their first character
    covered = inside[ends] - inside[begins]
    if ((covered > 0) & (covered < ends - begins)).any():
        return None
    return covered > 0
