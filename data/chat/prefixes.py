"""The assistant's turns in the text of a conversation, by prefixes of it, in time that grows as the
text does.

A turn is what the conversation through it adds to the conversation before it with the generation
prompt, if both are prefixes of the whole. To write every prefix of a conversation of n turns takes
time of n squared. So in a long one the first turns and some others, at most a few dozen, are
compared with prefixes. Every turn, of all, is written as the last one of a short conversation, of
the turns around it, and what that adds must stand where the turn is expected. A conversation for
which anything of this does not hold is compared with every prefix.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from data.chat.rows import Conversation, Turn
from runtime.bounds import UnboundedError
from runtime.errors import DataError

Render = Callable[[Sequence[Turn], bool], str]
"""Turns, and whether the generation prompt follows -> their text."""
Bounds = tuple[int, int]
"""Ends of the text before a turn, and of the text through it."""
ALL_COMPARED = 32
"""Turns up to which each prefix is compared."""
_SHARES = 8
_AROUND = 6
"""Turns before the previous answer among which its question is looked for."""


def spans_by_prefixes(
    render: Render, conversation: Conversation, text: str
) -> dict[int, Bounds] | int:
    """Return the characters [begin, end) of each learned turn, or the first one for which prefixes
    do not hold.
    """
    bounds = None
    if len(conversation.turns) > ALL_COMPARED:
        bounds = _by_windows(render, conversation.turns, text)
    spans: dict[int, Bounds] = {}
    for number, learned in enumerate(conversation.learned):
        if not learned:
            continue
        whole = (
            _compared(render, conversation.turns, number, text)
            if bounds is None
            else bounds[number]
        )
        if whole is None:
            return number
        begin, end = whole
        while end > begin and text[end - 1].isspace():
            end -= 1
        spans[number] = begin, end
    return spans


def _compared(render: Render, turns: Sequence[Turn], number: int, text: str) -> Bounds | None:
    """Return a turn's bounds by the prefixes before and through it; None if they are no prefixes."""
    before, through = render(turns[:number], True), render(turns[: number + 1], False)
    if not text.startswith(through) or not through.startswith(before):
        return None
    return len(before), len(through)


def _by_windows(render: Render, turns: Sequence[Turn], text: str) -> dict[int, Bounds] | None:
    """Return the bounds of the assistant's turns, most of them by the turns around; None if
    anything does not hold.
    """
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    compared = _compared_answers(answers, len(turns))
    bounds: dict[int, Bounds] = {}
    for previous, number in pairwise([-1, *answers]):
        by_prefix = None
        if number in compared:
            by_prefix = _compared(render, turns, number, text)
            if by_prefix is None:
                return None
        if number < ALL_COMPARED or previous < 0:
            by_window = by_prefix
        else:
            by_window = _by_window(render, turns, previous, number, text, bounds[previous][1])
        if by_window is None or by_prefix not in (None, by_window):
            return None
        bounds[number] = by_window
    return bounds


def _compared_answers(answers: Sequence[int], count: int) -> set[int]:
    """Return answers to compare with prefixes, whose lengths add up to a few times that of all."""
    wanted = [count * share // _SHARES for share in range(1, _SHARES)]
    wanted += [1 << power for power in range(count.bit_length())]
    chosen = (
        {number for number in answers if number < ALL_COMPARED}
        | set(answers[:1])
        | set(answers[-2:])
    )
    for limit in wanted:
        chosen |= set([number for number in answers if number <= limit][-1:])
    return chosen


def _by_window(
    render: Render, turns: Sequence[Turn], previous: int, number: int, text: str, offset: int
) -> Bounds | None:
    """Return a turn's bounds by a short conversation that it ends; None if the text goes on
    otherwise.

    ``offset`` is where the text through the ``previous`` answer ends.
    """
    around = _around(turns, previous)
    window = [turns[place] for place in (*around, *range(around[-1] + 1, number + 1))]
    try:
        through_previous = render(window[: len(around)], False)
        before, through = render(window[:-1], True), render(window, False)
    except UnboundedError:
        raise
    except DataError:  # a template that wants other turns around
        return None
    if not through.startswith(before) or not before.startswith(through_previous):
        return None
    start = len(through_previous)
    if not text.startswith(through[start:], offset):
        return None
    return offset + len(before) - start, offset + len(through) - start


def _around(turns: Sequence[Turn], previous: int) -> list[int]:
    """Return the numbers of a few turns that end with the ``previous`` answer: what the system
    says, and a question.
    """
    leading = 0
    while turns[leading]["role"] in ("system", "developer"):
        leading += 1
    start = previous
    while start > leading and turns[start]["role"] != "user" and previous - start < _AROUND:
        start -= 1
    head = list(range(leading))
    if turns[start]["role"] != "user":  # amid calls of tools: from an answer on, after the question
        while turns[start]["role"] != "assistant":
            start += 1
        question = start - 1
        while question >= leading and turns[question]["role"] != "user":
            question -= 1
        head += [question] if question >= leading else []
    return [*head, *range(start, previous + 1)]
