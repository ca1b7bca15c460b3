"""A rank of pretrain_gpt.py that strikes at processes of its run at a hook.

CHAOS in the environment says which, and when.
"""

import functools
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from runtime import files
from train.checkpoint import drafts, shards

PLAN, PIDS = "CHAOS", "CHAOS_PIDS"
HOOKS: dict[str, tuple[Any, str]] = {
    "shard": (torch, "save"),
    "asynchronous shard": (torch, "save"),
    "asynchronous staging": (shards, "host_copy"),
    "fsync": (os, "fsync"),
    "manifest": (drafts, "write_manifest"),
    "rename": (Path, "rename"),
    "pointer": (drafts, "write_text"),
    "prune": (shutil, "rmtree"),
    "lock": (files, "Lock"),
    "random": (torch.optim.AdamW, "step"),
}
"""The call there, by a rank or by its thread that writes its checkpoints."""


def marked(plan: str) -> list[int]:
    """Return the ids of a trial's processes but this one; ``plan`` is their value of CHAOS."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            theirs = f"{PLAN}={plan}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if theirs and (folder / "stat").read_text().rpartition(") ")[2][0] not in "ZX":
                pids.append(int(folder.name))
    return [pid for pid in pids if pid != os.getpid()]


def strike(plan: dict[str, Any]) -> None:
    """Send the signal to this rank, its launcher, the launcher's process group, or everything."""
    rank, launcher = map(int, os.environ[PIDS].split())
    Path(plan["note"]).touch()
    everything = [*marked(os.environ[PLAN]), os.getpid()]
    with suppress(ProcessLookupError):
        if plan["whom"] == "group":
            os.killpg(os.getpgid(launcher), plan["signal"])
        for pid in {"rank": [rank], "launcher": [launcher], "everything": everything}.get(
            plan["whom"], []
        ):
            os.kill(pid, plan["signal"])


def arm(plan: dict[str, Any]) -> None:
    """Strike at the nth call of the hook: before it, after it, or so many seconds after it."""
    place, name = HOOKS[plan["hook"]]
    plain, calls = getattr(place, name), []

    @functools.wraps(plain, updated=())
    def struck(*args: Any, **more: Any) -> Any:
        calls.append(name)
        now = len(calls) == plan["nth"]
        if now and plan["when"] == "before":
            strike(plan)
        done = plain(*args, **more)
        if now and plan["when"] != "before":
            threading.Timer(0 if plan["when"] == "after" else plan["when"], strike, [plan]).start()
        return done

    setattr(place, name, struck)


def main() -> None:
    """Train, with the hook armed on the planned rank."""
    import pretrain_gpt
    from train.run import run_entry

    plan = json.loads(os.environ[PLAN])
    os.environ[PIDS] = f"{os.getpid()} {os.getppid()}"
    if plan["hook"] and plan["rank"] == int(os.environ["RANK"]):
        arm(plan)
    run_entry(pretrain_gpt.main)


if __name__ == "__main__":
    main()
