"""Documents come in a fixed order, whole, and a file that cannot be read is named."""

import json
import sys
from pathlib import Path

import pytest

from data.text import corpus
from data.text.corpus import Corpus, input_files, stdlib_files
from runtime.errors import DataError


def test_stdlib_is_there_without_tests():
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "ast.py", "threading.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)
    assert sum(path.stat().st_size for path in files) > 5_000_000
    # Mixed, so that a tail taken for validation is not the end of the alphabet.
    initials = [path.name[0] for path in files]
    assert initials != sorted(initials)


def test_folder_order_depends_on_relative_names_only(tmp_path):
    for copy in ("a", "b"):
        for i in range(20):
            path = tmp_path / copy / f"sub{i % 3}" / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text {i}")
        (tmp_path / copy / "other.py").write_text("left out")
    first, second = (list(Corpus(input_files([tmp_path / copy], ".txt"))) for copy in ("a", "b"))
    assert first == second
    assert sorted(first) == sorted(f"text {i}" for i in range(20))


def test_text_is_exact_and_empty_documents_are_left_out(tmp_path):
    texts = {
        "a.txt": "\ufeffa\r\nb\r",
        "b.txt": "",
        "c.jsonl": '{"text": "x\\n"}\n\n{"text": ""}\n{"text": "é"}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    corpus = Corpus(input_files([tmp_path / name for name in texts], ".txt"))
    assert list(corpus) == ["a\r\nb\r", "x\n", "é"]
    assert list(corpus) == ["a\r\nb\r", "x\n", "é"]


@pytest.mark.parametrize(
    ("max_bytes", "documents"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (10**9, 4)]
)
def test_max_bytes_counts_utf8(tmp_path, max_bytes, documents):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "éé"}\n{"text": "abcd"}\n{"text": "e"}\n{"text": "f"}\n'
    )
    expected = ["éé", "abcd", "e", "f"][:documents]
    # Documents begin at bytes 0, 4, 8 and 9.
    assert list(Corpus([tmp_path / "a.jsonl"], max_bytes)) == expected


def test_undecodable_file_is_named_or_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8 .* at byte 3"):
        list(Corpus(files))
    tolerant = Corpus(files, skip_undecodable=True)
    assert list(tolerant) == ["good"]
    assert tolerant.skipped == [tmp_path / "b.txt"]


def test_missing_input_is_named(tmp_path):
    with pytest.raises(DataError, match="none does not exist"):
        input_files([tmp_path / "none"], ".txt")
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt"):
        list(Corpus([tmp_path / "gone.txt"]))


def test_an_array_is_read_in_pieces(tmp_path, monkeypatch):
    """Elements longer and shorter than a piece, brackets and commas inside of strings."""
    monkeypatch.setattr(corpus, "_CHUNK", 7)
    table = [{"text": "]" * n + ", [{" + chr(10) + "é"} for n in (1, 50, 3, 7)]
    (tmp_path / "a.json").write_text(json.dumps(table, ensure_ascii=False))
    assert list(Corpus([tmp_path / "a.json"])) == [row["text"] for row in table]


def test_a_dataset_of_several_splits_is_refused(tmp_path):
    (tmp_path / "d").mkdir()
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    both = {name: Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    DatasetDict(both).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"holds the splits .* give one, such as .*d/train"):
        list(Corpus(input_files([tmp_path / "d"], ".txt")))
    assert list(Corpus(input_files([tmp_path / "d" / "test"], ".txt"))) == ["test"]


@pytest.mark.parametrize(
    ("module", "name"), [("pyarrow", "a.parquet"), ("datasets", "hf:someone/something")]
)
def test_a_missing_package_is_named(module, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"{name} .*pip install {module}"):
        list(Corpus([Path(name)]))
