"""A tiny model of random weights, in a folder that transformers wrote, which learns to retrieve in
minutes.

Its tokens are words of short lines, or of RULER's needles in built-in sentences. Of lines a name, a
value and the end are a token each, and by the chat template a question ends with the name that it
asks for. Of needles a token is a word with the space before it, a mark, or up to three digits, so
that a number is three tokens; what stands between a key and its number, in a needle and before an
answer, is none. Either way the answer is what followed the key before, which two layers can learn.
"""

import tomllib
from pathlib import Path
from typing import Any

from model.families import FAMILIES
from model.hf.folder import new_folder
from runtime.errors import UserError
from tools.ruler.lines import ADJECTIVES, NAME, NOUNS, VALUES
from tools.ruler.tasks import TASKS, Case, Sources
from tools.ruler.texts import NOISE, SENTENCES, below, distinct, name, names, wordlists

HEADS = 4
UNKNOWN, USER, END = "<|unknown|>", "<|user|>", "<|end|>"
PIECES = r" ?[A-Za-z]+-?| ?\d{1,3}|\s|[^\s\w]"
BETWEEN = r" is:(?= \d)| mentioned in the provided text is"
LEARNED = (
    "niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery"
)  # fmt: skip
"""The needle tasks without UUIDs."""
OF_FILE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
SHAPES: dict[str, dict[str, Any]] = OF_FILE["shapes"]
"""Settings of transformers' that a family needs beside sizes, by model_type."""


def write_model(
    folder: Path, hidden_size: int, seed: int, task: str, model_type: str | None
) -> str:
    """Write model, tokenizer and chat template; return what was written. Raises UserError if the
    folder exists.

    ``task`` is line_retrieval or niah, whose words the tokenizer has; ``model_type`` is one of
    ``SHAPES``, by default the first.
    """
    family = model_type or next(iter(SHAPES))
    if family not in SHAPES:
        raise UserError(f"model_type is {family}; it must be one of {', '.join(SHAPES)}")
    if hidden_size % (2 * HEADS):
        raise UserError(
            f"hidden_size is {hidden_size}; it must be a multiple of {2 * HEADS}: {HEADS} heads, even for rope"
        )
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    except ImportError as error:
        raise UserError(
            "a model is written by transformers: pip install transformers (make venv EXTRAS=dev)"
        ) from error
    lines = task == NAME
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_words() if lines else tokenizer_of_needles(),
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
        tie_word_embeddings=not lines,
        **SHAPES[family],
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    with new_folder(folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return f"wrote {folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens"


def tokenizer_of_words() -> Any:
    """Return a `tokenizers.Tokenizer` of the short lines' words."""
    from tokenizers import Regex, pre_tokenizers

    names = (f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS)
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("?", "removed"),
            pre_tokenizers.Split(
                Regex(r" (?=\S+\n)"), "removed"
            ),  # before a line's last word, its value
            pre_tokenizers.Split("; ", "removed"),
            pre_tokenizers.Split("\n", "isolated"),
        ]
    )
    return _tokenizer(split, ["\n", *VALUES, *names])


def tokenizer_of_needles() -> Any:
    """Return a `tokenizers.Tokenizer` that knows all of the tasks whose values are numbers."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BETWEEN), "removed"),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
        ]
    )
    adjectives, nouns, verbs = wordlists()
    made = [
        task.make(Case("words", 0, 1024, Sources()), 1)
        for known, task in TASKS.items()
        if known in LEARNED
    ]
    texts = [NOISE, *(shape.replace("{", "").replace("}", "") for shape in SENTENCES)]
    texts += [f" {text}" for text in texts]  # first in the haystack, and after another
    texts += [
        *nouns,
        *(f" {word}" for word in (*adjectives, *nouns, *verbs)),
        *(f" {word}-" for word in adjectives),
    ]
    texts += [question.text + question.prefix for question in made] + ["\n"]
    texts += (
        [f" {n}" for n in range(100, 1000)]
        + [f"{n:03}" for n in range(1000)]
        + [str(n) for n in range(10)]
    )
    tokenizer = _tokenizer(
        split, sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text)})
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _tokenizer(split: Any, words: list[str]) -> Any:
    from tokenizers import Tokenizer, models

    known = {word: number for number, word in enumerate([UNKNOWN, USER, END, *words])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    return tokenizer


def repeated(sample: int, seed: int, times: int) -> list[dict[str, str]]:
    """Return a conversation that says 2 to 6 names again so often, some with a number."""
    draw, most = f"repeat:{seed}:{sample}", 6
    keys = distinct(draw, 2 + below(draw, most - 1, "names", 0), names(2), "key")
    valued = [below(draw, 2, "valued", place) for place in range(most)]
    numbers = [
        f" {10**6 + below(draw, 9 * 10**6, 'value', place)}." * valued[place]
        for place in range(most)
    ]
    text = "".join(f" {name(key, 2)}{number}" for key, number in zip(keys, numbers, strict=False))
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text * times}]
