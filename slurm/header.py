"""The head of a job's script: a template's options with the job's values, below their comments.

A template's comment explains the template's value. If the job sets this value by a flag of its own,
the comment is still true, and stays. If ``--option`` sets it, the comment is replaced.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from runtime.progress import counted

COMMENTS = {
    "comment": "The run's folder, which squeue's %k shows.",
    "dependency": "Starts only after that job has ended without an error.",
    "kill-on-invalid-dep": "If that job fails, this one is cancelled instead of waiting forever.",
    "array": "A run for each word of --array; its flags stand below.",
    "LAUNCHER": "What srun starts: ranks, one per GPU, or a torchrun per node.",
    "CONTAINER": "The image that the ranks run in, with the runtime above.",
    "CONTAINER_MOUNTS": "Folders that the container sees besides the checkout.",
    "PYTHON": "The interpreter of the ranks.",
    "LONGMESH_SOURCES": (
        "Digest of the sources at submission; the job warns if it starts with others."
    ),
}
"""Comments on options and variables that the templates lack, keyed by option or variable."""


def header(
    template: Sequence[str], options: Mapping[str, str], by_hand: Collection[str]
) -> list[str]:
    """Return the lines of a script's head with the options of a job, each below its comment.

    Args:
        template: lines of a .sbatch file up to its last option.
        options: values keyed by option; an empty value makes a switch.
        by_hand: options given with ``--option``, for which a template's comment may be wrong.
    """
    lines: list[str] = []
    comments: list[str] = []
    rest = dict(options)
    for line in template:
        option = re.match(r"#SBATCH --([a-z-]+)", line)
        if option is None:
            comments.append(line)
            continue
        key = option[1]
        if f"no-{key}" in rest:
            comments = []
            continue
        if key in by_hand:
            comments = ["# As --option says."]
        if key == "signal":
            comments = [_with_lead(comment, rest.get(key, "")) for comment in comments]
        lines += comments
        lines.append(_option(key, rest.pop(key)) if key in rest else line)
        comments = []
    for key, value in rest.items():
        if key in by_hand:
            lines.append("# As --option says.")
        elif key in COMMENTS:
            lines.append(f"# {COMMENTS[key]}")
        lines.append(_option(key, value))
    return lines


def _option(key: str, value: str) -> str:
    return f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}"


def _with_lead(comment: str, signal: str) -> str:
    """Return a comment on ``--signal`` with the job's time instead of the template's 10 minutes."""
    match = re.fullmatch(r"B:USR1@(\d+)", signal)
    if match is None:
        return comment
    seconds = int(match[1])
    words = counted(seconds, "second")
    if seconds % 60 == 0:
        words = counted(seconds // 60, "minute")
    return comment.replace("10 minutes", words)
