"""Chat templates: a conversation's token ids, and which of them the assistant has to learn.

Templates are those of Hugging Face, jinja2 in a sandbox with what `transformers` gives them, but for the date of today
(`strftime_now`), which would make the bytes depend on the day. Learned is what a template puts between
`{% generation %}` and `{% endgeneration %}`. Without these marks, a turn of the assistant is what the conversation
through it adds to the conversation before it with the generation prompt, if both are prefixes of the whole; white space
at its end, which follows the token that ends it, is not.

A template is a program of other people: it is compiled and called within bounds of processor time and memory.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from data.chat.conversations import NAMED, Turn
from data.chat.spelling import refuse_spelled
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer, special_tokens, tokenizer_config
from runtime.bounds import UnboundedError, bounded
from runtime.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

Spans = list[tuple[int, int]]
"""Characters [begin, end) of a text."""
MOST_CHARACTERS, MOST_SOURCE = 1 << 26, 1 << 21
"""Characters of a conversation in a template, and of a template."""
_MARKS: ContextVar[tuple[str, str]] = ContextVar("marks", default=("", ""))
"""Text around the assistant's words in the current rendering."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, and the tokens that it may name."""

    name: str
    """Its file, for messages."""
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens, such as bos_token."""

    def render(self, turns: Sequence[Turn], prompt: bool = False, marks: tuple[str, str] = ("", "")) -> str:
        """Return the text of a conversation.

        Args:
            prompt: end with what precedes the assistant's answer.
            marks: written around what the template marks as the assistant's.

        Raises:
            DataError: the template is wrong, or fails on these turns.
            UnboundedError: it does not end, or its text is too long.
        """
        template, name = _compiled(self.name, self.source), f"the chat template {self.name}"
        work = partial(
            template.render, messages=turns, tools=None, documents=None, add_generation_prompt=prompt,
            **dict(self.tokens),
        )  # fmt: skip
        before = _MARKS.set(marks)
        try:
            text = bounded(name, work)
        except UnboundedError:
            raise
        except Exception as error:  # a template can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{name} fails ({reason}); repair the turns or the template") from error
        finally:
            _MARKS.reset(before)
        if len(text) > MOST_CHARACTERS:
            raise UnboundedError(f"{name} makes {len(text):,} characters, and {MOST_CHARACTERS:,} are the most")
        return text

    def tokenize(self, tokenizer: HuggingFaceTokenizer, turns: Sequence[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, int64 [T], and which are learned, bool [T].

        Raises DataError: the template fails, drops or changes a turn, or does not say exactly what is the assistant's;
        a turn spells a special token.
        """
        refuse_spelled(self.render, self.source, tokenizer, turns)
        text = self.render(turns)
        # Begin and end of what is generated, and of a turn's number.
        marks = [mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if mark not in text][:4]
        if len(marks) < 4:
            raise DataError("spells nearly all noncharacters of Unicode, from U+FDD0 on; remove them")
        marked = None
        if self._check(turns, text, marks) and "endgeneration" in self.source:
            found, spans = _between(self.render(turns, marks=(marks[0], marks[1])), marks)
            marked = spans if found == text else None  # marks change nothing else
        ids, places = tokenizer.tokenize_special(text)
        offsets = np.array(places, dtype=np.int64).reshape(-1, 2)
        across = None
        for likely in self._spans(turns, text, marked):
            learned, cut = _tokens_of(offsets, likely, len(text))
            if not cut.any():
                return np.array(ids, dtype=np.int64), learned
            across = across or places[int(np.argmax(cut))]
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

    def _check(self, turns: Sequence[Turn], text: str, marks: Sequence[str]) -> bool:
        """Raise DataError if a turn is dropped or changed; return whether the marks are around the assistant's alone.

        Numbers between marks stand in for the turns' contents, so that a short one is not found by chance.
        """
        begin, end, name, named = marks
        numbered = [turn | {"content": f"{name}{n}{named}"} for n, turn in enumerate(turns)]
        found, spans = _between(self.render(numbered, marks=(begin, end)), marks)
        hold = bool(spans)
        for number, turn in enumerate(turns):
            places = [place.start() for place in re.finditer(f"{name}{number}{named}", found)]
            if not places or turn["content"].strip() not in text:
                done = "changes" if places else "drops"
                raise DataError(
                    f"the chat template {self.name} {done} turn {number + 1} ({turn['role']}); use one that keeps it"
                )
            for place in places:
                inside = any(begins <= place < ends for begins, ends in spans or ())
                hold = hold and inside == (turn["role"] == "assistant")
        return hold

    def _spans(self, turns: Sequence[Turn], text: str, marks: Spans | None) -> Iterator[Spans]:
        """Yield what is the assistant's: by the marks, and then by prefixes of the text, where these hold."""
        if marks is not None:
            yield marks
        spans: Spans = []
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before, through = self.render(turns[:number], True), self.render(turns[: number + 1])
                if not text.startswith(through) or not through.startswith(before):
                    return
                spans.append((len(before), len(through.rstrip())))
        yield spans


