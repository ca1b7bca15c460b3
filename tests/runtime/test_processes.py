"""Processes join and part."""

import re
import socket
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import MeshConfig, distributed_mesh
from runtime.errors import LaunchError
from runtime.launch import rendezvous
from runtime.processes import join, launched_world_size, leave, meet, process_group
from runtime.ranks import run_ranks
from tests.starts import ROOT, ended, torchrun
from train.run import exit_status

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SOON = timedelta(seconds=0.3)


def launched(monkeypatch, **names):
    """The environment that a launcher leaves."""
    for name in (*LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def port():
    """A port whose owner takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("names", "size"),
    [
        ({}, 1),
        ({"WORLD_SIZE": 1}, 1),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, 4),
    ],
)
def test_what_a_launcher_says(names, size, monkeypatch):
    launched(monkeypatch, **names)
    assert launched_world_size() == size


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK is 'x' in the environment"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK is '2'.* from 0 to 1, below WORLD_SIZE"),
        ({"RANK": 0}, "RANK is set but WORLD_SIZE is not"),
        ({"RANK": 0, "WORLD_SIZE": 0}, "WORLD_SIZE is '0'.* from 1;"),
        ({"WORLD_SIZE": 4}, "WORLD_SIZE is 4 but RANK is not set"),
        (
            {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
            "LOCAL_RANK is '2'.*LOCAL_WORLD_SIZE",
        ),
        ({"RANK": 0, "WORLD_SIZE": 2}, "RANK is set but MASTER_ADDR is not"),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"},
            "RANK is set but MASTER_PORT is not",
        ),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 65536},
            "MASTER_PORT is '65536'",
        ),
        (
            {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9},
            "rank 1 cannot connect to MASTER_A",
        ),
    ],
)
def test_a_launch_that_cannot_work_is_one_line(names, words, monkeypatch, capfd):
    launched(monkeypatch, **names)
    assert exit_status(lambda _: join(timeout=SOON), []) == 1
    message = capfd.readouterr().err
    assert re.match(f"error: {words}", message)
    assert message.count("\n") == 1, "no stack of torch's either"


def test_a_name_that_does_not_resolve_is_named_soon(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "SECONDS_TO_ANSWER", 0.3)
    for rank in (0, 1):
        launched(
            monkeypatch, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="node7.invalid", MASTER_PORT=20000
        )
        assert exit_status(lambda _: join(), []) == 1
        message = capfd.readouterr().err
        assert message.startswith(
            f"error: MASTER_ADDR is node7.invalid, but {socket.gethostname()} cannot resolve it"
        )
        assert message.count("\n") == 1


def test_a_torchrun_that_is_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "SECONDS_TO_ANSWER", 0.3)
    launched(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=9)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        LaunchError, match=r"rank 0 cannot connect to MASTER_ADDR 127\.0\.0\.1, MASTER_PORT 9"
    ):
        join()  # its timeout is 10 minutes


def test_a_port_that_another_program_uses(port, monkeypatch, capfd):
    """Rank 0 cannot have it; the others would wait for ever for what is no store to answer."""
    monkeypatch.setattr(rendezvous, "SECONDS_TO_ANSWER", 0.3)
    for rank, words in (
        (0, f"MASTER_PORT is {port}, but another program"),
        (1, r"rank 1 is connected to .*, but the program there is not a store .* \(it is silent\)"),
    ):
        launched(monkeypatch, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(LaunchError, match=words):
            meet(SOON)
    assert "frame #" not in capfd.readouterr().err


def workers(rank, world_size):
    """Worker threads of the groups of all kinds."""
    with distributed_mesh(MeshConfig(device="cpu", context_parallel_size=2)) as mesh:
        groups = [
            dist.group.WORLD,
            mesh.cp.get_group(),
            mesh.dp_cp.get_group(),
            dist.new_group([0, 1], timeout=SOON),
        ]
        groups.append(dist.new_group(backend="cpu:gloo,cuda:gloo"))
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        assert options[3]._timeout == SOON
        return {options_of._threads for options_of in options}


def test_every_group_has_one_worker():
    assert run_ranks(workers, 2) == [{1}, {1}]


def all_at_once(rank, world_size):
    """Collectives, functional ones and messages of one group, all in flight.

    They are waited for from the last to the first.
    """
    sums = [torch.full((1000,), float(i)) for i in range(8)]
    got = [torch.empty(1000) for _ in range(8)]
    waits = []
    everyone = dist.group.WORLD
    for i, total in enumerate(sums):
        waits.append(dist.irecv(got[i], (rank - 1) % world_size, tag=i))
        waits.append(dist.all_reduce(total, async_op=True))
        waits.append(dist.isend(torch.full((1000,), float(rank)), (rank + 1) % world_size, tag=i))
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            total, world_size, everyone.group_name
        )
        waits.append(dist.barrier(async_op=True))
    for wait in reversed(waits):
        wait.wait()
    torch.ops._c10d_functional.wait_tensor(gathered)
    return [total[0].item() for total in sums] + [message[-1].item() for message in got]


def test_one_worker_is_enough_for_all_that_is_in_flight():
    assert run_ranks(all_at_once, 3) == [
        [3.0 * i for i in range(8)] + [float((rank - 1) % 3)] * 8 for rank in range(3)
    ]


def parted(rank, world_size):
    """Return how many of 100 one-process groups hold a tensor after parting.

    It is one of their last collective.

    Without ``leave``, one of 20,000 does.
    """
    dist.destroy_process_group()
    count = 0
    for _ in range(100):
        join(store=dist.HashStore())
        group, tensor = dist.group.WORLD, torch.ones(8)
        alive = weakref.ref(tensor)
        dist.all_reduce(tensor)
        del tensor
        leave()
        count += alive() is not None
        del group  # as a script keeps one, so that its threads outlive the parting
    join(store=dist.HashStore())  # for run_ranks to leave
    return count


def test_nothing_is_held_by_gloo_after_leaving():
    assert run_ranks(parted, 1) == [0]


def test_a_process_alone_is_a_group_of_one(monkeypatch):
    assert run_ranks(alone, 1) == [(1, False)]


def alone(rank, world_size):
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        launched(patch)
        for _ in range(2):
            with pytest.raises(ValueError, match="the body's own"), process_group():
                raise ValueError("the body's own")
        with process_group() as group:
            size = group.size()
    initialized = dist.is_initialized()
    join(store=dist.HashStore())
    return size, initialized


@pytest.mark.slow
def test_the_example_of_the_attentions_page_ends_well_every_time(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tasks" / "attention.md").read_text(), re.S
    )
    script = tmp_path / "yours.py"
    script.write_text(next(block for block in blocks if "process_group" in block))
    for _ in range(20):
        process = ended([*torchrun(2), str(script)], PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("torch.Size([1, 4096, 8, 64])") == 2


def test_a_start_does_not_see_the_keys_of_the_one_before_in_torchruns_store():
    store, parts = dist.HashStore(), dict[tuple[int, int], dist.Store]()
    store.set_timeout(timedelta(seconds=20))

    def start(number, rank):
        part = parts[number, rank] = rendezvous.agree_on_prefix(
            store, rank, 3, timedelta(seconds=20)
        )
        part.set(f"said by {rank}", str(number))

    for number in range(2):
        ranks = [threading.Thread(target=start, args=(number, rank)) for rank in range(3)]
        for thread in reversed(ranks):
            thread.start()
        for thread in ranks:
            thread.join()
    with pytest.raises(LaunchError, match=r"never joined rank 0 .*: 1, 2;"):
        rendezvous.agree_on_prefix(store, 0, 3, SOON)  # the names of dead ranks are there
    for number in range(2):
        assert {parts[number, rank].get(f"said by {2 - rank}") for rank in range(3)} == {
            str(number).encode()
        }
    store.set_timeout(SOON)
    with pytest.raises(
        LaunchError, match="rank 1 connected to the launcher's store, but rank 0 never joined"
    ):
        rendezvous.agree_on_prefix(store, 1, 3, SOON)
