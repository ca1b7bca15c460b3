"""The commands of pages: found and sorted, run, failed or ended at the limit.

Each has a row in the table.
"""

import pytest

from tests import commands
from tests.commands import ROOT, TABLE, Command, main, pages, read_table, row_key

PAGE = """# One

```
make venv
python -c "
print('two lines')
" > out.txt
what it prints: python no command
python -c "import sys; sys.exit('no \\
such thing')"
python -c 'import time; time.sleep(60)'
```

```python
python = "no command"
```
"""
commands_of = commands.commands


def test_commands_run_fail_end_at_the_limit_or_have_a_reason(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(PAGE)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "pages", lambda: pages(tmp_path))
    monkeypatch.setattr(commands, "commands", lambda page: commands_of(page, tmp_path))
    (tmp_path / TABLE).parent.mkdir(parents=True)
    (tmp_path / "scratch" / "made").mkdir(parents=True)
    flags = [
        "--scratch",
        str(tmp_path / "scratch"),
        "--logs",
        str(tmp_path / "logs"),
        "--limit",
        "1",
    ]
    assert main(flags) == 1
    ran, failed, slow = (result for result, _ in read_table(tmp_path / TABLE).values())
    assert ran.startswith("ran, ")
    assert failed == "**failed**, status 1: no such thing"
    assert slow == "**failed**, status -9: killed after 1 s"
    assert (
        "| network: it downloads what every other command here already has | 1 |"
        in (tmp_path / TABLE).read_text()
    )
    assert (tmp_path / "scratch" / "out.txt").read_text() == "two lines\n"
    assert "no such thing" in (tmp_path / "logs" / "002.log").read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("make pretrain", None),
        (
            (
                "python -m slurm.submit --dry-run --nodes 4 pretrain_gpt.py --bf16 --save "
                "runs/long_run"
            ),
            None,
        ),
        ("torchrun --nproc-per-node 8 pretrain_gpt.py --bf16", "GPU"),
        ("torchrun --nnodes 4 --rdzv-endpoint HOST:29500 pretrain_gpt.py", "placeholder"),
        ("python -m slurm.submit --nodes 4 pretrain_gpt.py", "Slurm"),
    ],
)
def test_what_is_left_out_has_its_reason(text, reason):
    actual_reason = Command("README.md", text).reason
    assert actual_reason is None if reason is None else actual_reason.startswith(reason)


def test_every_command_that_runs_here_has_its_row():
    """After a change of a page's command: python -m tests.commands --pages PAGE."""
    table = read_table(ROOT / TABLE)
    all_commands = [command for page in pages() for command in commands_of(page)]
    assert len(all_commands) > 80
    new = [
        command for command in all_commands if not command.reason and row_key(command) not in table
    ]
    assert new == []
    assert [row for row, (result, _) in table.items() if result.startswith("**failed**")] == []
