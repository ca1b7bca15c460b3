"""Files of a chat model's folder: the chat template, and the tokens that end a turn."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.hf.entries import read_json, write_json
from model.hf.folder import TOKENIZER_FILES, inside

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
EOS = "eos_token_id"
_ADDITIONAL = "additional_chat_templates"


def eos_ids(contents: Mapping[str, Any]) -> list[int]:
    """Return the token ids that end generation, from a config.json or generation_config.json."""
    ids = contents.get(EOS)
    if not isinstance(ids, list):
        ids = [ids]
    return [token for token in ids if type(token) is int]


def generation_ends(folder: Path) -> list[int]:
    """Return the token ids at which transformers ends generation with the model in a folder.

    Raises:
        UserError: one of the files cannot be read.
    """
    for name in (GENERATION, "config.json"):
        if (folder / name).is_file():
            ids = eos_ids(read_json(inside(folder, name)))
            if ids:
                return ids
    return []


def write_chat(folder: Path, chat: Mapping[str, Any], contents: Mapping[str, Any]) -> list[int]:
    """Write the chat template and the end-of-turn tokens into a model's folder.

    Args:
        chat: chat settings of a checkpoint: chat_template (may be None), tool_use and ends.
        contents: contents of config.json.

    Returns:
        The token ids that end generation: the end-of-turn tokens, then the ids that the folder had.

    Raises:
        UserError: a file in the folder is not a JSON object.
    """
    settings = {}
    if (folder / GENERATION).is_file():
        settings = read_json(folder / GENERATION)
    # Copy the ids from config.json, since transformers ignores them there if this file exists.
    for name in ("bos_token_id", "pad_token_id"):
        if name not in settings and contents.get(name) is not None:
            settings[name] = contents[name]

    previous_ends = eos_ids(settings) or eos_ids(contents)
    ends = list(dict.fromkeys([*chat["ends"], *previous_ends]))
    if ends:
        settings[EOS] = ends[0] if len(ends) == 1 else ends
        write_json(folder / GENERATION, settings, ensure_ascii=False)
    if chat["chat_template"] is not None:
        _write_template(folder, chat["chat_template"], chat["tool_use"])
    return ends


def _write_template(folder: Path, template: str, tool_use: str | None) -> None:
    """Write the templates, and remove templates in older formats, which could take precedence."""
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    if tool_use is not None:
        (folder / _ADDITIONAL).mkdir()
        (folder / _ADDITIONAL / "tool_use.jinja").write_text(tool_use, encoding="utf-8")
    if (folder / TOKENIZER_CONFIG).is_file():
        config = read_json(folder / TOKENIZER_CONFIG)
        if config.pop("chat_template", None) is not None:
            write_json(folder / TOKENIZER_CONFIG, config, ensure_ascii=False)


def carry_tokenizer(source: Path, target: Path) -> None:
    """Copy only the tokenizer's files, replacing the target's.

    Raises:
        UserError: a file is a link that leaves the source folder.
    """
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(inside(source, name), target / name)
