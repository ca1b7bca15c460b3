"""Find the assistant's turns in a conversation's text by rendering prefixes, in linear time.

An answer's text is the difference of two renderings: the turns up to and including the answer, and
the turns before it with the generation prompt. Both must be prefixes of the whole text. Rendering
every prefix of a conversation of n turns takes time proportional to n squared, which is too slow
for conversations with hundreds of tool calls.

So only the first turns of a long conversation and a few dozen others are compared with prefixes.
Each answer after the first turns, compared or not, is rendered as the last turn of a short window
of turns, and the text that it adds there must occur at the expected offset of the whole text. If
any of these checks fails, the conversation is compared with every prefix, so the result never
relies only on windows.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from data.chat.rows import Conversation
from data.chat.turns import Turn
from runtime.bounds import UnboundedError
from runtime.errors import DataError

Render = Callable[[Sequence[Turn], bool], str]
"""Maps turns, and whether the generation prompt follows, to their text."""
Bounds = tuple[int, int]
"""Offsets in the rendered text at which a turn starts and ends."""
ALL_COMPARED = 32
"""Number of turns at the start of a conversation for which every prefix is compared."""
_SHARES = 8
_AROUND = 6
"""Maximum number of turns to go back from an answer to a question at which a window starts."""


def spans_by_prefixes(
    render: Render, conversation: Conversation, text: str
) -> dict[int, Bounds] | int:
    """Return the character range [begin, end) of each learned turn, keyed by the turn's number.

    If a turn's text is not the difference of its two prefixes, return that turn's number instead.
    """
    bounds = None
    if len(conversation.turns) > ALL_COMPARED:
        bounds = _by_windows(render, conversation.turns, text)
    spans: dict[int, Bounds] = {}
    for number, learned in enumerate(conversation.learned):
        if not learned:
            continue
        if bounds is None:
            turn_bounds = _compared(render, conversation.turns, number, text)
        else:
            turn_bounds = bounds[number]
        if turn_bounds is None:
            return number
        begin, end = turn_bounds
        while end > begin and text[end - 1].isspace():
            end -= 1
        spans[number] = begin, end
    return spans


def _compared(render: Render, turns: Sequence[Turn], number: int, text: str) -> Bounds | None:
    """Return a turn's bounds from two renderings; None if these are not prefixes of the text."""
    text_before = render(turns[:number], True)
    text_through = render(turns[: number + 1], False)
    if not text.startswith(text_through) or not text_through.startswith(text_before):
        return None
    return len(text_before), len(text_through)


def _by_windows(render: Render, turns: Sequence[Turn], text: str) -> dict[int, Bounds] | None:
    """Return the bounds of the assistant's turns, keyed by turn number; None if a check fails."""
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    answers_to_compare = _compared_answers(answers, len(turns))
    bounds: dict[int, Bounds] = {}
    for previous, number in pairwise([-1, *answers]):
        by_prefix = None
        if number in answers_to_compare:
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
    """Return the numbers of the answers to compare with prefixes.

    These are the answers among the first ``ALL_COMPARED`` turns, the first and the last two
    answers, and the last answer before each eighth of the turns and before each power of two. The
    lengths of these prefixes add up to a few times the whole.
    """
    limits = [count * share // _SHARES for share in range(1, _SHARES)]
    limits += [1 << power for power in range(count.bit_length())]
    chosen_answers = {number for number in answers if number < ALL_COMPARED}
    chosen_answers.update(answers[:1], answers[-2:])
    for limit in limits:
        chosen_answers.update([number for number in answers if number <= limit][-1:])
    return chosen_answers


def _by_window(
    render: Render, turns: Sequence[Turn], previous: int, number: int, text: str, offset: int
) -> Bounds | None:
    """Return a turn's bounds from a short conversation (a window) that ends with the turn.

    ``offset`` is the end of the ``previous`` answer in the whole text. Returns None if the whole
    text does not continue there as the window does, or if the template refuses the window.
    """
    numbers = _window_before(turns, previous)
    num_before = len(numbers)
    numbers += range(previous + 1, number + 1)
    window = [turns[index] for index in numbers]
    try:
        text_of_previous = render(window[:num_before], False)
        text_before = render(window[:-1], True)
        text_through = render(window, False)
    except UnboundedError:
        raise
    except DataError:  # the template refuses this selection of turns
        return None

    if not text_through.startswith(text_before) or not text_before.startswith(text_of_previous):
        return None
    start = len(text_of_previous)
    if not text.startswith(text_through[start:], offset):
        return None
    return offset + len(text_before) - start, offset + len(text_through) - start


def _window_before(turns: Sequence[Turn], previous: int) -> list[int]:
    """Return the numbers of a few turns that end with the ``previous`` answer.

    These are the system's turns and the turns from a question on: some templates refuse a
    conversation that begins with an answer, and some write reasoning only after the last question.
    """
    leading = 0
    while turns[leading]["role"] in ("system", "developer"):
        leading += 1
    start = previous
    while start > leading and turns[start]["role"] != "user" and previous - start < _AROUND:
        start -= 1

    head = list(range(leading))
    if turns[start]["role"] != "user":
        # The window would start amid tool calls: start at an answer, preceded by its question.
        while turns[start]["role"] != "assistant":
            start += 1
        question = start - 1
        while question >= leading and turns[question]["role"] != "user":
            question -= 1
        if question >= leading:
            head.append(question)
    return [*head, *range(start, previous + 1)]
