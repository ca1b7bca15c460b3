"""Files of a run, each damaged in every way of a table.

Accepted, noted or refused, always in one line.
"""

import json
import math
import os
import shutil
import stat
from pathlib import Path

import pytest

from runtime.files import LOCK, owned
from tests.endings import end
from tests.parallel.tiny import ARCHITECTURE, Tiny, build, rewrite_manifest, save, train
from tools.plot import LOSSES, read_curves
from train.callbacks.health import FAILURES, Health, HealthConfig, RunProgress
from train.callbacks.metrics import METRICS, LoggingConfig, RunLog
from train.checkpoint.api import load_model
from train.checkpoint.local import fingerprint
from train.checkpoint.manifest import STARTS, read_manifest
from train.checkpoint.search import find_checkpoint
from train.config.entries import Config
from train.config.language import parse_args
from train.resume.start import progress_of
from train.run import FILES, claim_folder

PROGRESS = {"iteration": 2, "consumed_samples": 8, "consumed_tokens": 64, "skipped_iterations": 0}


def flip(place):
    """One bit, a share of the file from its beginning."""

    def mutate(path):
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return mutate


def cut(share, less=0):
    return lambda path: os.truncate(path, int(share * path.stat().st_size) - less)


def put(content):
    return lambda path: path.write_bytes(content)


def fifo_instead(path):
    path.unlink()
    os.mkfifo(path)


def socket_instead(path):
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


def moved_out(path):
    """A link to the same content in another folder."""
    elsewhere = path.parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def link(path, target):
    path.unlink()
    path.symlink_to(target)


def of_the_other_iteration(path):
    shutil.copy(path.parents[1] / "iter_0000001" / path.name, path)


def in_every_line(change):
    """Change each record of a metrics.jsonl."""

    def mutate(path):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(change(record)) + "\n" for record in records))

    return mutate


