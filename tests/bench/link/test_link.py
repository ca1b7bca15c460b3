"""Namespaces come and go, and what crosses is what the plans say.

An interrupted bench leaves nothing.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.link import __main__ as entry
from bench.link import ranks as link_ranks
from bench.link.cases import MODELS, cases_of, command_line
from bench.link.network import Network, NetworkError, check_permission, enter
from bench.link.ranks import attention_crossing
from data.tokenizer import load_tokenizer
from model.registry import num_parameters
from tests.starts import PATIENCE, ROOT, children, ended, interruptible, wait_until
from train.config.derive import with_vocabulary
from train.config.language import parse_args, validate

WITHIN_PROTOCOL = 1.10


def not_permitted():
    try:
        check_permission()
    except NetworkError as error:
        return str(error)
    return ""


permitted = pytest.mark.needs("ip", "tc", unless=not_permitted)


def namespaces(*processes):
    """The network namespaces of processes, by default of all, and of all files they hold open."""
    inodes = set()
    numbers = processes or [path.name for path in Path("/proc").glob("[0-9]*")]
    for process in (Path("/proc", str(number)) for number in numbers):
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("net:"):
                inodes.add(target)
    return inodes


def descendants(parent):
    """Processes that come from ``parent``, however far down."""
    return {below for child in children(parent) for below in (child, *descendants(child))}


def seconds_to_send(network, senders, count):
    """Each sender sends ``count`` bytes to its like on the other node, all at once.

    Threads can be in namespaces.
    """
    listeners = {rank: threading.Event() for rank in senders}

    def receive(rank):
        enter(network.path(rank + 4))
        with socket.create_server((network.address(rank + 4), 5000 + rank)) as server:
            listeners[rank].set()
            with server.accept()[0] as connection:
                while connection.recv(1 << 16):
                    pass

    def send(rank):
        enter(network.path(rank))
        assert listeners[rank].wait(PATIENCE)
        with socket.create_connection((network.address(rank + 4), 5000 + rank)) as connection:
            connection.sendall(bytes(count))

    start = time.monotonic()
    with ThreadPoolExecutor(2 * len(senders)) as pool:
        for done in [pool.submit(work, rank) for rank in senders for work in (receive, send)]:
            done.result(timeout=PATIENCE)
    return time.monotonic() - start


@permitted
@pytest.mark.parametrize("rails", [False, True])
def test_namespaces_come_and_go_and_the_link_is_as_slow_as_asked(rails):
    pid, count, senders = os.getpid(), 1 << 20, [0, 1, 2, 3]
    before = namespaces(pid)
    with Network(rails=rails) as network:
        assert len(namespaces(pid) - before) == (10 if rails else 2)
        start = network.crossed()
        seconds_to_send(network, senders, count)
        sent, back = (now - earlier for now, earlier in zip(network.crossed(), start, strict=True))
        assert 4 * count <= sent <= WITHIN_PROTOCOL * 4 * count
        assert back < 0.1 * sent
        network.limit("40mbit")
        slow = seconds_to_send(network, senders, count)
        link = count * 8 / 40e6  # 0.21 s for one sender
        # one bucket's burst is 128 KiB, and what a whole bucket lets pass at once costs no time
        assert slow > (0.8 if rails else 3.5) * link
        if rails:  # four are four times as fast as one link, as soon as the machine has time for it
            wait_until(
                lambda: slow < 3 * link or seconds_to_send(network, senders, count) < 3 * link
            )
        network.limit(None)
        assert "noqueue" in network._nodes[0].run("tc", "qdisc", "show", "dev", "trunk")
        with pytest.raises(
            NetworkError, match=r"tc qdisc add .*40parsecs|tc class add .*40parsecs"
        ):
            network.limit("40parsecs")
    assert namespaces(pid) == before


@pytest.mark.slow
@permitted
def test_what_crosses_is_what_the_plan_says(default_data, monkeypatch):
    monkeypatch.setattr(link_ranks, "WARM_UP", 0)
    monkeypatch.setattr(link_ranks, "WARM_UP_LIMITED", 0)
    args = entry.build_parser().parse_args(
        ["--repeats", "1", "--rate", "200mbit", "--cases", "ring"]
    )
    setting = {"model": "llama", "link": "shared", "seq_length": 1024, "batch": 2}
    with Network(rails=False) as network:
        (measured,) = entry.measure_setting(network, setting, default_data, args)
    config = parsed("llama", "ring", default_data)
    entries = load_tokenizer(f"{default_data}.model").vocab_size
    gradients = 4 * num_parameters(with_vocabulary(config, entries).model)  # float32, once
    expected = measured["attention_by_plan"] + gradients
    assert expected <= measured["crossed"] <= WITHIN_PROTOCOL * expected
    other = max(attention_crossing(parsed("llama", "double_ring", default_data), 4)) + gradients
    assert measured["crossed"] > WITHIN_PROTOCOL * other
    assert measured["median"] > 0.9 * measured["crossed"] * 8 / 200e6
    assert len(measured["seconds"]) >= 1


def parsed(model, case, data=Path("nowhere")):
    return parse_args(
        command_line(model, cases_of(model)[case], data, seq_length=1024, batch=2, iterations=3)
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_configuration_is_one_that_the_entry_accepts(model, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for case in cases_of(model):
        validate(parsed(model, case), 8)


def test_crossing_by_hand():
    kv = (
        2 * 1024 * 2 * 64 * 4
    )  # batch, tokens, k and v, 4 heads of 16, float32: of one layer, all ranks
    # forward: 7 of 8 parts pass from node to node; backward: as many, and their gradients to the
    # owner, all 8
    assert attention_crossing(parsed("llama", "ring"), 4) == (2 * kv * 22 // 8, 2 * kv * 22 // 8)


def test_crossing_of_linear_attention_by_hand():
    hidden, heads, tokens = 128, 8, 2 * 1024
    state = 4 * 2 * hidden**2 // heads  # of a layer: batch 2, float32
    # from rank 3 to rank 4 forward, and back in the backward; LRPE doubles the first layer's
    assert attention_crossing(parsed("transnormer", "lasp"), 4) == (3 * state, 3 * state)
    # each rank's states to the 4 of the other node, forward and backward
    assert attention_crossing(parsed("transnormer", "lasp2"), 4) == (2 * 4 * 4 * 3 * state,) * 2
    # q, k, v and out, of which the first layer's q and k are doubled, of 4 ranks to 4 of 8 each
    state_bytes = 4 * tokens * hidden // 4
    assert (
        attention_crossing(parsed("transnormer", "ulysses"), 4) == (2 * (6 + 4) * state_bytes,) * 2
    )
    assert attention_crossing(parsed("transnormer", "megatron_sp"), 4) == (0, 0)


@pytest.mark.slow
@permitted
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_bench_leaves_nothing(number, tmp_path, tmp_path_factory):
    # Importing torch's compiler makes this folder, by default in TMPDIR, for all processes of a
    # user: not the bench's.
    caches = str(tmp_path_factory.mktemp("caches"))
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout
    before = namespaces(os.getpid())
    with interruptible():
        bench = subprocess.Popen(
            [sys.executable, "-m", "bench.link", "--tokens", "1024", "--results", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": caches},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        # itself, the server that forks, its tracker of resources, and the ranks, inside of their
        # nodes
        wait_until(lambda: len(descendants(bench.pid)) >= 8 or bench.poll() is not None)
        ranks = descendants(bench.pid)
        created = namespaces(bench.pid, *ranks) - before
        assert bench.poll() is None
        assert len(created) == 2
        bench.send_signal(number)
        _, err = bench.communicate(timeout=PATIENCE)
    finally:
        bench.kill()
        bench.wait()
    if number == signal.SIGKILL:
        assert bench.returncode == -number
    else:
        assert bench.returncode == (130 if number == signal.SIGINT else 128 + number)
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    wait_until(lambda: not created & namespaces())
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout == named


@pytest.mark.needs("ip", "tc", "setpriv")
@pytest.mark.skipif(os.getuid() != 0, reason="only root has privileges to take away")
def test_without_permission_it_says_what_it_needs():
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    done = ended([*drop, sys.executable, "-m", "bench.link"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(
        r"error: the link bench makes network namespaces .* CAP_SYS_ADMIN and CAP_NET_ADMIN, .*"
        r"Operation not permitted.*run it as root.*`unshare --user --map-root-user --net`.*\n",
        done.stderr,
    )


def test_bad_input_is_one_line(capsys, monkeypatch):
    assert entry.main(["--rate", "12mbps"]) == 1
    assert entry.main(["--rate", "0mbit"]) == 1
    monkeypatch.setenv("PATH", "")
    assert entry.main([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "error: --rate is '12mbps'",
        "error: --rate is '0mbit'",
        "error: the link bench needs ip on the PATH",
    ]


def test_the_report_has_the_fastest_of_each_setting_first():
    setting = {
        "link": "rails",
        "seq_length": 1024,
        "batch": 8,
        "unlimited": 0.5,
        "crossed": 3 << 20,
        "on_link": 0.5,
    }
    setting |= {"attention_by_plan": 2 << 20, "tokens_per_second": 1.0}
    rows = [
        {**setting, "model": model, "name": name, "median": median, "times_as_fast": 3.0 / median}
        for model, name, median in (
            ("gpt", "ring", 3.0),
            ("gpt", "ulysses", 1.5),
            ("transnormer", "lasp", 2.0),
        )
    ]
    lines = entry.markdown({"cases": rows})
    assert lines[1] == "**gpt**, 8 x 1024 tokens, a link for each rank:"
    assert lines[5:7] == [
        "| ulysses | 1.500 | 50% | 0.500 | 3.00 | 2.00 | 1 | 2.00 |",
        "| ring | 3.000 | 50% | 0.500 | 3.00 | 2.00 | 1 | 1.00 |",
    ]
    assert "times as fast as lasp |" in lines[10]
