"""Head of a job's script: a template's options with a job's values, each below a comment that is
true of it.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from runtime.progress import counted

COMMENTS = {
    "comment": "The run's folder, which squeue's %k shows.",
    "dependency": "Not before that job has ended without an error.",
    "kill-on-invalid-dep": "If that job fails, this one is cancelled, in the place of waiting for ever.",
    "array": "A run for each word of --array; its flags stand below.",
    "LAUNCHER": "What srun starts: ranks, one per GPU, or a torchrun per node.",
    "CONTAINER": "The image that the ranks run in, by this runtime.",
    "CONTAINER_MOUNTS": "Folders that it sees besides the checkout.",
    "PYTHON": "The interpreter of the ranks.",
    "LONGMESH_SOURCES": "Digest of the sources at submission; a start that has others says so.",
}
"""Comments of what the templates have no line for."""


def header(
    template: Sequence[str], wanted: Mapping[str, str], by_hand: Collection[str]
) -> list[str]:
    """Return the lines of a script's head with the options of a job, each below the comment that is
    about it.

    Args:
        template: lines of a .sbatch file up to its last option.
        wanted: value by option; an empty one is a switch.
        by_hand: options of ``--option``, of which a template's comment may not be true.
    """
    lines: list[str] = []
    comments: list[str] = []
    rest = dict(wanted)
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
        lines += [*comments, _option(key, rest.pop(key)) if key in rest else line]
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
    """Return a comment on ``--signal`` with its own time in the place of the template's 10 minutes."""
    seconds = re.fullmatch(r"B:USR1@(\d+)", signal)
    if seconds is None:
        return comment
    lead = int(seconds[1])
    words = counted(lead // 60, "minute") if lead % 60 == 0 else counted(lead, "second")
    return comment.replace("10 minutes", words)
