"""Prompts of RULER's questions: from a question to a model's tokens, and back."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.chat.template import ChatTemplate
from data.tokenizer import HuggingFaceTokenizer, Tokenizer
from tools.ruler.tasks import Question

CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Prompts:
    """Turns questions into a model's tokens, and its tokens into text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    """Chat template; None for a base model, whose prompt is one text: the question, then the
    beginning of the answer."""
    begin: tuple[int, ...] = ()
    """Tokens that precede the text of a base model's prompt, such as a begin token."""

    def ids(self, question: Question, answer: str = "") -> list[int]:
        """Return the tokens of a question's prompt, followed by those of ``answer``.

        Raises DataError if the chat template fails.
        """
        if self.template is None:
            text = question.text + question.prefix + answer
            return [*self.begin, *self.tokenizer.tokenize(text)]
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)  # load_template needs it
        turn = {"role": "user", "content": question.text}
        prompt = self.template.render([turn], prompt=True)
        return self.tokenizer.tokenize_special(prompt + question.prefix + answer)[0]

    def with_answer(self, question: Question) -> tuple[list[int], int]:
        """Return the tokens of a prompt followed by all answers, and the prompt's number of tokens.

        The prompt counts as ended at the first token that the answers change.
        """
        prompt = self.ids(question)
        with_answers = self.ids(question, answer_of(question))
        for index, (a, b) in enumerate(zip(prompt, with_answers, strict=False)):
            if a != b:
                return with_answers, index

        return with_answers, len(prompt)

    @property
    def ends(self) -> set[int]:
        """Ids of the tokens at which an answer ends, so that generation stops there."""
        if self.template is None:
            return {self.tokenizer.eod}

        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
        prompt = self.template.render(turns[:1], prompt=True)
        answer = self.template.render(turns).removeprefix(prompt)
        # The first added token after the answer's text ends the turn, even if no file marks that
        # token as special.
        after_text = self.tokenizer.added.findall(answer.rpartition("Hi")[2])
        names = self.tokenizer.special.findall(answer) + after_text[:1]
        ids = [self.tokenizer.tokenize_special(name)[0][0] for name in names]
        return {self.tokenizer.eod, *ids}

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a model's tokens, stripped, with control characters as line breaks.

        Tokens that pad the vocabulary have no text.
        """
        in_vocabulary = [token for token in ids if token < self.tokenizer.vocab_size]
        return CONTROL.sub("\n", self.tokenizer.detokenize(in_vocabulary)).strip()


def answer_of(question: Question) -> str:
    """Return all answers as one text that can follow the question's prefix."""
    answers = " ".join(question.answers)
    if question.prefix.endswith(" "):
        return answers
    return f" {answers}"


def fill(room: int, tokens: Callable[[int], int], min_size: int, guess: int, each: float) -> int:
    """Return the largest size with at most ``room`` tokens; ``min_size`` if even that has more.

    ``tokens`` maps a size to its number of tokens; ``guess`` is the size to try first.

    The search is a bisection whose first steps follow the estimate of ``each`` tokens per piece,
    since tokenizing takes long and the estimate is good.
    """
    low = min_size - 1  # largest size that fits so far, or one below the smallest
    high: int | None = None  # smallest size so far that does not fit
    size = guess
    steps = 0
    while high is None or high - low > 1:
        slack = room - tokens(size)
        steps += 1
        if slack >= 0:
            low = size
            size += int(slack / each)
        else:
            high = size
            size -= int(-slack / each) + 1

        if high is None:
            size = max(low + 1, size)
            continue
        if steps > 6:
            size = (low + high) // 2
        size = max(low + 1, min(high - 1, size))

    return max(low, min_size)
