"""The head of a job's script: each comment stands above its own line, and is true of it."""

import re

import pytest

from tests.slurm.test_submit import RUN, printed


def above(text, line):
    """The comment lines that stand above a line of a script, up to the next line that is none."""
    lines = text.splitlines()
    comments = []
    for before in reversed(lines[: lines.index(line)]):
        if not before.startswith("# "):
            break
        comments.insert(0, before)
    return " ".join(comments)


@pytest.mark.parametrize(
    ("lead", "words"), [("600", "10 minutes"), ("60", "1 minute"), ("90", "90 seconds")]
)
def test_a_comment_stands_above_its_line_and_says_its_value(lead, words, capsys):
    text = printed(capsys, "--nodes", "2", "--lead", lead, *RUN)
    assert f"USR1 to this script {words} before its time is over" in above(
        text, f"#SBATCH --signal=B:USR1@{lead}"
    )
    assert re.findall(r"\d+ (?:minute|second)s? before", text) == [f"{words} before"]
    assert "is queued again" in above(text, "#SBATCH --requeue")
    assert "one log" in above(text, "#SBATCH --open-mode=append")
    assert "#\n#SBATCH" not in text
