"""Files of a folder that say how a model of conversations is asked, and where its turns end."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.hf.folder import TOKENIZER_FILES, inside, read_json, write_json

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
EOS = "eos_token_id"
_ADDITIONAL = "additional_chat_templates"


def eos_ids(contents: Mapping[str, Any]) -> list[int]:
    """Return the ids at which generation stops, of a config.json or a generation_config.json."""
    ids = contents.get(EOS)
    return [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]


def generation_ends(folder: Path) -> list[int]:
    """Return the ids at which transformers' generation stops with a folder's model. UserError for a
    broken file.
    """
    for name in (GENERATION, "config.json"):
        if (folder / name).is_file() and (ids := eos_ids(read_json(inside(folder, name)))):
            return ids
    return []


def write_chat(folder: Path, chat: Mapping[str, Any], contents: Mapping[str, Any]) -> list[int]:
    """Write the template and the ends of turns into a folder, in the place of those that it has.

    Returns the ids at which generation stops: the ends of turns, and after them those that the
    folder had.

    Args:
        chat: of a checkpoint: chat_template, which may be None, tool_use and ends.
        contents: of config.json.

    Raises:
        UserError: a file of the folder is no JSON object.
    """
    settings = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    for name in (
        "bos_token_id",
        "pad_token_id",
    ):  # transformers takes none from config.json where there is this file
        if name not in settings and contents.get(name) is not None:
            settings[name] = contents[name]
    ends = list(dict.fromkeys([*chat["ends"], *(eos_ids(settings) or eos_ids(contents))]))
    if ends:
        settings[EOS] = ends[0] if len(ends) == 1 else ends
        write_json(folder / GENERATION, settings, ensure_ascii=False)
    if chat["chat_template"] is not None:
        (folder / TEMPLATE).write_text(chat["chat_template"], encoding="utf-8")
        (folder / "chat_template.json").unlink(missing_ok=True)
        if chat["tool_use"] is not None:
            (folder / _ADDITIONAL).mkdir()
            (folder / _ADDITIONAL / "tool_use.jinja").write_text(chat["tool_use"], encoding="utf-8")
        if (folder / TOKENIZER_CONFIG).is_file():
            config = read_json(folder / TOKENIZER_CONFIG)
            if config.pop("chat_template", None) is not None:
                write_json(folder / TOKENIZER_CONFIG, config, ensure_ascii=False)
    return ends


def carry_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer alone, in the place of those that are there. UserError as of
    ``carry``.
    """
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(inside(source, name), target / name)
