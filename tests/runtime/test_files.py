"""Files appear whole and for good, or not at all; a folder has one writer."""

import os
import re
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from runtime.files import InUseError, owned, replacing, write_text
from tests.runtime.test_signals import forked


def _write_half(*paths):
    with replacing(*paths) as names:
        names[0].write_bytes(b"half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("old", [[], [b"old", b"old"]])
def test_replacing_keeps_what_was_there_when_interrupted_and_pairs_the_new(tmp_path, old):
    paths = tmp_path / "new" / "d.bin", tmp_path / "new" / "d.idx"
    for path, content in zip(paths, old, strict=False):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(KeyboardInterrupt):
        _write_half(*paths)
    assert [path.read_bytes() for path in sorted((tmp_path / "new").iterdir())] == old
    with replacing(*paths) as names:
        assert names[0].with_suffix("") == names[1].with_suffix("")
        for name in names:
            name.write_bytes(b"new")
    assert [path.read_bytes() for path in sorted((tmp_path / "new").iterdir())] == [b"new", b"new"]


def test_a_folder_takes_a_free_name_and_no_other_folders(tmp_path):
    for is_taken in (False, True):
        with (
            pytest.raises(OSError, match="not empty") if is_taken else nullcontext(),
            replacing(tmp_path / "d") as (draft,),
        ):
            (draft / "sub").mkdir(parents=True)
            (draft / "sub" / "a").write_text(str(is_taken))
        assert [path.name for path in tmp_path.iterdir()] == ["d"]
        assert (tmp_path / "d" / "sub" / "a").read_text() == "False"


def test_it_is_on_disk_before_it_bears_its_name_and_the_name_after(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append("fsync folder" if path.is_dir() else f"fsync {path.read_text()}")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        Path, "replace", lambda a, b: (events.append(f"rename {Path(b).name}"), replace(a, b))[1]
    )
    write_text(tmp_path / "a.txt", "whole")
    assert events == ["fsync whole", "rename a.txt", "fsync folder"]
    events.clear()
    with replacing(tmp_path / "d") as (draft,):
        draft.mkdir()
        (draft / "a").write_text("within")
    assert events == ["fsync within", "fsync folder", "rename d", "fsync folder"]


@contextmanager
def another_process(folder, stem=None, draft="d.bin"):
    """A process that owns a folder and is at writing a file, until it is killed; its id."""

    def body(report):
        with owned(folder, stem), replacing(folder / draft) as (name,):
            name.write_bytes(b"half")
            os.write(report, b".")
            signal.pause()

    child, _ = forked(body)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("stem", [None, "d"])
def test_a_folder_has_one_owner_and_a_killed_one_leaves_nothing(stem, tmp_path):
    folder = tmp_path / "new" / "run"
    with another_process(folder, stem) as child:
        before = sorted(folder.iterdir())
        assert len(before) == 2, "a lock and a draft"
        with (
            pytest.raises(InUseError, match=rf"{folder} is in use by process {child} on .*wait"),
            owned(folder, stem),
        ):
            pytest.fail("two owners")
        assert sorted(folder.iterdir()) == before
    with owned(folder, stem):
        (lock,) = folder.iterdir()
        assert lock.name == (".lock" if stem is None else ".d.lock")
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
    assert not list(folder.iterdir())


def test_an_owner_leaves_what_others_write(tmp_path):
    (tmp_path / ".hidden.bin").write_text("a user's")
    with another_process(tmp_path, "d"):
        names_before = {path.name for path in tmp_path.iterdir()}
        with owned(tmp_path):
            assert {path.name for path in tmp_path.iterdir()} == names_before | {".lock"}
        with owned(tmp_path, "e"):
            assert {path.name for path in tmp_path.iterdir()} == names_before | {".e.lock"}
    assert {path.name for path in tmp_path.iterdir()} == names_before


def test_children_of_an_owner_do_not_keep_its_lock(tmp_path):
    """Workers that read data outlive a killed trainer for some seconds.

    In these it is started again.
    """
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        with owned(tmp_path):
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(writing, str(child).encode())
            signal.pause()
    child = int(os.read(reading, 20))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        with owned(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("gone", ["lock", "folder"])
def test_what_its_owner_removed_meanwhile_is_made_anew(gone, tmp_path, monkeypatch):
    """An owner that ends removes its lock, and the folder that it made.

    Another one opens the lock meanwhile.
    """
    folder, opening, calls = tmp_path / "run", os.open, []

    def removing(path, *how):
        calls.append(path.name)
        if len(calls) == 1 and gone == "folder":
            os.rmdir(folder)
        handle = opening(path, *how)
        if len(calls) == 1:
            os.unlink(path)
        return handle

    monkeypatch.setattr(os, "open", removing)
    with owned(folder):
        assert calls == [".lock"] * 2
        assert re.match(r"process \d+", (folder / ".lock").read_text())


def test_one_process_has_a_folder_once(tmp_path):
    """fcntl grants its process a lock again, and the second's end would release the first."""
    with owned(tmp_path):
        with (
            pytest.raises(InUseError, match="in use by this process already"),
            owned(tmp_path / "." / ""),
        ):
            pytest.fail("two owners")
        assert (tmp_path / ".lock").exists()
        with owned(tmp_path, "d"):
            pass
    with owned(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_kept(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".lock").symlink_to("mine")
    with (
        pytest.raises(
            InUseError, match=r"\.lock is a symbolic link, which is not a lock; remove it"
        ),
        owned(tmp_path),
    ):
        pytest.fail("a link was followed")
    assert (tmp_path / "mine").read_text() == "precious"


def test_one_who_waits_has_it_when_the_other_is_killed(tmp_path):
    with another_process(tmp_path, "d") as first:
        waiting, writing = os.pipe()
        (tmp_path / f".d.{'0' * 32}").mkdir()
        (tmp_path / f".d.{'0' * 32}" / "a.npy").touch()
        second = os.fork()
        if second == 0:
            sys.stderr = os.fdopen(writing, "w", buffering=1)
            try:
                with owned(tmp_path, "d", wait=True):
                    names = sorted(path.name for path in tmp_path.iterdir())
                    print(names, (tmp_path / ".d.lock").read_text(), file=sys.stderr)
            finally:
                os._exit(0)
        os.close(writing)
        assert f"in use by process {first} on" in os.read(waiting, 999).decode()
    os.waitpid(second, 0)
    assert os.read(waiting, 999).decode().lstrip().startswith(f"['.d.lock'] process {second} on ")


def _as_nobody(folder, report):
    """In a child, what comes of owning the folder as another user.

    That user may not look into those above it.
    """
    os.chdir(folder)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        with owned(Path()):
            os.write(report, b"owned")
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_killed_runs_lock_is_taken_by_another_user(tmp_path):
    tmp_path.chmod(0o777)
    umask = os.umask(0o022)
    try:
        with another_process(tmp_path):
            pass
    finally:
        os.umask(umask)
    for mode, message in {
        None: "owned",
        0o600: "InUseError: .lock was left by uid 0, and you may not open it; remove it",
    }.items():
        (tmp_path / ".lock").touch()
        if mode is not None:
            (tmp_path / ".lock").chmod(mode)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _as_nobody(tmp_path, writing)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 999).decode().startswith(message)
