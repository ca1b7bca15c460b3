"""Memory of a plan by component, and what to change first where it does not fit."""

import json
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from planner.cluster import CLUSTERS
from runtime import progress
from tests.tools.plans import A100, MODEL, without_launcher  # noqa: F401
from tools.plan import main

FIT = ("--num-layers", "2", "--context-parallel-size", "2", "--fits", "--bf16")


def test_memory_by_component_and_what_to_change_first(capsys, tmp_path, monkeypatch):
    plan_command, small = (
        [*MODEL, *FIT, "--seq-length", "8192", "--vocab-size", "32000"],
        tmp_path / "small.toml",
    )
    assert main([*plan_command, *A100, "--json"]) == 0
    memory_gb = 0.8e-9 * json.loads(capsys.readouterr().out)["memory_bytes"]
    small.write_text(
        re.sub(r"memory_gb = \S+", f"memory_gb = {memory_gb}", Path(A100[1]).read_text(), count=1)
    )
    monkeypatch.setattr(
        progress, "time", SimpleNamespace(monotonic=count().__next__)
    )  # each look takes a second
    assert main([*plan_command, "--cluster", str(small)]) == 0
    out, stderr = capsys.readouterr()
    doing = r"backward of micro-batch 1 of 1, [\d,]+ operators so far, \d+ s\n"
    assert re.search(rf"running rank 0 of 2 without memory \(1 of 1\): {doing}", stderr)
    passes = [*dict.fromkeys(re.findall(r"(\w+) of micro-batch 1 of 1, layer (\d) of 2, ", stderr))]
    assert passes == [("forward", "1"), ("forward", "2"), ("backward", "2"), ("backward", "1")]
    refusal = (
        r"does not fit in [\d.]+ GB: a process takes [\d.]+ .B\n"
        r"settings to change, .* then takes [\d.]+ ms:\n  --loss-chunk-"
    )
    assert re.search(rf"\n  logits +[#+. ]+\d+\.\d MB\n(.*\n)+{refusal}size 2048", out)
    assert main([*plan_command, "--cluster", str(small), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory_bytes"] == sum(plan["memory_bytes_by_part"].values())
    assert plan["memory_bytes_by_part"]["logits"] >= 4096 * 32000 * 2
    assert not plan["fits"]
    assert (plan["processes"], plan["mesh"]) == (2, "context 2")
    counts = [change["bytes"] for change in plan["changes"]]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= 1e9 * memory_gb


def test_memory_of_the_host_is_told_and_may_be_too_little(capsys, tmp_path):
    plan_command, small = (
        [*MODEL, *FIT, "--vocab-size", "32000", "--optimizer-cpu-offload"],
        tmp_path / "small.toml",
    )
    assert main([*plan_command, *A100]) == 0
    assert re.search(
        r"\n  on the host, pinned +[#.]+ +\d+\.\d MB\nfits in 40 GB: ", capsys.readouterr().out
    )
    small.write_text(
        re.sub(
            r"host_memory_gb = \S+",
            "host_memory_gb = 0.001",
            (CLUSTERS / "h100_pod.toml").read_text(),
        )
    )
    assert main([*plan_command, "--cluster", str(small)]) == 0
    assert (
        "\ndoes not fit in 0.001 GB of host memory: a process moves 268.4 MB there\n"
        in capsys.readouterr().out
    )
    assert main([*plan_command, "--cluster", str(small), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["fits"]
