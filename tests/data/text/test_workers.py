"""Any number of processes write the same bytes, and what stops them leaves nothing."""

import json
import os
import signal
from multiprocessing import get_context

import pytest

from data.text import prepare as module
from data.text.prepare import Request, prepare
from data.text.workers import in_order
from runtime.errors import DataError, StoppedError

COUNT = 700


def write_lines(path, count=COUNT):
    path.write_text(
        "".join(
            json.dumps({"text": f"Line {n} is about {n * n} tokens. " * 3}) + "\n"
            for n in range(count)
        )
    )
    return path


def request_for(source):
    return Request(inputs=(str(source),), vocab_size=300)


def contents(folder, name="d"):
    return {path.suffix: path.read_bytes() for path in folder.glob(f"{name}.*")}


def test_any_number_of_processes_writes_the_same_bytes(tmp_path):
    source = write_lines(tmp_path / "in.jsonl")
    for count in (1, 2):
        prepare(request_for(source), tmp_path / str(count) / "d", progress=False, workers=count)
    one_worker, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert set(one_worker) == {".bin", ".idx", ".json", ".model"}
    assert one_worker == two


def test_a_killed_preparation_leaves_nothing_and_is_begun_again(tmp_path):
    source, prefix = write_lines(tmp_path / "in.jsonl"), tmp_path / "killed" / "d"
    child = os.fork()
    if child == 0:
        module.write_index = lambda *_: os._exit(9)  # all tokens are written
        prepare(request_for(source), prefix, progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not list(prefix.parent.glob("d.*"))
    prepare(request_for(source), prefix, progress=False)
    prepare(request_for(source), tmp_path / "whole" / "d", progress=False)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not list(prefix.parent.glob(".*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StoppedError, OSError])
def test_what_stops_a_preparation_says_that_nothing_is_written(
    error, tmp_path, monkeypatch, capsys
):
    def failing(*_, **options):
        raise error("now")

    monkeypatch.setattr(module, "tokenized", failing)
    with pytest.raises(DataError if error is OSError else error):
        prepare(
            request_for(write_lines(tmp_path / "in.jsonl")), tmp_path / "out" / "d", progress=False
        )
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().err == "nothing was written; the same command starts over\n"


def square_or_end(number):
    if number == 5:
        os._exit(9)
    return number * number


def test_a_process_that_is_killed_is_told():
    with pytest.raises(StoppedError, match=r"one of 2 processes was killed, .*fewer --workers"):
        list(in_order(square_or_end, range(20), 2))


def test_ctrl_c_in_the_middle_of_a_start_waits_until_the_process_has_its_orders(monkeypatch, capfd):
    popen = get_context("spawn").Process._Popen
    started = []

    def interrupted(process):
        signal.raise_signal(signal.SIGINT)
        started.append(popen(process))
        return started[-1]

    monkeypatch.setattr(get_context("spawn").Process, "_Popen", staticmethod(interrupted))
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in a shell's background jobs
    with pytest.raises(KeyboardInterrupt):
        list(in_order(square_or_end, range(5), 2))
    signal.signal(signal.SIGINT, before)
    assert [process.poll() for process in started] == [0]
    assert "Traceback" not in capfd.readouterr().err
