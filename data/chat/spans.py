"""Characters of a text that belong to turns, and the tokens that they are. T tokens."""

import re
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from data.chat.rows import Conversation
from data.tokenizer import HuggingFaceTokenizer

Spans = list[tuple[int, int]]
"""Characters [begin, end) of a text."""


def between(text: str, marks: Sequence[str]) -> tuple[str, Spans | None]:
    """Return a text without its first two marks, and what is between them; None if they do not
    alternate.
    """
    begin, end = marks[:2]
    pieces = re.split(f"([{begin}{end}])", text)
    unmarked = "".join(pieces[::2])
    if pieces[1::2] != [begin, end] * (len(pieces) // 4):
        return unmarked, None
    before = list(accumulate(map(len, pieces[::2])))  # the characters before each mark
    return unmarked, list(zip(before[::2], before[1::2], strict=False))


def tokens_of(offsets: np.ndarray, spans: Spans, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens of ``offsets`` [T, 2] lie in the spans, and which lie there in part, bool
    [T] each.
    """
    steps = np.zeros(length + 2, dtype=np.int64)
    for begin, end in spans:
        steps[begin] += 1
        steps[end] -= 1
    inside = np.concatenate(
        ([0], np.cumsum(np.cumsum(steps) > 0))
    )  # [length + 3]: characters of spans before each
    begins, ends = (
        offsets[:, 0],
        np.maximum(offsets[:, 1], offsets[:, 0] + 1),
    )  # empty ones as their first character
    covered = inside[ends] - inside[begins]
    return covered > 0, (covered > 0) & (covered < ends - begins)


def spans_of_turns(
    spans: Spans, owners: Sequence[int | None], conversation: Conversation
) -> list[Spans] | None:
    """Return the marked spans of each learned turn; None if it cannot be told of which turn one is."""
    learned = conversation.learned
    every = all(
        learned[number]
        for number, turn in enumerate(conversation.turns)
        if turn["role"] == "assistant"
    )
    if len(spans) != len(owners):
        return [[span] for span in spans] if every else None
    if not every and any(
        owner is None and begin < end for owner, (begin, end) in zip(owners, spans, strict=True)
    ):
        return None
    turns: dict[int | None, Spans] = {}
    owner = None
    for span, turn in zip(spans, owners, strict=True):
        owner = (
            owner if turn is None else turn
        )  # one that ends a turn, as around its last token, follows it
        if owner is None or learned[owner]:
            turns.setdefault(owner, []).append(span)
    return list(turns.values())


def turn_ends(
    tokenizer: HuggingFaceTokenizer,
    ids: Sequence[int],
    offsets: np.ndarray,
    spans: Spans,
    text: str,
) -> list[int]:
    """Return the added token that each span ends with, white space left out, if it ends with one."""
    ends = []
    for begin, end in spans:
        token = int(np.searchsorted(offsets[:, 0], end)) - 1
        while (
            token >= 0 and offsets[token, 0] >= begin and not text[slice(*offsets[token])].strip()
        ):
            token -= 1
        if token >= 0 and offsets[token, 0] >= begin and ids[token] in tokenizer.added_ids:
            ends.append(ids[token])
    return ends
