"""Chat templates: a conversation's token ids, and which of them the assistant has to learn.

Templates are those of Hugging Face, jinja2 in a sandbox with what `transformers` gives them, but
for the date of today (`strftime_now`), which would make the bytes depend on the day. Learned is
what a template puts between `{% generation %}` and `{% endgeneration %}`. Without these marks, a
turn of the assistant is what the conversation through it adds to the conversation before it with
the generation prompt, if both are prefixes of the whole; white space at its end, which follows the
token that ends it, is not.

A template is a program of other people: it is compiled and called within bounds of processor time
and memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from data.chat.calls import holds_null
from data.chat.conversations import NAMED
from data.chat.keys import Reads
from data.chat.prefixes import spans_by_prefixes
from data.chat.rows import Conversation, Turn, said
from data.chat.spans import Spans, between, spans_of_turns, tokens_of, turn_ends
from data.chat.spelling import Search, control_tokens, refuse_spelled
from data.chat.stand_ins import StandIns, check_written
from data.hugging_face import special_tokens, tokenizer_config
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from runtime.bounds import UnboundedError, bounded
from runtime.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MOST_CHARACTERS, MOST_SOURCE = 1 << 26, 1 << 21
"""Characters of a conversation in a template, and of a template."""
TODAY = "strftime_now"
"""The function of templates that writes the day of today, which they are not given here."""
_MARKS: ContextVar[tuple[str, str]] = ContextVar("marks", default=("", ""))
"""Text around the assistant's words in the current rendering."""


