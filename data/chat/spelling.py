"""Refuse conversations in which a text contains a control token.

A template writes control tokens as text, between the texts of the turns. A turn whose own text
contains one, such as <|im_end|>, would end early and start another turn, and the model would learn
to answer in a user's name. Ordinary added words, such as <think> or <tool_call>, are allowed: they
become tokens as in transformers.
"""

import re
from collections.abc import Callable

from data.chat.rows import Conversation
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError

Render = Callable[..., str]
"""Maps turns, and whether the generation prompt follows (``prompt``), to their text."""
Search = Callable[[str], str | None]
"""Maps a text to the control token that it contains, if any."""
_USER = "Is it so?"
_ANSWER = "So it is."
# All tokens around these two texts in a rendered conversation come from the template.
_LIKE_A_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|</s>|<(?:eos|end)[\w-]*>")
"""Pattern of text that a template can only mean as a token."""


def refuse_spelled(spelled_in: Search, conversation: Conversation) -> None:
    """Raise DataError if a text of a conversation contains a control token.

    Args:
        spelled_in: the search function that ``control_tokens`` returned.
        conversation: the turns and variables to search.
    """
    texts: dict[tuple[str, str], list[str]] = {}
    for where, field, text in conversation.texts():
        texts.setdefault((where, field), []).append(text)

    for (where, field), parts in texts.items():
        if len(parts) > 1:
            parts = [*parts, "".join(parts)]  # a template may join the parts of a content
        for text in parts:
            spelled = spelled_in(text)
            if spelled is not None:
                raise DataError(
                    f"{where} spells the special token {spelled!r} in its {field}, which would end "
                    "a turn; spell it another way"
                )


def control_tokens(render: Render, tokenizer: HuggingFaceTokenizer) -> Search:
    """Return a function that finds control tokens of a tokenizer or its template in a text.

    The template's control tokens are all added tokens that it writes in a user's turn, and the
    first added tokens that it writes before and after an answer. Other added tokens of an answer,
    such as <think>, are words that a text may contain.

    Args:
        render: renders turns with the template.
        tokenizer: the tokens to search for are its added tokens.

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
        return tokenizer.spelled  # the template refuses this sequence of turns

    added = tokenizer.added
    _, _, end = whole.rpartition(_ANSWER)
    written = _LIKE_A_TOKEN.match(end.lstrip())
    if written is not None and added.match(written[0]) is None:
        raise DataError(
            f"the chat template ends a turn with {written[0]!r}, which is not a token of "
            f"{tokenizer.path}, so it would be learned as ordinary text and not stop generation; "
            "name it in added_tokens_decoder of a tokenizer_config.json beside the tokenizer, or "
            "give another template"
        )
    texts = set(added.findall(question))
    texts |= set(added.findall(prompt.removeprefix(question))[:1])
    texts |= set(added.findall(end)[:1])
    texts = {text for text in texts if not text.isspace() and not tokenizer.is_paired(text)}
    return tokenizer.search_for(texts)
