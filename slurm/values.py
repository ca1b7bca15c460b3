"""Texts of a job by the name of their flag or key, none of which becomes a line or a command of its
script.
"""

import re
from collections.abc import Mapping

from runtime.errors import UserError

NAME = (r"\w[\w.,-]*", "letters, digits, and any of . , - _ after the first")
TEXT = (r".*", "printable characters in a line")
PATH = (r"[^-].*", "printable characters in a line, the first no -")
FORMS = {
    "name": (
        r"\w[\w .,+=@~-]*",
        "letters, digits, blanks, and any of . , + = @ ~ - _ after the first",
    ),
    "constraint": (r"[\w(\[][\w.,:&|*()\[\]-]*", "features, joined by any of & | ( ) [ ] * ,"),
    "interface": (r"[\w^=][\w.,:-]*", "names of interfaces, as NCCL_SOCKET_IFNAME takes them"),
    "after": (r"\d[\d:_]*", "the number of a job"),
    "time": (r"[\w:-]+", "minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED"),
    "option": (r"--[a-z][a-z-]*(=.+)?", "written as sbatch takes it, --option=--KEY=VALUE"),
    **dict.fromkeys(("cluster", "save", "container", "container_mounts", "python"), PATH),
    **dict.fromkeys(("array", "command"), TEXT),
}
"""Pattern of a value by the name of its flag or key, so that none becomes a line or a command of
the script, and the pattern in words; NAME of all others, those that are yet to come as well."""


def check_text(values: Mapping[str, object], where: str = "", fix: str = "") -> None:
    """Check values, and each word of lists, by their names. Numbers, and words that are chosen
    from, always pass.

    Raises UserError naming the value after ``where``, and what it may be.
    """
    for name, value in values.items():
        (pattern, words), said = FORMS.get(name, NAME), name
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            if name == "command" and (flag := re.match(r"--[a-z][a-z\d-]*", text)):
                said = flag[0]  # which the words after it belong to
            if not text.isprintable() or not re.fullmatch(pattern, text):
                raise UserError(f"{where}{said} is {text!r}; it must be {words}{fix}")
