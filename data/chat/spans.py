"""Map character ranges of turns to tokens. A text has T tokens.

The template determines the loss mask in characters, and this module applies it to tokens. No mask
is right for a token that lies only partly in a turn: with loss, the model would learn to write a
part of the next turn; without loss, a part of the answer would not be learned. Such tokens are
returned separately, and the conversation is refused.
"""

import re
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from data.chat.rows import Conversation
from data.tokenizer import HuggingFaceTokenizer

Spans = list[tuple[int, int]]
"""Character ranges [begin, end) of a text."""


def spans_between(text: str, marks: Sequence[str]) -> tuple[str, Spans | None]:
    """Remove begin and end marks from a text; return the rest and the spans between the marks.

    The spans are None if begin and end marks do not alternate.
    """
    begin, end = marks[:2]
    pieces = re.split(f"([{begin}{end}])", text)
    unmarked = "".join(pieces[::2])
    if pieces[1::2] != [begin, end] * (len(pieces) // 4):
        return unmarked, None
    lengths_before = list(accumulate(map(len, pieces[::2])))  # characters before each mark
    return unmarked, list(zip(lengths_before[::2], lengths_before[1::2], strict=False))


def tokens_of(offsets: np.ndarray, spans: Spans, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens touch the spans, and which lie only partly in them, bool [T] each.

    Args:
        offsets: character range [begin, end) of each token, [T, 2].
        spans: character ranges of turns; they may overlap.
        length: number of characters of the text.
    """
    steps = np.zeros(length + 2, dtype=np.int64)
    for begin, end in spans:
        steps[begin] += 1
        steps[end] -= 1
    in_spans = np.cumsum(steps) > 0
    count_before = np.concatenate(([0], np.cumsum(in_spans)))  # [length + 3]: characters in spans

    begins = offsets[:, 0]
    ends = np.maximum(offsets[:, 1], begins + 1)  # an empty token counts as its first character
    covered = count_before[ends] - count_before[begins]
    return covered > 0, (covered > 0) & (covered < ends - begins)


def spans_of_turns(
    spans: Spans, owners: Sequence[int | None], conversation: Conversation
) -> list[Spans] | None:
    """Return the marked spans of each learned turn; None if a span's turn is not known.

    Args:
        spans: spans between generation marks, in order.
        owners: the number of each span's turn; None for a span without any turn's content.
        conversation: the turns, and which are learned.
    """
    learned = conversation.learned
    all_learned = True
    for number, turn in enumerate(conversation.turns):
        if turn["role"] == "assistant" and not learned[number]:
            all_learned = False
    if len(spans) != len(owners):
        return [[span] for span in spans] if all_learned else None

    turns: dict[int | None, Spans] = {}
    current = None
    for (begin, end), owner in zip(spans, owners, strict=True):
        if owner is not None:
            current = owner
        elif begin < end and not all_learned:
            return None
        # A span without an owner may hold the last token of the turn before it.
        if current is None or learned[current]:
            turns.setdefault(current, []).append((begin, end))
    return list(turns.values())


def turn_ends(
    tokenizer: HuggingFaceTokenizer,
    ids: Sequence[int],
    offsets: np.ndarray,
    spans: Spans,
    text: str,
) -> list[int]:
    """Return the ids of the added tokens that end the spans, ignoring trailing white space."""
    ends = []
    for begin, end in spans:
        token = int(np.searchsorted(offsets[:, 0], end)) - 1
        while token >= 0 and offsets[token, 0] >= begin:
            if text[slice(*offsets[token])].strip():
                break
            token -= 1
        if token >= 0 and offsets[token, 0] >= begin and ids[token] in tokenizer.added_ids:
            ends.append(ids[token])
    return ends
