"""Ranks raise errors together, and those that no longer answer are named."""

import io
import os
import signal
from contextlib import redirect_stderr
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from runtime.processes import join
from runtime.ranks import run_ranks
from runtime.slurm import AGAIN, ENDINGS
from runtime.together import (
    from_first,
    gather_results,
    on_all_ranks,
    raise_together,
    report_unresponsive_ranks,
)
from train.run import exit_status

STOPPED = 1


class DomainError(ValueError):
    pass


class Awkward(ValueError):
    """Cannot be unpickled: its constructor takes more than a message."""

    def __init__(self, message, more):
        super().__init__(message)


ERRORS = {
    "domain": lambda: DomainError("train.toml: lr is -1"),
    "disk": lambda: OSError(28, "No space left on device", "/data/x"),
    "awkward": lambda: Awkward("odd", 1),
    "defect": lambda: ZeroDivisionError("division by zero"),
}


def _failing(rank, size, kinds, as_block):
    def body():
        if rank in kinds:
            raise ERRORS[kinds[rank]]()

    try:
        if as_block:
            with raise_together():
                body()
        else:
            gather_results(body)
    except Exception as error:
        caught = (type(error).__name__ if on_all_ranks(error) else "of one rank", str(error))
    else:
        caught = ("none", "")
    # The ranks are still in step: a later exchange works.
    return *caught, sum(gather_results(lambda: rank))


@pytest.mark.parametrize("as_block", [True, False])
def test_every_rank_raises_the_error_of_the_lowest_failing_rank(as_block):
    answers = run_ranks(_failing, 4, {3: "disk", 1: "domain"}, as_block)
    assert answers == [("DomainError", "train.toml: lr is -1", 6)] * 4
    assert not any(on_all_ranks(error()) for error in ERRORS.values()), "those of one rank alone"


def test_types_are_kept_where_a_user_can_cause_them():
    expected = ("OSError", "[Errno 28] No space left on device: '/data/x'")
    assert [answer[:2] for answer in run_ranks(_failing, 2, {1: "disk"}, True)] == [expected] * 2
    other, own_answer = run_ranks(_failing, 2, {1: "defect"}, True)
    assert own_answer[:2] == ("ZeroDivisionError", "division by zero")
    assert other[0] == "RuntimeError"
    assert "rank 1" in other[1]
    assert "in body" in other[1], "the other ranks get the traceback"
    other, own_answer = run_ranks(_failing, 2, {1: "awkward"}, True)
    assert (own_answer[0], other[0]) == ("Awkward", "RuntimeError")
    assert "odd" in other[1]


def _values(rank, size):
    pair = dist.new_group([1, 2])
    of_group = gather_results(lambda: rank, pair) if rank > 0 else []
    return gather_results(lambda: rank * rank), from_first(lambda: 10 + rank), of_group


def test_values_are_shared_by_all_ranks_or_a_group():
    assert run_ranks(_values, 3) == [([0, 1, 4], 10, of_group) for of_group in ([], [1, 2], [1, 2])]


def test_without_a_process_group_the_body_runs_alone():
    assert gather_results(lambda: 5) == [5]
    assert from_first(lambda: 6) == 6
    with pytest.raises(DomainError, match="lr"), raise_together():
        raise ERRORS["domain"]()


def left_alone(rank, world_size, folder, how):
    """A rank's messages and exit status while another one is stopped.

    Then all join anew, for run_ranks.
    """
    store = dist.FileStore(str(folder / "pids"), world_size)
    store.set(f"{rank}", str(os.getpid()))
    dist.destroy_process_group()
    join(
        "gloo",
        timedelta(seconds=4),
        dist.FileStore(str(folder / "store"), world_size),
        rank,
        world_size,
    )
    dist.barrier()
    errors = io.StringIO()
    if rank == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with redirect_stderr(errors):
            assert exit_status(lambda _: collective(rank, world_size, how), []) == 1
        if rank == 0:
            store.wait(
                [f"{other} has spoken" for other in range(world_size) if other not in (0, STOPPED)]
            )
            os.kill(int(store.get(f"{STOPPED}")), signal.SIGCONT)
        store.set(f"{rank} has spoken", "")
    dist.destroy_process_group()
    join(store=dist.FileStore(str(folder / "anew"), world_size), rank=rank, world_size=world_size)
    return errors.getvalue()


def collective(rank, world_size, how):
    sent, got = torch.ones(1000), torch.ones(1000)
    for _ in range(3):
        if how == "ring":
            receive = dist.P2POp(dist.irecv, got, (rank - 1) % world_size)
            send = dist.P2POp(dist.isend, sent, (rank + 1) % world_size)
            for work in dist.batch_isend_irecv([receive, send]):
                work.wait()
        else:
            dist.all_reduce(sent)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "all_reduce"])
def test_a_stopped_rank_is_named_once(how, tmp_path):
    reports = [lines for lines in run_ranks(left_alone, 4, tmp_path, how) if lines]
    assert len(reports) == 1, reports
    assert reports[0].startswith(f"rank {STOPPED} on {os.uname().nodename} did not answer (")
    assert reports[0].count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Timed out waiting 600000ms for recv operation to complete",
            "another rank did (Timed out waiting 600000ms",
        ),
        (
            "[pair.cc:537] Read error [10.0.0.1]:63152: Connection reset by peer. This is",
            "reset by peer)\n",
        ),
        (
            "wait timeout after 1000ms, keys: /default_pg/0",
            "(wait timeout after 1000ms, keys: /default_pg/0)\n",
        ),
    ],
)
def test_a_rank_that_cannot_ask_the_others(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ENDINGS, str(tmp_path / "endings"))
    assert report_unresponsive_ranks(RuntimeError(text), 1.0)
    message = capsys.readouterr().err
    assert message.startswith("rank 0 ")
    assert words in message
    assert message.count("\n") == 1
    assert (tmp_path / "endings" / "rank-0").read_text() == f"{AGAIN} {message}"


def test_another_error_is_not_a_peers(capsys):
    assert not report_unresponsive_ranks(RuntimeError("DataLoader timed out after 30 seconds"), 1.0)
    assert capsys.readouterr().err == ""
