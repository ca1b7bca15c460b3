"""Any number of processes write the same bytes, and so does a preparation that was killed and is started again."""

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
        "".join(json.dumps({"text": f"Line {n} is about {n * n} tokens. " * 3}) + "\n" for n in range(count))
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
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert set(one) == {".bin", ".idx", ".json", ".model"}
    assert one == two


def killed_at(note, source, prefix):
    """Prepare in a process that ends, as by SIGKILL, after so many notes in the journal."""
    child = os.fork()
    if child == 0:
        noted = []
        note_it = module.Spool.note

        def counting(self):
            note_it(self)
            noted.append(1)
            if len(noted) == note:
                self.write("bin", b"what the journal does not know")
                self.flush()
                os._exit(9)

        module.Spool.note = counting
        prepare(request_for(source), prefix, progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture
def counted(monkeypatch):
    """The numbers of documents that were tokenized together."""
    monkeypatch.setattr(module, "COMMIT_BYTES", 1)
    found = []
    tokenized = module.tokenized

    def counting(tokenizer, texts, **options):
        found.append(len(texts))
        return tokenized(tokenizer, texts, **options)

    monkeypatch.setattr(module, "tokenized", counting)
    return found


@pytest.mark.parametrize(("lost", "left"), [(0, [188]), (9, [256, 188])], ids=["", "a note cut off"])
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path, counted, lost, left):
    source = write_lines(tmp_path / "in.jsonl")
    prepare(request_for(source), tmp_path / "whole" / "d", progress=False)
    assert counted == [256, 256, 188]
    counted.clear()
    killed_at(2, source, tmp_path / "killed" / "d")
    assert not list((tmp_path / "killed").glob("d.*"))
    journal = tmp_path / "killed" / ".d.resume.journal"
    os.truncate(journal, journal.stat().st_size - lost)
    prepare(request_for(source), tmp_path / "killed" / "d", progress=False)
    assert counted == left
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob(".*"))


def test_another_input_begins_anew(tmp_path, counted):
    source = write_lines(tmp_path / "in.jsonl")
    killed_at(2, source, tmp_path / "d")
    write_lines(source, COUNT - 1)
    prepare(request_for(source), tmp_path / "d", progress=False)
    assert counted == [256, 256, 187]
    prepare(request_for(source), tmp_path / "e", progress=False)
    assert contents(tmp_path)[".bin"] == contents(tmp_path, "e")[".bin"]


@pytest.mark.parametrize(
    ("error", "kept"), [(KeyboardInterrupt, True), (DataError, False), (StoppedError, True), (OSError, True)]
)
def test_what_an_interruption_keeps(error, kept, tmp_path, counted, monkeypatch):
    source, tokenized = write_lines(tmp_path / "in.jsonl"), module.tokenized

    def failing(tokenizer, texts, **options):
        if len(counted) == 2:
            raise error("now")
        return tokenized(tokenizer, texts, **options)

    monkeypatch.setattr(module, "tokenized", failing)
    with pytest.raises(DataError if error is OSError else error):
        prepare(request_for(source), tmp_path / "out" / "d", progress=False)
    assert (tmp_path / "out").exists() == kept
    monkeypatch.setattr(module, "tokenized", tokenized)
    counted.clear()
    prepare(request_for(source), tmp_path / "out" / "d", progress=False)
    assert counted == ([188] if kept else [256, 256, 188])


def square_or_end(number):
    if number == 5:
        os._exit(9)
    return number * number


def test_a_process_that_is_killed_is_told():
    with pytest.raises(StoppedError, match=r"one of 2 processes was killed, .*fewer --workers"):
        list(in_order(square_or_end, range(20), 2))
    assert list(in_order(square_or_end, range(5), 2)) == [0, 1, 4, 9, 16]


def test_ctrl_c_in_the_middle_of_a_start_waits_until_the_process_has_its_orders(monkeypatch, capfd):
    popen = get_context("spawn").Process._Popen
    started = []

    def interrupted(process):
        signal.raise_signal(signal.SIGINT)
        started.append(popen(process))
        return started[-1]

    monkeypatch.setattr(get_context("spawn").Process, "_Popen", staticmethod(interrupted))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
    with pytest.raises(KeyboardInterrupt):
        list(in_order(square_or_end, range(5), 2))
    signal.signal(signal.SIGINT, before)
    assert [process.poll() for process in started] == [0]
    assert "Traceback" not in capfd.readouterr().err
