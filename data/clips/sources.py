"""Find the videos of a folder and the caption of each.

A caption is in a text file beside the video and with its name (``clip.mp4``, ``clip.txt``), or in a
row of the folder's ``metadata.jsonl`` with ``file_name`` and ``text``, as in a videofolder of the
datasets library.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import DataError, first_few

VIDEOS = (".mp4", ".mov", ".webm", ".avi", ".mkv")
METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Source:
    """A video and its caption."""

    path: Path
    name: str
    """The video's path relative to the folder."""
    caption: str


def list_sources(folder: Path) -> tuple[list[Source], list[str]]:
    """Return a folder's videos, sorted by path, and the names of files that are not read.

    Videos in subfolders are included; hidden files are ignored.

    Raises DataError if there is no video, a video has no caption or two, or a row of metadata.jsonl
    has no video.
    """
    if not folder.is_dir():
        raise DataError(
            f"videos is {folder}, which is not a folder; give a folder with videos and captions"
        )
    videos: dict[str, Path] = {}
    others: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith((".", "__")) for part in relative.parts)
        if path.is_file() and not is_hidden:
            is_video = path.suffix.lower() in VIDEOS
            (videos if is_video else others)[relative.as_posix()] = path
    if not videos:
        raise DataError(
            f"videos is {folder}, which has no videos; give a folder of files with one of the "
            f"extensions {' '.join(VIDEOS)}"
        )

    captions: dict[str, str] = {}
    if METADATA in others:
        captions = _read_metadata(others.pop(METADATA))
        _refuse(
            folder, sorted(captions.keys() - videos.keys()), f"no videos for rows of {METADATA}"
        )
    for name in videos:
        text_name = Path(name).with_suffix(".txt").as_posix()
        if text_name not in others:
            continue
        if name in captions:
            raise DataError(
                f"{folder / name} has one caption in {METADATA} and one in a file; remove one"
            )
        captions[name] = _read_caption(others[text_name])

    _refuse(folder, [name for name in videos if name not in captions], "videos without a caption")
    _refuse(folder, [name for name in videos if not captions[name]], "videos with an empty caption")
    read = {Path(name).with_suffix(".txt").as_posix() for name in videos}
    sources = [Source(path, name, captions[name]) for name, path in videos.items()]
    return sources, [name for name in others if name not in read]


def _refuse(folder: Path, names: list[str], problem: str) -> None:
    """Raise DataError if ``names``, of videos or rows that have ``problem``, is not empty."""
    if not names:
        return
    example = Path(names[0]).with_suffix(".txt")
    raise DataError(
        f"{folder} has {problem}: {first_few(names)}; write the caption of each video into a text "
        f'file with the same name, such as {example}, or into a row {{"file_name": ..., "text": '
        f"...}} of {METADATA}, or remove the video or row"
    )


def _read_caption(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}); save it as UTF-8") from error


def _read_metadata(path: Path) -> dict[str, str]:
    """Return the captions, keyed by video name. Raises DataError for an invalid row."""
    captions: dict[str, str] = {}
    for number, line in enumerate(_read_caption(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            name, text = None, None
        if not isinstance(name, str) or not isinstance(text, str):
            raise DataError(
                f'{path}:{number} is not {{"file_name": NAME, "text": CAPTION}}; repair the row'
            )
        name = Path(name).as_posix()
        if name in captions:
            raise DataError(f"{path}:{number} is a second row for {name}; remove one of them")
        captions[name] = text.strip()
    return captions