ANY_FILE = {
    "delete": Path.unlink,
    "empty": cut(0),
    "cut to a half": cut(0.5),
    "cut by a byte": cut(1, less=1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    **{f"flip a bit at {place}": flip(place) for place in (0, 0.3, 0.7, 1)},
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "folder": folder_instead,
    "fifo": fifo_instead,
    "socket": socket_instead,
    "device": lambda path: link(path, "/dev/zero"),
    "symlink out of the folder": moved_out,
    "a terabyte that takes no room": lambda path: os.truncate(path, 1 << 40),
    "dangling symlink": lambda path: link(path, "nowhere"),
    "symlink to itself": lambda path: link(path, path.name),
    "symlink to a folder": lambda path: link(path, "."),
    "empty object": put(b"{}"),
    "no text": put(b"\xff\xfe\x00\x00"),
    "nested too deep": put(b"[" * 5000),
    "number too long": put(b"1" * 5000),
}
CHECKPOINT = ("manifest.json", ".metadata", "__0_0.distcp")
"""Files of the newest checkpoint, without any of which the one before is taken."""

FORGED = {
    "iteration of another": {"iteration": 1},
    "iteration no number": {"iteration": "x"},
    "no files": {"files": {}},
    "files no table": {"files": 3},
    "a file with no digest": {"files": {".metadata": 3}},
    "a file outside": {"files": {"../x": (1, "0")}},
    "architecture of none": {"architecture": {}},
    "architecture no table": {"architecture": 5},
    "a digest that is none": {"files": {".metadata": (1, "0")}},
    **{
        f"size {size!r}": {"files": {".metadata": (size, "0" * 64)}}
        for size in (-1, 1.5, "1", True, 2**70)
    },
    **{f"iteration {number!r}": {"iteration": number} for number in (-2, 2.0, True, 2**70)},
    "extra no table": {"extra": 5},
    "extra a list": {"extra": []},
}
"""Manifests whose checksum is right and whose content is not."""

EXTRAS = {
    "empty": {},
    "progress none": {"progress": None},
    "progress empty": {"progress": {}},
    "progress a list": {"progress": [1, 2]},
    "progress a word": {"progress": "x"},
    "progress of another iteration": {"progress": {**PROGRESS, "iteration": 1}},
    "progress without iteration": {"progress": {"consumed_samples": 8}},
    **{
        f"{name} {value!r}": {"progress": {**PROGRESS, name: value}}
        for name in PROGRESS
        for value in (-5, "x", 1.5, None, True, 2**53)
    },
    "unknown": {"progress": {**PROGRESS, "epochs": 3}},
    "sample order a list": {"progress": PROGRESS, "sample_order": [1]},
    "trained for a number": {"progress": PROGRESS, "trained_for": 1},
    "schedule a word": {"progress": PROGRESS, "schedule": "x"},
    **{
        f"ema_decay {value!r}": {"progress": PROGRESS, "ema_decay": value}
        for value in ("x", 3.0, -1.0, [], True)
    },
}

RECORDS = {
    "no iteration": in_every_line(lambda r: {name: r[name] for name in r if name != "iteration"}),
    "no loss": in_every_line(lambda r: {"iteration": r["iteration"]}),
    "empty records": in_every_line(lambda _: {}),
    "lists": in_every_line(lambda r: [r]),
    "numbers": in_every_line(lambda _: 3),
    "nulls": in_every_line(lambda _: None),
    **{
        f"{name} {value!r}": in_every_line(lambda r, name=name, value=value: {**r, name: value})
        for name in ("iteration", "lm_loss", "grad_norm", "learning_rate")
        for value in ("x", {}, True, math.nan, 10**400)
    },
    "iteration null": in_every_line(lambda r: {**r, "iteration": None}),
    "iteration 1.5": in_every_line(lambda r: {**r, "iteration": 1.5}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run with checkpoints of iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("mutations") / "run"
    model, optimizer = build(0, sharded=False)
    for iteration in (1, 2):
        train(model, optimizer, range(iteration, iteration + 1))
        path = save(folder, iteration, model, optimizer)
        rewrite_manifest(path, extra={"progress": {**PROGRESS, "iteration": iteration}})
    records = [
        {"iteration": i, "lm_loss": 8.0 / i, "grad_norm": 1.0, "learning_rate": 1e-3}
        for i in (1, 2, 3)
    ]
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.toml").write_text("[train]\ntrain_iters = 3\n")
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def resumed(folder):
    """Read a checkpoint as a resume does; return its iteration."""
    path = find_checkpoint(folder)
    progress = progress_of(path, read_manifest(path).extra)
    load_model(path, Tiny(), ARCHITECTURE)
    return progress.iteration


def ended(call):
    """A call's result, None where it is refused, and the lines that a user reads of it."""
    results = []
    ending = end(lambda _: results.append(call()), [])
    lines = (ending.stdout + ending.stderr).splitlines()
    assert ending.status == (0 if results else 1), lines
    assert bool(results) or [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert not any("Traceback" in line for line in lines)
    return (results or [None])[0], lines


@pytest.mark.parametrize("name", CHECKPOINT)
@pytest.mark.parametrize("mutation", [*ANY_FILE, "of the other iteration"])
def test_a_file_of_a_checkpoint(name, mutation, run):
    """The one before is taken, and the line names the damaged file."""
    ({**ANY_FILE, "of the other iteration": of_the_other_iteration}[mutation])(
        run / "iter_0000002" / name
    )
    iteration, lines = ended(lambda: resumed(run))
    if (name, mutation) == ("manifest.json", "cut by a byte"):  # the end of its last line
        assert (iteration, lines) == (2, [])
        return
    assert iteration == 1
    assert len(lines) <= 2
    assert "passed over" in lines[0]
    assert "iter_0000002" in lines[0]


@pytest.mark.parametrize("mutation", ANY_FILE)
def test_the_pointer_is_a_hint(mutation, run):
    ANY_FILE[mutation](run / "latest_checkpointed_iteration.txt")
    iteration, lines = ended(lambda: resumed(run))
    assert iteration == 2
    assert len(lines) <= 1


@pytest.mark.parametrize("forgery", FORGED)
def test_a_manifest_that_is_intact_and_wrong(forgery, run):
    rewrite_manifest(run / "iter_0000002", **FORGED[forgery])
    iteration, lines = ended(lambda: resumed(run))
    assert iteration in (1, None)
    assert "iter_0000002" in lines[0]
    assert len(lines) <= 2


def test_a_manifest_with_a_wrong_extra(run):
    for extra in EXTRAS.values():
        rewrite_manifest(run / "iter_0000002", extra=extra)
        iteration, (line,) = ended(lambda: resumed(run))
        assert iteration is None, extra
        assert "iter_0000002/manifest.json has no valid state of its run" in line
        assert "load another" in line


@pytest.mark.parametrize("mutation", [*ANY_FILE, *RECORDS])
@pytest.mark.parametrize("reader", ["resume", "plot"])
def test_the_records_of_a_run(mutation, reader, run):
    path = run / METRICS
    (ANY_FILE | RECORDS)[mutation](path)
    records, lines = ended(
        lambda: (
            RunLog(path.parent, LoggingConfig(), {}, 2)
            if reader == "resume"
            else read_curves(path, list(LOSSES), "iteration")
        )
    )
    assert records is not None or METRICS in lines[0]
    assert len(lines) <= 1
    if records is None and mutation in RECORDS:
        assert "line 1" in lines[0]
    assert mutation not in RECORDS or records is None or reader == "plot", (
        "a wrong record is no record"
    )


FAILURE = {"iteration": 2, "checkpoint": 1, "why": "the loss was not finite"}
START = {"time": 1.0, "iteration": 0, "device": "cpu"}
LINES = {
    **{
        f"{name} {value!r}": {name: value}
        for name in ("iteration", "checkpoint", "time")
        for value in ("x", [], 2**70)
    },
    **{f"why {value!r}": {"why": value} for value in (3, None)},
}


@pytest.mark.parametrize("mutation", [*ANY_FILE, *LINES])
@pytest.mark.parametrize(("name", "line"), [(FAILURES, FAILURE), (STARTS, START)])
def test_what_a_run_notes_of_its_starts_and_failures(name, line, mutation, run, tmp_path):
    """They are read by the next start, starts.jsonl with local ones.

    It names the file where it is not taken.
    """
    config = parse_args(
        ["--data-path", "x", "--tokenizer-model", "x", "--save", str(run), "--load", str(run)]
    )
    (run / name).write_text(json.dumps(line | LINES.get(mutation, {})) + "\n")
    ANY_FILE.get(mutation, lambda path: None)(run / name)

    def start():
        assert fingerprint(run) is None or name == STARTS
        find_checkpoint(run, local=run)
        claim_folder(config)  # before starts.jsonl gets the line of this start
        Health(HealthConfig(), str(run), [], RunProgress())
        return 1

    result, lines = ended(start)
    assert result or name in lines[-1]
    if LINES.get(mutation, {}).keys() & line.keys() - {"time"}:
        assert result is None


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "device", "dangling symlink"])
def test_a_lock_that_is_no_file(kind, run):
    (run / LOCK).touch()
    ANY_FILE[kind](run / LOCK)

    def begin():
        with owned(run):
            pytest.fail("nothing was locked")

    _, (line,) = ended(begin)
    assert "run/.lock is a" in line
    assert "which is not a lock; remove it" in line


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (name, kind)
            for name in FILES
            for kind in ("fifo", "folder", "symlink out of the folder")
        ),
        *((f"hf/{name}", "fifo") for name in ("config.json", "more/vocab.json")),
        ("hf/config.json", "symlink out of the folder"),
    ],
)
def test_what_is_no_file_in_the_place_of_a_file_to_write_or_take_over(name, kind, run, tmp_path):
    """The folder is the one to save to, or, for ``hf/``, the one that another run begins with."""
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).touch()
    ANY_FILE[kind](run / name)
    save = tmp_path / "other" if name.startswith("hf/") else run
    config = parse_args(
        ["--data-path", "x", "--tokenizer-model", "x", "--save", str(save), "--load", str(run)]
    )
    _, (line,) = ended(lambda: claim_folder(config))
    assert f"but {name} in it is a" in line


@pytest.mark.parametrize("mutation", ANY_FILE)
def test_the_configuration(mutation, run):
    path = run / "config.toml"
    ANY_FILE[mutation](path)
    config, lines = ended(lambda: parse_args(["--config", str(path)]))
    assert isinstance(config, Config) or "config.toml" in lines[0]
    assert len(lines) <= 1
