"""Write a tiny model of random weights that learns to retrieve in minutes.

Its files have the format of the transformers library. Its tokens are the words of short lines
(line_retrieval in the small vocabulary), or of RULER's needles in built-in sentences. In a line,
the name, the value and the line's end are one token each, and the chat template ends a question
with the name that it asks about. In needles, a token is a word with the space before it, a
punctuation mark, or up to three digits, so a number takes three tokens; the words between a key and
its number are dropped, both in a needle and before an answer. Either way, the answer directly
follows its key in the text, a pattern that two layers can learn.
"""

import string
import tomllib
from pathlib import Path
from typing import Any

from model.families import FAMILIES
from model.hf.folder import new_folder
from runtime.errors import UserError
from tools.ruler.lines import ADJECTIVES, NAME, NOUNS, VALUES
from tools.ruler.tasks import TASKS, RulerCase, Sources
from tools.ruler.texts import NOISE, SENTENCES, below, distinct, name, names, wordlists

HEADS = 4
UNKNOWN = "<|unknown|>"
USER = "<|user|>"
END = "<|end|>"
PIECES = r" ?[A-Za-z]+-?| ?\d{1,3}|\s|[^\s\w]"
BETWEEN = r" is:(?= \d)| mentioned in the provided text is"
LEARNED = (
    "niah_single_1",
    "niah_single_2",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multivalue",
    "niah_multiquery",
)
"""Tasks that the tokenizer of needles covers: RULER's needle tasks without UUIDs."""
MAX_NAMES = 6
"""Maximum number of names in a conversation of ``repeated``."""
OF_FILE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
SHAPES: dict[str, dict[str, Any]] = OF_FILE["shapes"]
"""Settings that a family's transformers configuration needs in addition to the sizes, keyed by
model_type."""


def write_model(
    folder: Path, hidden_size: int, seed: int, task: str, model_type: str | None
) -> str:
    """Write model, tokenizer and chat template; return a description.

    Args:
        task: "line_retrieval" or "niah"; the tokenizer has the words of this task.
        model_type: a key of ``SHAPES``; None is the first.

    Raises UserError if the folder exists, a setting is invalid, or transformers is not installed.
    """
    family = model_type or next(iter(SHAPES))
    if family not in SHAPES:
        raise UserError(f"model_type is {family}; it must be one of {', '.join(SHAPES)}")
    if hidden_size % (2 * HEADS):
        raise UserError(
            f"hidden_size is {hidden_size}; it must be a multiple of {2 * HEADS}, since each of "
            f"{HEADS} heads must have an even size for rope"
        )

    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    except ImportError as error:
        raise UserError(
            "transformers, which writes the model, is not installed; install it: pip install "
            "transformers (make venv EXTRAS=dev)"
        ) from error

    is_lines = task == NAME
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_words() if is_lines else tokenizer_of_needles(),
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER],
    )
    tokenizer.chat_template = OF_FILE["template"]

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        FAMILIES[family].hugging_face[0].kind,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=not is_lines,
        **SHAPES[family],
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    with new_folder(folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"wrote {folder}: {num_parameters:,} parameters, {len(tokenizer):,} tokens"


def tokenizer_of_words() -> Any:
    """Return a `tokenizers.Tokenizer` whose tokens are the short lines' names and values."""
    from tokenizers import Regex, pre_tokenizers

    before_value = Regex(r" (?=\S+\n)")  # the space before a line's last word
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("?", "removed"),
            pre_tokenizers.Split(before_value, "removed"),
            pre_tokenizers.Split("; ", "removed"),
            pre_tokenizers.Split("\n", "isolated"),
        ]
    )
    names = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return _tokenizer(split, ["\n", *VALUES, *names])


def tokenizer_of_needles() -> Any:
    """Return a `tokenizers.Tokenizer` for the words and numbers of the tasks in ``LEARNED``."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BETWEEN), "removed"),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
        ]
    )
    pieces: set[str] = set()
    for text in _needle_texts():
        pieces.update(piece for piece, _ in split.pre_tokenize_str(text))

    tokenizer = _tokenizer(split, sorted(pieces))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _needle_texts() -> list[str]:
    """Return texts that together contain every token of the needle tasks."""
    texts = []
    for shape in (NOISE, *SENTENCES):
        sentence = shape.replace("{", "").replace("}", "")
        texts += [sentence, f" {sentence}"]  # with the space that follows another sentence

    adjectives, nouns, verbs = wordlists()
    texts += nouns
    for word in (*adjectives, *nouns, *verbs):
        texts.append(f" {word}")

    for word in adjectives:
        texts.append(f" {word}-")

    for task in LEARNED:
        question = TASKS[task].make(RulerCase("words", 0, 1024, Sources()), 1)
        texts.append(question.text + question.prefix)

    texts.append("\n")

    # The pieces of a number: its first three digits, three further ones, the last one.
    for number in range(1000):
        texts.append(f"{number:03}")
        if number >= 100:
            texts.append(f" {number}")

    texts += string.digits
    return texts


def _tokenizer(split: Any, words: list[str]) -> Any:
    from tokenizers import Tokenizer, models

    numbers = {word: number for number, word in enumerate([UNKNOWN, USER, END, *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    return tokenizer


def repeated(sample: int, seed: int, times: int) -> list[dict[str, str]]:
    """Return a conversation: 2 to 6 names, some with a number, then the same ``times`` times."""
    draw = f"repeat:{seed}:{sample}"
    size = 2 + below(draw, MAX_NAMES - 1, "names", 0)
    text = ""
    for index, key in enumerate(distinct(draw, size, names(2), "key")):
        text += f" {name(key, 2)}"
        if below(draw, 2, "valued", index):
            text += f" {10**6 + below(draw, 9 * 10**6, 'value', index)}."

    return [{"role": "user", "content": text}, {"role": "assistant", "content": text * times}]
