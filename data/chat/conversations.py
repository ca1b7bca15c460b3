"""Turns of conversations, from ShareGPT's and OpenAI's rows; chat templates by name, and tokenizers for them."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text.corpus import Row
from runtime.errors import DataError
from runtime.files import write_text

Turn = dict[str, str]
"""A `role` and a `content`, as chat templates take them."""

ROLES = {
    "system": "system", "developer": "developer", "tool": "tool",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
}  # fmt: skip
"""Roles of ShareGPT's `from` and OpenAI's `role`, by the name that templates know."""
# What a turn or a conversation may have beside its text, and would lose.
_NOT_TAKEN = ("tool_calls", "function_call", "tools", "functions", "reasoning_content", "reasoning", "audio", "images")
_NO_TEXT = re.compile("[\ud800-\udfff]")


def turns_of(row: Any) -> list[Turn]:
    """Return the turns of a row: ShareGPT's `conversations` of from and value, or `messages` of role and content.

    A row is an object, a list of turns, or the DataError of a broken line.

    Raises DataError: no turns, an empty one, an unknown role, or something that a template would not be given.
    """
    if isinstance(row, DataError):
        raise row
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else row
    if not isinstance(turns, list) or not turns:
        raise DataError('has no turns; give them as a list under "messages" or "conversations"')
    if isinstance(row, dict):
        _refuse_extras("it", row)
        turns = [{"role": "system", "content": row["system"]}, *turns] if row.get("system") else turns
    found = [_turn(f"turn {number}", turn) for number, turn in enumerate(turns, start=1)]
    if all(turn["role"] != "assistant" for turn in found):
        raise DataError("no turn is the assistant's, so that nothing carries loss; leave it out")
    return found


def _turn(where: str, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise DataError(f"{where} is no object with a role and a content; repair it")
    _refuse_extras(where, turn)
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where} has the role {role!r:.40}; it must be one of {', '.join(ROLES)}")
    if isinstance(content, list):  # OpenAI's parts
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{where} has a part that is not text; leave the conversation out")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        raise DataError(f"{where} ({role}) is empty; fill it or leave the conversation out")
    if _NO_TEXT.search(content):
        raise DataError(f"{where} holds a lone surrogate, which is no text; remove it")
    return {"role": ROLES[role], "content": content}


def _refuse_extras(where: str, found: dict[str, Any]) -> None:
    for name in _NOT_TAKEN:
        if found.get(name):
            raise DataError(f"{where} has {name}, which would be lost; leave it or the conversation out")
    if found.get("weight", 1) not in (None, 1):
        raise DataError(
            f"{where} has weight {found['weight']!r:.20}, and every assistant's turn counts as 1; remove it"
        )


@dataclass(frozen=True, kw_only=True)
class NamedTemplate:
    """A published template, and the special tokens that it spells."""

    source: str
    special: tuple[str, ...]
    begin: str | None
    """Token that begins a text, bos_token."""
    end: str
    """Token that ends a turn, at which generation stops: eos_token."""


NAMED = {
    "chatml": NamedTemplate(
        source="{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        special=("<|im_start|>", "<|im_end|>"),
        begin=None,
        end="<|im_end|>",
    ),
    "llama3": NamedTemplate(
        source="{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content "
        "= bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        begin="<|begin_of_text|>",
        end="<|eot_id|>",
    ),
}


def train_chat_tokenizer(rows: Iterable[Row], skip_refused: bool, folder: Path, vocab_size: int, name: str) -> Path:
    """Train a byte-level BPE on the first 8 million characters of conversations, for a template of NAMED.

    Writes the tokenizer.json, whose path is returned, and tokenizer_config.json of a folder that `transformers` loads.

    Raises DataError: a conversation that cannot be used, unless these are skipped, or a `vocab_size` that is too small
    for the 256 bytes and the special tokens, or that the conversations cannot fill.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from data.tokenizer import to_train_on  # imports numpy, and a program's --help names the templates alone

    template, alphabet = NAMED[name], pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(template.special)
    if vocab_size < least:
        raise DataError(f"vocab_size is {vocab_size}; 256 bytes and the special tokens of {name} take {least} entries")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(template.special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for where, row in rows:
            try:
                yield from [turn["content"] for turn in turns_of(row)]
            except DataError as error:
                if not skip_refused:
                    raise DataError(f"{where}: {error}") from error

    backend.train_from_iterator(list(to_train_on(texts())), trainer)
    if (found := backend.get_vocab_size()) < vocab_size:
        raise DataError(f"vocab_size is {vocab_size}, and the conversations fill {found} entries; give that or fewer")
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
