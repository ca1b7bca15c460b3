"""Apply chat templates: convert a conversation to token ids with a loss mask.

Templates are Hugging Face's, rendered with the variables that `transformers` passes, except today's
date (`strftime_now`), which would make prepared data depend on the day.

The loss mask of a turn is determined in the text. A template may mark the assistant's words itself,
with `{% generation %}` and `{% endgeneration %}`. Without these marks, a turn of the assistant is
the difference of two renderings: the turns up to and including it, and the turns before it with the
generation prompt; both must be prefixes of the whole text. White space after the token that ends
the turn is not learned, because generation stops before it.

No mask is ever guessed. If the marks surround other words than the assistant's, if a rendering is
not a prefix, or if a token lies across the edge of a turn, the conversation is refused with the
reason: training with a wrong mask causes no error and shows only in the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from data.chat.calls import holds_null
from data.chat.conversations import NAMED
from data.chat.environment import MARKS, MAX_SOURCE, compiled, names_in
from data.chat.keys import Reads
from data.chat.prefixes import spans_by_prefixes
from data.chat.rows import Conversation, conversation_of_turns
from data.chat.spans import Spans, spans_between, spans_of_turns, tokens_of, turn_ends
from data.chat.spelling import Search, control_tokens, refuse_spelled
from data.chat.stand_ins import StandIns, check_written
from data.chat.turns import Turn
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from data.tokenizer.folder import special_tokens, tokenizer_config
from runtime.bounds import UnboundedError, bounded
from runtime.errors import DataError

MAX_CHARACTERS = 1 << 26
"""Maximum number of characters of a rendered conversation."""
TODAY = "strftime_now"
"""Template function that writes today's date; it is not provided here."""


