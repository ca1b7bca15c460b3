"""Text in a job's script: a pattern for each value, so that none becomes a line or a command of it."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from runtime.errors import UserError


class Form(NamedTuple):
    """A pattern, and what it says in words."""

    pattern: str
    words: str


NAME = Form(r"\w[\w.,-]*", "letters, digits, and any of . , - _ after the first")
TEXT = Form(r".*", "printable characters in a line")
PATH = Form(r"[^-].*", "printable characters in a line, the first no -")
FORMS = {
    "name": Form(r"\w[\w .,+=@~-]*", "letters, digits, blanks, and any of . , + = @ ~ - _ after the first"),
    "constraint": Form(r"[\w(\[][\w.,:&|*()\[\]-]*", "features, joined by any of & | ( ) [ ] * ,"),
    "interface": Form(r"[\w^=][\w.,:-]*", "names of interfaces, as NCCL_SOCKET_IFNAME takes them"),
    "after": Form(r"\d[\d:_]*", "the number of a job"),
    "time": Form(r"[\w:-]+", "minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED"),
    "option": Form(r"--[a-z][a-z-]*(=.+)?", "written as sbatch takes it, --option=--KEY=VALUE"),
    **dict.fromkeys(("cluster", "save", "container", "container_mounts", "python"), PATH),
    **dict.fromkeys(("array", "command"), TEXT),
}
"""Form of a value by the name of its flag or key; NAME of all others, those that are yet to come as well."""


def check_text(values: Mapping[str, object], where: str = "", fix: str = "") -> None:
    """Check values, and each word of lists, by their names. Numbers, and words that are chosen from, always pass.

    Raises:
        UserError: naming the value after ``where``, and what it may be.
    """
    for name, value in values.items():
        form, said = FORMS.get(name, NAME), name
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            if name == "command" and (flag := re.match(r"--[a-z][a-z\d-]*", text)):
                said = flag[0]  # which the words after it belong to
            if not text.isprintable() or not re.fullmatch(form.pattern, text):
                raise UserError(f"{where}{said} is {text!r}; it must be {form.words}{fix}")
