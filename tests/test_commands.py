"""The commands of pages: found and sorted, run, failed or ended at the limit; each has a row in the table."""

import pytest

from tests import commands
from tests.commands import ROOT, TABLE, Command, main, pages, read_table, row_key

PAGE = """# One

```
python -c "print('first')"    # a comment
make venv
python -c "
print('two lines')
" > out.txt
what it prints: python no command
python -c "import sys; sys.exit('no \\
such thing')"
```

```python
python = "no command"
```
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs" / "other.md").write_text("```\npython -c 'import time; time.sleep(60)'\n```\n")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "pages", lambda: pages(tmp_path))
    monkeypatch.setattr(commands, "commands", lambda page: commands_of(page, tmp_path))
    (tmp_path / TABLE).parent.mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "there").touch()
    return tmp_path


commands_of = commands.commands


def test_commands_run_fail_or_have_a_reason_and_other_rows_stay(checkout):
    flags = ["--scratch", str(checkout / "scratch"), "--logs", str(checkout / "logs")]
    assert main([*flags, "--pages", "README.md"]) == 1
    first, two, failed, other = read_table(checkout / TABLE).values()
    assert (first[0][:5], two[0][:5], other) == ("ran, ", "ran, ", ["not run yet", ""])
    assert "| network: it downloads what every other command here already has | 1 |" in (checkout / TABLE).read_text()
    assert failed[0] == "**failed**, status 1: no such thing"
    assert (checkout / "scratch" / "out.txt").read_text() == "two lines\n"
    assert (checkout / "logs" / "001.log").read_text().endswith("first\n")
    assert main([*flags, "--pages", "docs/other.md", "--limit", "1"]) == 1
    *before, slow = read_table(checkout / TABLE).values()
    assert before == [first, two, failed]
    assert slow[0] == "**failed**, status -9: killed after 1 s"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("make pretrain", None),
        ("python -m tools.plan --config configs/models/llama3_8b.toml --bf16 --fits", None),
        ("python -m slurm.submit --dry-run --nodes 4 pretrain_gpt.py --bf16 --save runs/long_run", None),
        ("python -m tools.plot losses runs/a --output docs/images/longer.png", None),
        ("torchrun --nproc-per-node 8 pretrain_gpt.py --bf16", "GPU"),
        ("torchrun --nnodes 4 --rdzv-endpoint HOST:29500 pretrain_gpt.py", "placeholder"),
        ("python -m slurm.submit --nodes 4 pretrain_gpt.py", "Slurm"),
        ("make gpu-check", "GPU"),
        ("python -m tools.convert_hf import llama3_8b runs/llama3_8b", "input"),
    ],
)
def test_what_is_left_out_has_its_reason(text, reason):
    found = Command("README.md", text).reason
    assert found is None if reason is None else found.startswith(reason)


def test_every_command_that_runs_here_has_its_row():
    """After a change of a page's command: python -m tests.commands --pages PAGE."""
    known = read_table(ROOT / TABLE)
    found = [command for page in pages() for command in commands_of(page)]
    assert len(found) > 80
    new = [command for command in found if not command.reason and row_key(command) not in known]
    assert new == []
    assert [row for row, (result, _) in known.items() if result.startswith("**failed**")] == []
