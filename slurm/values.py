"""Check texts that go into a job's script, so that none adds a line or a command to it."""

import re
from collections.abc import Mapping

from runtime.errors import UserError

NAME = (r"\w[\w.,-]*", "letters, digits, and any of . , - _ after the first")
TEXT = (r".*", "printable characters in one line")
PATH = (r"[^-].*", "printable characters in one line, not beginning with -")
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
"""Pattern that a value must match, and the pattern in words, keyed by the name of its flag or key.
Every other name, including one that is added later, has the pattern NAME."""


def check_text(values: Mapping[str, object], place: str = "", fix: str = "") -> None:
    """Check that texts, or all texts of lists, match the pattern of their name.

    Other values pass. Raises UserError with ``place``, the name, the value and the texts that are
    allowed.
    """
    for name, value in values.items():
        pattern, words = FORMS.get(name, NAME)
        title = name
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            flag = re.match(r"--[a-z][a-z\d-]*", text)
            if name == "command" and flag:
                title = flag[0]  # errors about the words after a flag name it too
            if not text.isprintable() or not re.fullmatch(pattern, text):
                raise UserError(f"{place}{title} is {text!r}; it must be {words}{fix}")
