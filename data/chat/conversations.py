"""Chat templates that can be chosen by name, and the training of tokenizers for them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.chat.rows import conversation_of
from data.text.corpus import Row
from runtime.errors import DataError
from runtime.files import write_text


@dataclass(frozen=True, kw_only=True)
class NamedTemplate:
    """A published chat template with its special tokens."""

    source: str
    special: tuple[str, ...]
    begin: str | None
    """Token that begins a text (bos_token); None without such a token."""
    end: str
    """Token that ends a turn (eos_token), at which generation stops."""


NAMED = {
    "chatml": NamedTemplate(
        source="{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}",
        special=("<|im_start|>", "<|im_end|>"),
        begin=None,
        end="<|im_end|>",
    ),
    "llama3": NamedTemplate(
        source="{% for message in messages %}{% set content = '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
        "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        begin="<|begin_of_text|>",
        end="<|eot_id|>",
    ),
}


def train_chat_tokenizer(
    rows: Iterable[Row], skip_refused: bool, folder: Path, vocab_size: int, name: str
) -> Path:
    """Train a byte-level BPE tokenizer on conversations, for the template NAMED[name].

    Training uses the first 8 million characters. The folder gets a tokenizer.json, whose path is
    returned, and a tokenizer_config.json, so that the transformers library can load it.

    Raises DataError if a conversation cannot be used (unless `skip_refused`), if `vocab_size` is
    too small for the 256 bytes and the special tokens, or if the conversations yield fewer than
    `vocab_size` entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # Imported here because it loads numpy, which --help does not need to list the templates.
    from data.tokenizer import to_train_on

    template = NAMED[name]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    min_entries = len(alphabet) + len(template.special)
    if vocab_size < min_entries:
        raise DataError(
            f"vocab_size is {vocab_size}, but 256 bytes and the special tokens of {name} take "
            f"{min_entries} entries; give --vocab-size {min_entries} or more"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(template.special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    texts = to_train_on(_texts(rows, skip_refused))
    backend.train_from_iterator(list(texts), trainer)
    entries = backend.get_vocab_size()
    if entries < vocab_size:
        raise DataError(
            f"vocab_size is {vocab_size}, but the conversations yield only {entries} entries; give "
            f"--vocab-size {entries} or less"
        )

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": template.end,
        "pad_token": template.end,
        **({} if template.begin is None else {"bos_token": template.begin}),
        "clean_up_tokenization_spaces": False,
        "chat_template": template.source,
    }
    path = folder / "tokenizer.json"
    write_text(path, backend.to_str())
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    return path


def _texts(rows: Iterable[Row], skip_refused: bool) -> Iterator[str]:
    """Yield every text of the conversations."""
    for where, row in rows:
        try:
            conversation = conversation_of(row)
            yield from [text for _, _, text in conversation.texts()]
        except DataError as error:
            if not skip_refused:
                raise DataError(f"{where}: {error}") from error
