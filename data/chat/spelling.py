"""Text of conversations that would become a token which ends a turn, or which a template writes around turns.

A template writes its tokens as text, between texts of other people, so that a turn which spells one could end itself
and begin another. Such conversations are refused. Ordinary added words, such as <think> or <tool_call>, may be spelled:
they become tokens as in transformers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from data.chat.rows import Conversation
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError

Render = Callable[..., str]
"""Turns and ``prompt`` -> the text of a conversation."""
_USER, _ANSWER = "Is it so?", "So it is."
"""Contents of a conversation whose other tokens are the template's own."""
_LIKE_A_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|</s>|<(?:eos|end)[\w-]*>")
"""Text that a template can only mean as a token."""


def refuse_spelled(render: Render, source: str, tokenizer: HuggingFaceTokenizer, conversation: Conversation) -> None:
    """Raise DataError if a text of a conversation spells a control token of the tokenizer or of the template.

    Args:
        render: the template's.
        source: its text, by which the tokens that it writes are remembered.
    """
    spelled_in = _structure(_Once(render), source, tokenizer)
    parts: list[tuple[str, Any]] = [(f"turn {number}", turn) for number, turn in enumerate(conversation.turns, start=1)]
    parts.append(("the conversation", conversation.variables))
    for name, part in parts:
        for where, text in _texts(part):
            spelled = spelled_in(text)
            if spelled is not None:
                raise DataError(
                    f"{name} spells the special token {spelled!r} in its {where}, which would end a turn; spell it "
                    "another way"
                )


class _Once:
    """A function that a cache does not tell from another."""

    def __init__(self, call: Render) -> None:
        self.call = call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=16)
def _structure(render: _Once, source: str, tokenizer: HuggingFaceTokenizer) -> Callable[[str], str | None]:
    """Return the search for control tokens, and for the added tokens that a template writes around turns.

    The latter are all tokens of a user's turn, and the first one that begins an answer and that ends one. Later ones of
    the assistant's turns, such as <think>, are words that a content may have.

    Raises DataError: a turn ends with the text of a token that the tokenizer does not have.
    """
    user = {"role": "user", "content": _USER}
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        asked = render.call([user])
        prompt = render.call([user], prompt=True)
        whole = render.call([user, answer])
    except DataError:
        return tokenizer.spelled  # it asks for other turns; the conversation's own will tell

    added = tokenizer.added
    _, _, end = whole.rpartition(_ANSWER)
    written = _LIKE_A_TOKEN.match(end.lstrip())
    if written is not None and added.match(written[0]) is None:
        raise DataError(
            f"the chat template ends a turn with {written[0]!r}, which is no token of {tokenizer.path}: it would be "
            "learned as ordinary text, at which nothing stops; name it in added_tokens_decoder of a "
            "tokenizer_config.json beside it, or give another template"
        )
    texts = set(added.findall(asked))
    texts |= set(added.findall(prompt.removeprefix(asked))[:1])
    texts |= set(added.findall(end)[:1])
    texts = {text for text in texts if not text.isspace() and not tokenizer.is_paired(text)}
    return tokenizer.search_for(texts)


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a turn, at any depth, with the name of its field."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield where or "keys", str(name)
            yield from _texts(part, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, where)
        parts = [part.get("text") for part in value if isinstance(part, Mapping)]
        yield where, "".join(part for part in parts if isinstance(part, str))  # as a template joins them