def load_template(tokenizer: str, file: str | None = None) -> ChatTemplate:
    """Read a template: NAMED, of a file, or of chat_template.jinja or tokenizer_config.json beside the tokenizer.

    Raises DataError: there is none, or it is no template; a name whose special tokens the tokenizer lacks.
    """
    if Path(tokenizer).suffix != ".json":
        raise DataError(
            f"tokenizer {tokenizer} is no tokenizer.json, whose special tokens a chat template needs; give one"
        )
    config, own = tokenizer_config(tokenizer), Path(tokenizer).with_name("chat_template.jinja")
    name = str(own if file is None else Path(file))
    source: str | None
    if file in NAMED:
        loaded = load_tokenizer(tokenizer)
        assert isinstance(loaded, HuggingFaceTokenizer)
        if lost := [token for token in NAMED[file].special if not loaded.special.fullmatch(token)]:
            raise DataError(
                f"{tokenizer} lacks {', '.join(lost)}, special tokens of the chat template {file}; give another, or "
                "leave out --tokenizer-model to train a tokenizer that has them"
            )
        source = NAMED[file].source
    elif file is None and not own.is_file():
        name, found = str(own.with_name("tokenizer_config.json")), config.get("chat_template")
        several = found if isinstance(found, list) else [{"name": "default", "template": found}]
        named = {str(one.get("name")): one.get("template") for one in several if isinstance(one, dict)}
        source = text if isinstance(text := named.get("default"), str) else None
    else:
        try:
            with open(name, encoding="utf-8") as stream:
                source = stream.read(MOST_SOURCE + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the chat template {name} ({error}); check --chat-template") from error
    if source is None:
        raise DataError(
            f"{tokenizer} has no chat template, neither in a {own.name} nor in a tokenizer_config.json beside it; give "
            f"--chat-template FILE, or {' or '.join(NAMED)}"
        )
    _compiled(name, source)
    none = {name: "" for name, value in config.items() if name.endswith("_token") and value is None}
    return ChatTemplate(name=name, source=source, tokens=tuple((none | special_tokens(config)).items()))


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
            begin, end = _MARKS.get()
            return f"{begin}{caller()}{end}"

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
    environment.filters["tojson"], environment.globals["raise_exception"] = tojson, raise_exception
    if len(source) > MOST_SOURCE:
        raise DataError(f"the chat template {name} has more than {MOST_SOURCE:,} characters; name another")
    try:
        return bounded(f"the chat template {name}", lambda: environment.from_string(source))
    except UnboundedError:
        raise
    except Exception as error:  # jinja2 computes constants, and Python compiles what it makes
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"the chat template {name} is none of jinja2 ({reason}); repair it") from error


def _between(text: str, marks: Sequence[str]) -> tuple[str, Spans | None]:
    """Return a text without its first two marks, and what is between them; None if they do not alternate."""
    begin, end = marks[:2]
    pieces = re.split(f"([{begin}{end}])", text)
    at = list(accumulate(map(len, pieces[::2])))  # the characters before each mark
    alternate = pieces[1::2] == [begin, end] * (len(pieces) // 4)
    return "".join(pieces[::2]), list(zip(at[::2], at[1::2], strict=False)) if alternate else None


def _tokens_of(offsets: np.ndarray, spans: Spans, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens of ``offsets`` [T, 2] lie in the spans, and which lie there in part, bool [T] each."""
    steps = np.zeros(length + 2, dtype=np.int64)
    for begin, end in spans:
        steps[begin] += 1
        steps[end] -= 1
    inside = np.concatenate(([0], np.cumsum(np.cumsum(steps) > 0)))  # [length + 3]: characters of spans before each
    begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)  # empty ones as their first character
    covered = inside[ends] - inside[begins]
    return covered > 0, (covered > 0) & (covered < ends - begins)
