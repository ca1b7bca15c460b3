"""Questions to a model of conversations by its chat template, and what it answers."""

import sys
from collections.abc import Callable, Sequence

from data.chat.rows import Turn, said
from data.chat.template import ChatTemplate
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError
from runtime.together import from_first, is_first

Answer = Callable[[list[int]], str]
"""The tokens of a prompt -> the text of the answer; collective."""


def asked(template: ChatTemplate, tokenizer: HuggingFaceTokenizer, turns: Sequence[Turn]) -> list[int]:
    """Return the tokens of a conversation with what precedes the answer.

    Raises DataError: a turn spells a special token, or the template fails.
    """
    template.refuse_spelled(tokenizer, said([turn for turn in turns if turn["role"] != "assistant"]))
    return tokenizer.tokenize_special(template.render(turns, prompt=True))[0]


def talk(template: ChatTemplate, tokenizer: HuggingFaceTokenizer, turns: Sequence[Turn], answer: Answer) -> None:
    """Read questions from the terminal of the first rank, a line each, and print the answers; collective.

    Ends with the input. The model is given all that was said before.
    """
    turns = list(turns)
    while (line := from_first(_line)) is not None:
        if not line.strip():
            continue
        question = [*turns, {"role": "user", "content": line}]
        try:
            prompt = asked(template, tokenizer, question)
        except DataError as error:
            if is_first():
                print(f"error: {error}", file=sys.stderr)
            continue
        text = answer(prompt)
        if is_first():
            print(text, flush=True)
        turns = [*question, {"role": "assistant", "content": text}]


def _line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None
