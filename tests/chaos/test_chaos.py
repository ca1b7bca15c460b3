"""Trials of make chaos: planted faults are told, and a strike finds the processes of its trial."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint import save

import tests.chaos.__main__ as chaos
from tests.chaos import victim
from tests.chaos.__main__ import (
    EXACT,
    HOOKS,
    KILL,
    LAST,
    SIGNAL,
    differs,
    ended,
    mark,
    planned,
    table,
    tried,
)
from tests.starts import PATIENCE, wait_until


def run_of(folder, weight=1.0, loss=1.0):
    (folder / f"iter_{LAST:07d}").mkdir(parents=True)
    state = {"model": {"weight": torch.tensor([weight, 2.0])}, str(folder): "not a tensor"}
    save(state, checkpoint_id=folder / f"iter_{LAST:07d}", no_dist=True)
    records = [
        dict.fromkeys(EXACT, 1.0) | {"iteration": n, "lm_loss": loss} for n in range(1, LAST + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_what_differs_is_told(tmp_path):
    run_of(tmp_path / "whole-4")
    assert differs(run_of(tmp_path / "same")) == ""
    assert differs(run_of(tmp_path / "other", weight=1.0 + 2**-23)).startswith("weights or moments")
    assert differs(run_of(tmp_path / "curve", loss=2.0)).startswith(f"records 1 to {LAST} ")
    lost = run_of(tmp_path / "lost") / "metrics.jsonl"
    lost.write_text("".join(line + "\n" for line in lost.read_text().splitlines()[:-1]))
    assert differs(lost.parent).startswith(f"records 1 to {LAST} ")


def test_the_table_counts_and_names_what_was_wrong():
    row = {"what": KILL, "where": "rename", "whom": "group", "gone": 0.5, "wrong": ""}
    shown = table([row, row | {"gone": 1.5, "wrong": "3 processes after 5.0 s"}])
    assert "| SIGKILL | rename | group | 2 | 1 | 1.5 |\n" in shown
    assert shown.endswith("\n* SIGKILL, rename: 3 processes after 5.0 s\n")


def test_half_of_the_kills_are_at_hooks_and_all_hooks_are_drawn():
    plans = [planned(KILL, number, random.Random(number)) for number in range(400)]
    assert sum(isinstance(plan["when"], str) for plan in plans) == 200
    assert {plan["hook"] for plan in plans} == set(HOOKS)
    signals = [planned(SIGNAL, number, random.Random(number)) for number in range(50)]
    assert not {9} & {plan["signal"] for plan in signals}


def test_what_hangs_is_killed_with_its_sessions_and_a_wrong_row(tmp_path, monkeypatch):
    plan = {"trial": str(tmp_path)}
    code = (
        "import subprocess as s; print('begun', flush=True); s.run(['sleep', '600'], "
        "start_new_session=True)"
    )
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {victim.PLAN: mark(plan)}, stdout=out
        )
        wait_until(lambda: len(victim.marked(mark(plan))) == 2)
        monkeypatch.setattr(chaos, "PATIENCE", 0.01)
        row = tried(KILL, ended, process, out, plan)
    assert row == {"what": KILL, "where": "hung", "wrong": "hung for 0 s, and was killed: begun\\n"}
    assert process.returncode == -9
    wait_until(lambda: not victim.marked(mark(plan)))
    assert "| SIGKILL | hung |  | 1 | 1 |  |\n" in table([row])


@pytest.mark.slow
def test_a_strike_ends_the_trial_at_its_call_and_nothing_else(tmp_path):
    plan = {"hook": "fsync", "nth": 2, "when": "before", "whom": "everything", "signal": 9}
    plan["note"] = str(tmp_path / "note")
    code = f"from tests.chaos.victim import *; arm(json.loads('{json.dumps(plan)}'))\n"
    code += "for n in (1, 2, 3): print(n, flush=True); os.fsync(1)"
    environment = os.environ | {victim.PLAN: json.dumps(plan), victim.PIDS: "0 0"}
    with (tmp_path / "out").open("w") as out:
        beside = subprocess.Popen(["sleep", str(PATIENCE)], env=environment)
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=out)
        assert process.wait(PATIENCE) == beside.wait(PATIENCE) == -9
    assert (tmp_path / "out").read_text() == "1\n2\n"
    assert (tmp_path / "note").exists()
    wait_until(lambda: not victim.marked(json.dumps(plan)))
