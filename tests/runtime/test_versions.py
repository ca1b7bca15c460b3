"""Ranks of different versions are told so before they work together."""

import io
import os
import shutil
from contextlib import redirect_stderr
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from runtime.launch import versions
from runtime.processes import join, leave
from runtime.ranks import run_ranks
from tests.starts import free_port
from train.run import exit_status


def joined(rank, world_size, port, torch_of, sources_of):
    """Join through the launcher's store as a rank that has these.

    Return the status and what was said.
    """
    leave()  # once both have joined
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    output, met = io.StringIO(), []

    def main(_):
        join(timeout=timedelta(minutes=5))
        met.append(dist.get_world_size())

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(output):
        patch.setattr(torch, "__version__", torch_of[rank])
        patch.setattr(versions, "sources", lambda root: sources_of[rank])
        patch.setattr(versions.socket, "gethostname", lambda: f"node{rank}")
        status = exit_status(main, [])
    if not met:
        join(store=dist.HashStore())  # for run_ranks to leave
    return status, met, output.getvalue()


def test_ranks_that_differ_are_named_once():
    """Another torch is told as other sources are: the test of every difference has both."""
    ends = run_ranks(joined, 2, free_port(), ("2.13.0", "2.13.0"), ("aa", "bb"))
    assert [(status, met) for status, met, _ in ends] == [(1, []), (1, [])]
    silent, line = sorted(output for _, _, output in ends)
    assert silent == ""
    assert line.startswith(
        "error: ranks differ: sources bb on rank 1 (node1), and aa on the others"
    )


def test_ranks_that_are_alike_join():
    assert run_ranks(joined, 2, free_port(), ("2.13.0",) * 2, ("aa",) * 2) == [(0, [2], "")] * 2


def test_every_difference_has_its_ranks_and_hosts():
    ranks = [{"host": f"node{rank // 2}", "torch": "2.13.0", "sources": "aa"} for rank in range(6)]
    ranks[2] |= {"sources": "bb"}
    ranks[3] |= {"sources": "bb", "torch": "2.12.1"}
    ranks[5] |= {"sources": "cc"}
    assert list(versions.differences(ranks)) == [
        "sources bb on rank 2, 3 (node1), cc on rank 5 (node2), and aa on the others",
        "torch 2.12.1 on rank 3 (node1), and 2.13.0 on the others",
    ]


def test_the_digest_is_of_the_code_alone(tmp_path):
    copies = [tmp_path / name for name in ("a", "b")]
    for copy in copies:
        shutil.copytree(versions.ROOT / "runtime", copy / "runtime")
        (copy / "runs").mkdir()
        (copy / "runs" / f"{copy.name}.py").touch()
    assert versions.sources(copies[0]) == versions.sources(copies[1])
    (copies[1] / "runtime" / "errors.py").write_text("")
    assert versions.sources(copies[0]) != versions.sources(copies[1])