@dataclass(frozen=True)
class Encoded:
    """A conversation's T tokens."""

    ids: np.ndarray
    """int64 [T]."""
    learned: np.ndarray
    """Which of them are learned, bool [T]."""
    ends: Sequence[int] = ()
    """The added tokens that end the learned turns, one of each turn that has one."""
    told: Sequence[str] = ()
    """Parts of it that nothing reads, or that the template leaves out by its own rule."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, and the tokens that it may name."""

    name: str
    """Its file, for messages."""
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens, such as bos_token."""
    tool_use: str | None = None
    """The template of conversations that have tools, if that is another one."""

    @property
    def reads(self) -> Reads:
        """The names that it uses."""
        reads = _reads(self.name, self.source)
        return reads if self.tool_use is None else reads | _reads(self.name, self.tool_use)

    def render(
        self,
        turns: Sequence[Turn],
        prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            prompt: end with what precedes the assistant's answer.
            marks: written around what the template marks as the assistant's.
            variables: those that it is given beside the turns, such as tools.

        Raises:
            DataError: the template is wrong, or fails on these turns.
            UnboundedError: it does not end, or its text is too long.
        """
        given = {"tools": None, "documents": None, **dict(self.tokens), **(variables or {})}
        template, name = (
            _compiled(self.name, self._source(given["tools"])),
            f"the chat template {self.name}",
        )
        work = partial(template.render, given, messages=turns, add_generation_prompt=prompt)
        before = _MARKS.set(marks)
        try:
            text = bounded(name, work)
        except UnboundedError:
            raise
        except Exception as error:  # a template can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            remedy = "repair the turns or the template"
            if f"'{TODAY}' is undefined" in reason:
                remedy = (
                    f"it writes the day of today, on which prepared data must not depend: write a date in the place of "
                    f"{TODAY}(...) into a copy of it, and give that by --chat-template"
                )
            raise DataError(f"{name} fails ({reason}); {remedy}") from error
        finally:
            _MARKS.reset(before)
        if len(text) > MOST_CHARACTERS:
            raise UnboundedError(
                f"{name} makes {len(text):,} characters, and {MOST_CHARACTERS:,} are the most"
            )
        return text

    def tokenize(
        self, tokenizer: HuggingFaceTokenizer, turns: Conversation | Sequence[Turn]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, int64 [T], and which are learned, bool [T]. DataError
        as of `encode`.
        """
        encoded = self.encode(tokenizer, turns if isinstance(turns, Conversation) else said(turns))
        return encoded.ids, encoded.learned

    def refuse_spelled(self, tokenizer: HuggingFaceTokenizer, conversation: Conversation) -> None:
        """Raise DataError if a text of a conversation spells a control token of the tokenizer or of
        the template.
        """
        refuse_spelled(_control_tokens(self, tokenizer), conversation)

    def encode(self, tokenizer: HuggingFaceTokenizer, conversation: Conversation) -> Encoded:
        """Return the tokens of a conversation, and which of them are learned.

        Raises DataError: the template fails, drops or changes a turn, or does not say exactly what
        is the assistant's; a text spells a special token.
        """
        self.refuse_spelled(tokenizer, conversation)
        text = self.render(conversation.turns, variables=conversation.variables)
        # Begin and end of what is generated, and of a turn's number.
        marks = [mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if mark not in text][:4]
        if len(marks) < 4:
            raise DataError(
                "spells nearly all noncharacters of Unicode, from U+FDD0 on; remove them"
            )
        owners, told = self._owners(conversation, text, marks)
        calls = [call for turn in conversation.turns for call in turn.get("tool_calls", ())]
        if holds_null([*calls, conversation.variables.get("tools") or []]):
            told.append(
                "nulls in tools or tool_calls, as files of columns write for keys that one lacks and another has"
            )
        if tokenizer.dropped(text, special=True):
            told.append(
                "characters that the tokenizer has no token for, nor one of what it does not know"
            )
        ids, places = tokenizer.tokenize_special(text)
        offsets = np.array(places, dtype=np.int64).reshape(-1, 2)
        across = None
        for turns in self._candidates(conversation, text, marks, owners):
            spans = [span for turn in turns for span in turn]
            learned, cut = tokens_of(offsets, spans, len(text))
            if not cut.any():
                ends = turn_ends(tokenizer, ids, offsets, [turn[-1] for turn in turns], text)
                unread = [f"{key}, which nothing reads" for key in conversation.unread]
                return Encoded(np.array(ids, dtype=np.int64), learned, ends, (*unread, *told))
            across = across or places[int(np.argmax(cut))]
        assert across is not None  # or the candidates would have raised
        raise DataError(
            f"the token of {text[slice(*across)]!r} lies across the edge of an assistant's turn, so that it would "
            "be learned in part; set turns apart in the template, as by a special token"
        )

    def _source(self, tools: Any) -> str:
        return self.source if tools is None or self.tool_use is None else self.tool_use

    def _owners(
        self, conversation: Conversation, text: str, marks: Sequence[str]
    ) -> tuple[list[int | None] | None, list[str]]:
        """Return the turn of each text between generation marks, and what a user is to be told of.

        None for a text that says nothing of any turn; None for all if the marks are not around the
        assistant's alone.

        Raises DataError: a turn is dropped or changed.
        """
        stand_ins = StandIns(conversation, marks[2], marks[3])
        dates: list[str] = []

        def today(form: str) -> str:
            dates.append(form)
            return form

        variables = dict(stand_ins.variables)
        if TODAY in self.reads.variables:
            variables[TODAY] = today
        marked = self.render(stand_ins.turns, marks=(marks[0], marks[1]), variables=variables)
        written, spans = between(marked, marks)
        places = stand_ins.places(written)
        told = check_written(self.name, stand_ins, places, written, text)
        if dates:
            told.append(
                f"a date of the template's own, since it is not given the day of today ({TODAY})"
            )
        if not spans:
            return None, told
        begins = np.array([begin for begin, _ in spans])
        owners: list[int | None] = [None] * len(spans)
        for number, spoken in enumerate(stand_ins.spoken):
            ours = (
                spoken.turn is not None and conversation.turns[spoken.turn]["role"] == "assistant"
            )
            inside = []
            for place in places.get(number, ()):
                span = int(np.searchsorted(begins, place, side="right")) - 1
                inside.append(span >= 0 and place < spans[span][1])
                if inside[-1] and ours:
                    owners[span] = spoken.turn
            # The name of a called function may stand before its result too.
            holds = any if ours and spoken.kind == "tool_calls" else all
            if inside and not (holds(inside) if ours else not any(inside)):
                return None, told
        return owners, told

    def _candidates(
        self,
        conversation: Conversation,
        text: str,
        marks: Sequence[str],
        owners: Sequence[int | None] | None,
    ) -> Iterator[list[Spans]]:
        """Yield the spans of each learned turn: by the marks, and then by prefixes of the text,
        where these hold.

        Raises DataError: neither hold.
        """
        by_marks = None
        if owners is not None and "endgeneration" in self._source(
            conversation.variables.get("tools")
        ):
            marked = self.render(
                conversation.turns, marks=(marks[0], marks[1]), variables=conversation.variables
            )
            marked, spans = between(marked, marks)
            if marked == text and spans:  # marks change nothing else
                by_marks = spans_of_turns(spans, owners, conversation)
        if by_marks is not None:
            yield by_marks
        render = partial(self.render, variables=conversation.variables)
        by_prefixes = spans_by_prefixes(render, conversation, text)
        if isinstance(by_prefixes, dict):
            yield [[span] for span in by_prefixes.values()]
        elif by_marks is None:
            raise DataError(
                f"the chat template {self.name} does not say exactly which tokens are the assistant's: neither by "
                "generation marks around its turns alone, nor by turns that only add text (it writes the text through "
                f"turn {by_prefixes + 1} in another way once others follow); put {{% generation %}} and "
                "{% endgeneration %} around them, take a template that is made for training, as TRL's, or mark turns "
                'that are not to be learned with "train": false'
            )


@lru_cache(maxsize=16)
def _control_tokens(template: ChatTemplate, tokenizer: HuggingFaceTokenizer) -> Search:
    return control_tokens(template.render, tokenizer)


def load_template(tokenizer: str, file: str | None = None) -> ChatTemplate:
    """Read a template: NAMED, of a file, or of chat_template.jinja or tokenizer_config.json beside
    the tokenizer.

    Raises DataError: there is none, or it is no template; a name whose special tokens the tokenizer
    lacks.
    """
    if Path(tokenizer).suffix != ".json":
        raise DataError(
            f"tokenizer {tokenizer} is no tokenizer.json, whose special tokens a chat template needs; give one"
        )
    config, beside = tokenizer_config(tokenizer), Path(tokenizer).with_name("chat_template.jinja")
    name = str(beside if file is None else Path(file))
    source: str | None
    tool_use: str | None = None
    if file in NAMED:
        loaded = load_tokenizer(tokenizer)
        assert isinstance(loaded, HuggingFaceTokenizer)
        if lost := [token for token in NAMED[file].special if not loaded.added.fullmatch(token)]:
            raise DataError(
                f"{tokenizer} lacks {', '.join(lost)}, special tokens of the chat template {file}; give another, or "
                "leave out --tokenizer-model to train a tokenizer that has them"
            )
        source = NAMED[file].source
    elif file is None and not beside.is_file():
        name, entry = str(beside.with_name("tokenizer_config.json")), config.get("chat_template")
        several = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
        named = {
            str(one.get("name")): one.get("template") for one in several if isinstance(one, dict)
        }
        source = text if isinstance(text := named.get("default"), str) else None
        tool_use = text if isinstance(text := named.get("tool_use"), str) else None
    else:
        source = _read_source(name)
        more = beside.with_name("additional_chat_templates") / "tool_use.jinja"
        tool_use = _read_source(str(more)) if file is None and more.is_file() else None
    if source is None:
        raise DataError(
            f"{tokenizer} has no chat template, neither in a {beside.name} nor in a tokenizer_config.json beside it; "
            f"give --chat-template FILE, or {' or '.join(NAMED)}"
        )
    return recorded_template(tokenizer, name, source, tool_use)


def recorded_template(
    tokenizer: str, name: str, source: str, tool_use: str | None = None
) -> ChatTemplate:
    """Return a template of this source, with the special tokens of a tokenizer. Raises DataError if
    it is none.
    """
    for text in filter(None, (source, tool_use)):
        _compiled(name, text)
    config = tokenizer_config(tokenizer)
    none = {name: "" for name, value in config.items() if name.endswith("_token") and value is None}
    tokens = tuple((none | special_tokens(config)).items())
    return ChatTemplate(name=name, source=source, tokens=tokens, tool_use=tool_use)


def _read_source(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read(MOST_SOURCE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the chat template {path} ({error}); check --chat-template"
        ) from error


@cache
def _reads(name: str, source: str) -> Reads:
    """Return the names that a template uses, which has been compiled."""
    from jinja2 import meta, nodes

    def names() -> Reads:
        tree = _environment().parse(source)
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        variables = frozenset(meta.find_undeclared_variables(tree))
        return Reads(
            variables=variables, names=frozenset(texts | attributes), texts=frozenset(texts)
        )

    return bounded(f"the chat template {name}", names)


@cache
def _environment() -> "Environment":
    """Return what transformers compiles templates with: a sandbox, loop controls, marks
    (chat_template_utils.py).
    """
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
                raise TemplateError(
                    f"it has {name}, which tokenizer_config.json does not name; write it there"
                )
            return ""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # jinja2's own escapes HTML
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        undefined=Unnamed,
    )
    environment.filters["tojson"], environment.globals["raise_exception"] = tojson, raise_exception
    return environment


@cache
def _compiled(name: str, source: str) -> "Template":
    """Compile a template. Raises DataError: it is none, or too long."""
    if len(source) > MOST_SOURCE:
        raise DataError(
            f"the chat template {name} has more than {MOST_SOURCE:,} characters; name another"
        )
    try:
        return bounded(f"the chat template {name}", lambda: _environment().from_string(source))
    except UnboundedError:
        raise
    except Exception as error:  # jinja2 computes constants, and Python compiles what it makes
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"the chat template {name} is none of jinja2 ({reason}); repair it"
        ) from error
