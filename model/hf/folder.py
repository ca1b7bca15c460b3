"""Folders of models: copy files, refuse links, and write a new folder completely or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import UserError
from runtime.files import replacing

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
TOKENIZER_FILES = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
CARRIED = (*TOKENIZER_FILES, "chat_template.jinja", "chat_template.json", "generation_config.json")


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; refuse a link that leaves the folder.

    Otherwise a link in a downloaded folder could bring in any file of this machine. Links to the
    blobs of Hugging Face's cache are allowed, since the cached folders consist of them.

    Raises:
        UserError: the file is a link that leaves the folder, or leads nowhere.
    """
    path = folder / name
    if not path.is_symlink():
        return path
    try:
        target = path.resolve(strict=True)
        home = folder.resolve()
    except (OSError, RuntimeError):  # RuntimeError means a loop of links
        raise UserError(f"{path} is a link that leads nowhere; put a file in its place") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, blobs):
        raise UserError(
            f"{path} is a link that leaves its folder, to {target}; put a copy in its place"
        )
    return path


def carry(source: Path, target: Path, *names: str) -> None:
    """Copy tokenizer files, chat templates, generation settings, and the files in ``names``.

    Raises:
        UserError: a file is a link that leaves the source folder.
    """
    for name in (*CARRIED, *names):
        if (source / name).is_file():
            shutil.copyfile(inside(source, name), target / name)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder, which is renamed to ``folder`` at the end, or removed after an error.

    Raises:
        UserError: the folder exists and is not empty, has no name, or cannot be written.
    """
    if not folder.name:
        raise UserError(f"{folder} has no name; give the name of a new folder")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder} exists; choose a new folder, since nothing is overwritten")
    try:
        with replacing(folder) as (draft,):
            draft.mkdir()
            yield draft
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, FileExistsError):  # a file has the name of a parent folder
            reason = "Not a directory"
        raise UserError(
            f"cannot write to {folder} ({reason}); free space or choose another folder"
        ) from error
