"""A tokenizer of the words of RULER's needles in built-in sentences, for a tiny model that learns them in minutes.

A token is a word with the space before it, a mark, or up to three digits, so that a needle's number is three tokens.
What stands between a key and its number, in a needle and before an answer, is none: the answer is what followed the
key before, which two layers can learn.
"""

from typing import Any

from data.drawn import below, distinct
from data.ruler.tasks import TASKS, Case, Sources
from data.ruler.texts import NOISE, SENTENCES, name, names, wordlists
from tools.line_retrieval.tiny import END, UNKNOWN, USER

PIECES = r" ?[A-Za-z]+-?| ?\d{1,3}|\s|[^\s\w]"
BETWEEN = r" is:(?= \d)| mentioned in the provided text is"


def tokenizer_of_needles() -> Any:
    """Return a `tokenizers.Tokenizer` that knows all of the tasks whose values are numbers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(BETWEEN), "removed"), pre_tokenizers.Split(Regex(PIECES), "isolated")]
    )
    adjectives, nouns, verbs = wordlists()
    made = [task.make(Case("words", 0, 1024, Sources()), 1) for known, task in TASKS.items() if known in LEARNED]
    texts = [NOISE, *(shape.replace("{", "").replace("}", "") for shape in SENTENCES)]
    texts += [f" {text}" for text in texts]  # first in the haystack, and after another
    texts += [*nouns, *(f" {word}" for word in (*adjectives, *nouns, *verbs)), *(f" {word}-" for word in adjectives)]
    texts += [question.text + question.prefix for question in made] + ["\n"]
    texts += [f" {n}" for n in range(100, 1000)] + [f"{n:03}" for n in range(1000)] + [str(n) for n in range(10)]
    pieces = sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text)})
    words = [UNKNOWN, USER, END, *pieces]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
    return tokenizer


def repeated(sample: int, seed: int, times: int) -> list[dict[str, str]]:
    """Return a conversation that says 2 to 6 names again so often, some with a number."""
    draw, most = f"repeat:{seed}:{sample}", 6
    keys = distinct(draw, 2 + below(draw, most - 1, "names", 0), names(2), "key")
    valued = [below(draw, 2, "valued", place) for place in range(most)]
    numbers = [f" {10**6 + below(draw, 9 * 10**6, 'value', place)}." * valued[place] for place in range(most)]
    text = "".join(f" {name(key, 2)}{number}" for key, number in zip(keys, numbers, strict=False))
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text * times}]


LEARNED = (
    "niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery"
)  # fmt: skip
"""The needle tasks without UUIDs."""
