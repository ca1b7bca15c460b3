"""Files appear whole and for good, or not at all."""

import os
from pathlib import Path

import pytest

from parallel.files import replacing, write_text


def _write_half(error: type[BaseException], *paths: Path) -> None:
    with replacing(*paths) as names:
        names[0].write_bytes(b"half")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_replacing_leaves_nothing_when_interrupted(tmp_path: Path, error: type[BaseException]) -> None:
    paths = tmp_path / "new" / "d.bin", tmp_path / "new" / "d.idx"
    with pytest.raises(error):
        _write_half(error, *paths)
    assert not list((tmp_path / "new").iterdir())


def test_replacing_keeps_the_old_and_pairs_the_new(tmp_path: Path) -> None:
    paths = tmp_path / "d.bin", tmp_path / "d.idx"
    for path in paths:
        path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        _write_half(KeyboardInterrupt, *paths)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"old", b"old"]
    with replacing(*paths) as names:
        assert names[0].with_suffix("") == names[1].with_suffix("")
        for name in names:
            name.write_bytes(b"new")
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"new", b"new"]


def test_it_is_on_disk_before_it_bears_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append("fsync folder" if path.is_dir() else f"fsync {path.read_text()}")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append(f"rename {Path(b).name}"), replace(a, b))[1])
    write_text(tmp_path / "a.txt", "whole")
    assert events == ["fsync whole", "rename a.txt", "fsync folder"]