@dataclass(frozen=True)
class Encoded:
    """A conversation as T tokens with a loss mask."""

    ids: np.ndarray
    """Token ids, int64 [T]."""
    learned: np.ndarray
    """Loss mask: True for learned tokens, bool [T]."""
    ends: Sequence[int] = ()
    """Ids of the added tokens that end learned turns; a turn without such an end adds none."""
    notes: Sequence[str] = ()
    """Notes for the user on content that nothing reads, or that the template leaves out."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template, with the special tokens that it may use as variables."""

    name: str
    """Name of the template's file, for messages."""
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens, such as bos_token."""
    tool_use: str | None = None
    """Source of the template for conversations with tools, if it is a separate one."""

    @property
    def reads(self) -> Reads:
        """The names that the template uses, for conversations with tools too."""
        reads = names_in(self.name, self.source)
        return reads if self.tool_use is None else reads | names_in(self.name, self.tool_use)

    def render(
        self,
        turns: Sequence[Turn],
        prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            turns: turns in the form that templates take.
            prompt: end with the text that precedes the assistant's answer (generation prompt).
            marks: texts to write around the words that the template marks as the assistant's.
            variables: other variables of the template, such as tools.

        Raises:
            DataError: the template is invalid, or fails on these turns.
            UnboundedError: rendering takes too long, or the text is too long.
        """
        context = {"tools": None, "documents": None, **dict(self.tokens), **(variables or {})}
        template = compiled(self.name, self._source(context["tools"]))
        name = f"the chat template {self.name}"
        work = partial(template.render, context, messages=turns, add_generation_prompt=prompt)
        previous = MARKS.set(marks)
        try:
            text = bounded(name, work)
        except UnboundedError:
            raise
        except Exception as error:  # a template can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            remedy = "repair the turns or the template"
            if f"'{TODAY}' is undefined" in reason:
                remedy = (
                    "it writes today's date, on which prepared data must not depend: copy the "
                    f"template, replace {TODAY}(...) by a date, and give the copy by "
                    "--chat-template"
                )
            raise DataError(f"{name} fails ({reason}); {remedy}") from error
        finally:
            MARKS.reset(previous)
        if len(text) > MAX_CHARACTERS:
            raise UnboundedError(
                f"{name} writes {len(text):,} characters, more than the {MAX_CHARACTERS:,} "
                "allowed; shorten the conversation or repair the template"
            )
        return text

    def tokenize(
        self, tokenizer: HuggingFaceTokenizer, turns: Conversation | Sequence[Turn]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a conversation's token ids, int64 [T], and its loss mask, bool [T].

        Raises DataError under the same conditions as `encode`.
        """
        conversation = turns if isinstance(turns, Conversation) else conversation_of_turns(turns)
        encoded = self.encode(tokenizer, conversation)
        return encoded.ids, encoded.learned

    def refuse_spelled(self, tokenizer: HuggingFaceTokenizer, conversation: Conversation) -> None:
        """Raise DataError if a text contains a control token of the tokenizer or the template."""
        refuse_spelled(_control_tokens(self, tokenizer), conversation)

    def encode(self, tokenizer: HuggingFaceTokenizer, conversation: Conversation) -> Encoded:
        """Return the tokens of a conversation with its loss mask.

        Raises DataError if the template fails, drops or changes a turn, or does not separate the
        assistant's words exactly, or if a text contains a control token.
        """
        self.refuse_spelled(tokenizer, conversation)
        text = self.render(conversation.turns, variables=conversation.variables)
        marks = _unused_characters(text)
        owners, notes = self._owners(conversation, text, marks)
        calls: list[Any] = []
        for turn in conversation.turns:
            calls += turn.get("tool_calls", ())
        if holds_null([*calls, conversation.variables.get("tools") or []]):
            notes.append(
                "nulls in tools or tool_calls, which columnar files write for missing keys"
            )
        if tokenizer.dropped(text, special=True):
            notes.append("characters for which the tokenizer has no token, nor an unknown token")

        ids, spans = tokenizer.tokenize_special(text)
        offsets = np.array(spans, dtype=np.int64).reshape(-1, 2)
        crossing = None  # character range of the first token that crosses the edge of a turn
        for turns in self._candidates(conversation, text, marks, owners):
            turn_spans = [span for turn in turns for span in turn]
            learned, is_cut = tokens_of(offsets, turn_spans, len(text))
            if not is_cut.any():
                last_spans = [turn[-1] for turn in turns]
                ends = turn_ends(tokenizer, ids, offsets, last_spans, text)
                unread = [f"{key}, which nothing reads" for key in conversation.unread]
                return Encoded(np.array(ids, dtype=np.int64), learned, ends, (*unread, *notes))
            crossing = crossing or spans[int(np.argmax(is_cut))]
        assert crossing is not None  # without any candidate, _candidates would have raised
        raise DataError(
            f"one token covers {text[slice(*crossing)]!r}, which crosses the edge of an "
            "assistant's turn, so only a part of it would be learned; separate the turns in the "
            "template, for example by a special token"
        )

    def _source(self, tools: Any) -> str:
        return self.source if tools is None or self.tool_use is None else self.tool_use

    def _owners(
        self, conversation: Conversation, text: str, marks: Sequence[str]
    ) -> tuple[list[int | None] | None, list[str]]:
        """Return the turn of each span between generation marks, and notes for the user.

        A span without any turn's content has owner None. The list is None if there are no marks,
        or if they do not surround exactly the assistant's words. Raises DataError if a turn is
        dropped or changed.
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
        numbered_text, spans = spans_between(marked, marks)
        positions = stand_ins.positions(numbered_text)
        notes = check_written(self.name, stand_ins, positions, numbered_text, text)
        if dates:
            notes.append(
                f"a date that the template writes itself, since today's is not given ({TODAY})"
            )
        if not spans:
            return None, notes

        begins = np.array([begin for begin, _ in spans])
        owners: list[int | None] = [None] * len(spans)
        for number, spoken in enumerate(stand_ins.spoken):
            is_answer = False
            if spoken.turn is not None:
                is_answer = conversation.turns[spoken.turn]["role"] == "assistant"
            in_span = []  # for each position of the number, whether it lies between marks
            for position in positions.get(number, ()):
                span = int(np.searchsorted(begins, position, side="right")) - 1
                in_span.append(span >= 0 and position < spans[span][1])
                if in_span[-1] and is_answer:
                    owners[span] = spoken.turn
            if not in_span:
                continue
            if not is_answer:
                is_right = not any(in_span)
            elif spoken.kind == "tool_calls":
                is_right = any(in_span)  # a called function's name may precede its result too
            else:
                is_right = all(in_span)
            if not is_right:
                return None, notes
        return owners, notes

    def _candidates(
        self,
        conversation: Conversation,
        text: str,
        marks: Sequence[str],
        owners: Sequence[int | None] | None,
    ) -> Iterator[list[Spans]]:
        """Yield the spans of each learned turn: first from generation marks, then from prefixes.

        A method that does not work is skipped. Raises DataError if neither works.
        """
        variables = conversation.variables
        by_marks = None
        if owners is not None and "endgeneration" in self._source(variables.get("tools")):
            marked = self.render(
                conversation.turns, marks=(marks[0], marks[1]), variables=variables
            )
            unmarked, spans = spans_between(marked, marks)
            if unmarked == text and spans:  # asking for marks has not changed the text
                by_marks = spans_of_turns(spans, owners, conversation)
        if by_marks is not None:
            yield by_marks

        render = partial(self.render, variables=variables)
        by_prefixes = spans_by_prefixes(render, conversation, text)
        if isinstance(by_prefixes, dict):
            yield [[span] for span in by_prefixes.values()]
        elif by_marks is None:
            raise DataError(
                f"the chat template {self.name} does not say exactly which tokens are the "
                "assistant's: no generation marks enclose exactly these tokens, and its later "
                f"turns do more than add text (the text through turn {by_prefixes + 1} changes "
                "once more turns follow); put {% generation %} and {% endgeneration %} around the "
                "words of the assistant, use a template made for training, such as TRL's, or mark "
                'turns not to be learned with "train": false'
            )


def _unused_characters(text: str) -> list[str]:
    """Return four Unicode noncharacters that a text does not contain, to use as marks.

    Raises DataError if fewer than four are left.
    """
    unused = [mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if mark not in text]
    if len(unused) < 4:
        raise DataError("contains nearly all noncharacters of Unicode, from U+FDD0 on; remove them")
    return unused[:4]


@lru_cache(maxsize=16)
def _control_tokens(template: ChatTemplate, tokenizer: HuggingFaceTokenizer) -> Search:
    return control_tokens(template.render, tokenizer)


def load_template(tokenizer: str, file: str | None = None) -> ChatTemplate:
    """Load a chat template: one of NAMED, a file, or by default the tokenizer's template.

    The tokenizer's is in chat_template.jinja or tokenizer_config.json in its folder. Raises
    DataError if there is no template, it is invalid, or the tokenizer lacks its special tokens.
    """
    if Path(tokenizer).suffix != ".json":
        raise DataError(
            f"tokenizer {tokenizer} is not a tokenizer.json, but a chat template needs the special "
            "tokens of one; give a tokenizer.json"
        )
    default_file = Path(tokenizer).with_name("chat_template.jinja")
    name = str(default_file if file is None else Path(file))
    source: str | None
    tool_use: str | None = None
    if file in NAMED:
        source = _named_source(tokenizer, file)
    elif file is not None:
        source = _read_source(name)
    elif default_file.is_file():
        source = _read_source(name)
        tool_use_file = default_file.with_name("additional_chat_templates") / "tool_use.jinja"
        if tool_use_file.is_file():
            tool_use = _read_source(str(tool_use_file))
    else:
        name = str(default_file.with_name("tokenizer_config.json"))
        templates = _templates_in_config(tokenizer)
        source = templates.get("default")
        tool_use = templates.get("tool_use")
    if source is None:
        raise DataError(
            f"{tokenizer} has no chat template, neither in a {default_file.name} nor in a "
            f"tokenizer_config.json beside it; give --chat-template FILE, or {' or '.join(NAMED)}"
        )
    return recorded_template(tokenizer, name, source, tool_use)


def _named_source(tokenizer: str, name: str) -> str:
    """Return the source of a NAMED template. Raises DataError if its special tokens are missing."""
    loaded = load_tokenizer(tokenizer)
    assert isinstance(loaded, HuggingFaceTokenizer)
    template = NAMED[name]
    missing = [token for token in template.special if not loaded.added.fullmatch(token)]
    if missing:
        raise DataError(
            f"{tokenizer} lacks {', '.join(missing)}, special tokens of the chat template {name}; "
            "give another template, or leave out --tokenizer-model to train a tokenizer with them"
        )
    return template.source


def _templates_in_config(tokenizer: str) -> dict[str, str]:
    """Return the templates in the tokenizer_config.json next to a tokenizer, keyed by name."""
    entries = tokenizer_config(tokenizer).get("chat_template")
    if not isinstance(entries, list):
        entries = [{"name": "default", "template": entries}]
    templates: dict[str, Any] = {}
    for entry in entries:
        if isinstance(entry, dict):
            templates[str(entry.get("name"))] = entry.get("template")
    return {name: source for name, source in templates.items() if isinstance(source, str)}


def recorded_template(
    tokenizer: str, name: str, source: str, tool_use: str | None = None
) -> ChatTemplate:
    """Return a template with the given source and a tokenizer's special tokens.

    Raises DataError if it is not valid.
    """
    for text in filter(None, (source, tool_use)):
        compiled(name, text)
    config = tokenizer_config(tokenizer)
    tokens: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token") and value is None:
            tokens[key] = ""
    tokens |= special_tokens(config)
    return ChatTemplate(name=name, source=source, tokens=tuple(tokens.items()), tool_use=tool_use)


def _read_source(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read(MAX_SOURCE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the chat template {path} ({error}); check --chat-template"
        ) from error
