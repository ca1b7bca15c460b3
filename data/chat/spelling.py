"""Text of conversations that would become a token which ends a turn, or which a template writes
around turns.

A template writes its tokens as text, between texts of other people, so that a turn which spells one
could end itself and begin another. Such conversations are refused. Ordinary added words, such as
<think> or <tool_call>, may be spelled: they become tokens as in transformers.
"""

import re
from collections.abc import Callable

from data.chat.rows import Conversation
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError

Render = Callable[..., str]
"""Turns and ``prompt`` -> the text of a conversation."""
Search = Callable[[str], str | None]
"""A text -> the control token that it spells, if any."""
_USER, _ANSWER = "Is it so?", "So it is."
"""Contents of a conversation whose other tokens are the template's own."""
_LIKE_A_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|</s>|<(?:eos|end)[\w-]*>")
"""Text that a template can only mean as a token."""


def refuse_spelled(spelled_in: Search, conversation: Conversation) -> None:
    """Raise DataError if a text of a conversation spells a control token.

    Args:
        spelled_in: as of ``control_tokens``.
    """
    texts: dict[tuple[str, str], list[str]] = {}
    for where, field, text in conversation.texts():
        texts.setdefault((where, field), []).append(text)

    for (where, field), parts in texts.items():
        whole = (
            ["".join(parts)] if len(parts) > 1 else []
        )  # as a template joins the parts of a content
        for text in parts + whole:
            spelled = spelled_in(text)
            if spelled is not None:
                raise DataError(
                    f"{where} spells the special token {spelled!r} in its {field}, which would end a turn; spell it "
                    "another way"
                )


def control_tokens(render: Render, tokenizer: HuggingFaceTokenizer) -> Search:
    """Return the search for a tokenizer's control tokens, and for the added tokens that a template
    writes around turns.

    The latter are all tokens of a user's turn, and the first one that begins an answer and that
    ends one. Later ones of the assistant's turns, such as <think>, are words that a content may
    have.

    Args:
        render: the template's.

    Raises:
        DataError: a turn ends with the text of a token that the tokenizer does not have.
    """
    user = {"role": "user", "content": _USER}
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        question = render([user])
        prompt = render([user], prompt=True)
        whole = render([user, answer])
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
    texts = set(added.findall(question))
    texts |= set(added.findall(prompt.removeprefix(question))[:1])
    texts |= set(added.findall(end)[:1])
    texts = {text for text in texts if not text.isspace() and not tokenizer.is_paired(text)}
    return tokenizer.search_for(texts)
