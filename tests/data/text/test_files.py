"""Files that people have, each read as meant, told or refused; the kinds are rows of a page."""

import bz2
import gzip
import json
import lzma
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.text.corpus import Corpus, Rows, input_files
from runtime.errors import DataError
from tests.data.kinds import check_page
from tests.data.latents.test_pictures import KINDS as PICTURES
from tests.data.text.test_documents import KINDS as PAIRS
from tools.prepare_data import main

TEXTS = ["one\r\ntwo", "drei\u00e9 \ufeff", "[four]: {"]
LINES = "".join(
    json.dumps({"id": n, "text": text}, ensure_ascii=False) + "\n" for n, text in enumerate(TEXTS)
)
ARRAY = json.dumps([{"text": text} for text in TEXTS], indent=1, ensure_ascii=False)
BOM = "\ufeff"


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)


def zstandard(path, content):
    """Write two frames, one after the other, as tools that compress by blocks do."""
    for part in (content[:50], content[50:]):
        with path.open("ab") as file, pa.CompressedOutputStream(file, "zstd") as frame:
            frame.write(part)


def dataset(path, rows, **formatted):
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    table = Dataset.from_list(rows)
    if formatted:
        table.set_format(**formatted)
    table.save_to_disk(str(path))


def nested_parquet(path):
    parquet(path, meta=[{"a": [1, 2]}] * 3, text=pa.array(TEXTS, pa.large_string()))


ROWS = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
DEEP = [{"id": n, "text": {"body": text}} for n, text in enumerate(TEXTS)]
PLAIN = "caf\u00e9\r\n"

ENCODED = LINES.encode()
RIGHT = {
    "JSON lines, .jsonl": ("a.jsonl", ENCODED),
    "JSON lines, .ndjson": ("a.ndjson", ENCODED),
    "JSON lines, .jl": ("a.jl", ENCODED),
    "JSON lines, .jsonlines": ("a.jsonlines", ENCODED),
    "JSON lines, .JSONL": ("a.JSONL", ENCODED),
    "JSON lines, .json": ("a.json", ENCODED),
    "JSON lines, .jsonl.gz": ("a.jsonl.gz", gzip.compress(ENCODED)),
    "JSON lines, .json.gz, as of C4": ("a.json.gz", gzip.compress(ENCODED)),
    "JSON lines, .jsonl.bz2": ("a.jsonl.bz2", bz2.compress(ENCODED)),
    "JSON lines, .jsonl.xz": ("a.jsonl.xz", lzma.compress(ENCODED)),
    "JSON lines, .jsonl.zst of several frames": (
        "a.jsonl.zst",
        lambda path: zstandard(path, ENCODED),
    ),
    "JSON lines with a byte-order mark": ("a.jsonl", (BOM + LINES).encode()),
    "JSON lines in UTF-16": ("a.jsonl", LINES.encode("utf-16")),
    "JSON lines with CRLF, some of them empty": (
        "a.jsonl",
        LINES.replace("\n", "\r\n\r\n").encode(),
    ),
    "JSON array": ("a.json", ARRAY.encode()),
    "JSON array with a byte-order mark": ("a.json", (BOM + ARRAY).encode()),
    "JSON array in UTF-16": ("a.json", ARRAY.encode("utf-16")),
    "JSON array, .json.gz": ("a.json.gz", gzip.compress(ARRAY.encode())),
    "Parquet": ("a.parquet", lambda path: parquet(path, text=TEXTS)),
    "Parquet, .PQ, with nested columns beside the text": ("a.PQ", nested_parquet),
    "folder saved by Hugging Face's datasets": ("d", lambda path: dataset(path, ROWS)),
    "folder saved by datasets with a format for some columns": (
        "d",
        lambda path: dataset(path, ROWS, columns=["id"]),
    ),
    "folder saved by datasets with a format of tensors": (
        "d",
        lambda path: dataset(path, ROWS, type="torch"),
    ),
    "text": ("a.txt", PLAIN.encode()),
    "text with a byte-order mark": ("a.txt", (BOM + PLAIN).encode()),
    "text in UTF-16 with a byte-order mark": ("a.txt", PLAIN.encode("utf-16")),
    "text in UTF-32 with a byte-order mark": ("a.txt", PLAIN.encode("utf-32")),
    "text, .txt.gz": ("a.txt.gz", gzip.compress(PLAIN.encode())),
    "empty texts among rows": ("a.jsonl", b'{"text": ""}\n{"text": "a"}\n'),
}
"""Names and contents of files, as bytes or functions that write them."""
OTHER_DOCUMENTS = {kind: [PLAIN] for kind in RIGHT if kind.startswith("text")} | {
    "empty texts among rows": ["a"]
}
TOLD = {"JSON lines in a file with an ending of text, .log": ("a.log", ENCODED)}
REFUSED = {
    "table, .csv": ("a.csv", b"text\nhello\n", "is a table"),
    "table, .TSV": ("a.TSV", b"text\nhello\n", "is a table"),
    "table, .csv.gz": ("a.csv.gz", gzip.compress(b"text\nhello\n"), "is a table"),
    "table, .xlsx": ("a.xlsx", b"PK", "is a table"),
    "shard of a folder saved by datasets, .arrow": ("a.arrow", b"ARROW1", "is a table"),
    "archive, .zip": ("a.zip", b"PK", "is an archive"),
    "archive, .tar.gz": ("a.tar.gz", gzip.compress(b"x"), "is an archive"),
    "text in Latin-1": ("a.txt", PLAIN.encode("latin-1"), "is not UTF-8"),
    "text in UTF-16 without a byte-order mark": (
        "a.txt",
        "plain".encode("utf-16-le"),
        "NUL characters",
    ),
    "a compressed file that is cut off": (
        "a.jsonl.gz",
        gzip.compress(ENCODED * 9)[:-20],
        "cannot read",
    ),
    "a file with the ending .gz that is not compressed": ("a.jsonl.gz", ENCODED, "cannot read"),
    "one JSON object over several lines, .json": ("a.json", b'{\n "text": "a"\n}', "not an array"),
    "rows whose text is null": ("a.jsonl", b'{"text": null}\n', 'field "text" is null'),
    "rows whose text is a list": ("a.jsonl", b'{"text": ["a"]}\n', 'field "text" is a list'),
    "rows whose text is an object": (
        "a.parquet",
        lambda path: parquet(path, text=DEEP),
        'row 1: field "text" is an object',
    ),
    "rows whose text is bytes": (
        "a.parquet",
        lambda path: parquet(path, text=[b"a"]),
        ('row 1: field "text" is of type bytes'),
    ),
    "rows that are not objects": ("a.jsonl", b'"a"\n', "holds a string, not an object"),
    "rows without fields": ("a.jsonl", b"{}\n", 'has no field "text"'),
    "rows whose text is in another field": ("a.jsonl", b'{"content": "a"}\n', "--json-keys"),
}


def written(folder, name, content):
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    return path


def read(path):
    return list(Corpus(input_files([path], ".txt")))


@pytest.mark.parametrize("kind", RIGHT)
def test_a_file_gives_its_documents(tmp_path, capsys, kind):
    assert read(written(tmp_path, *RIGHT[kind])) == OTHER_DOCUMENTS.get(kind, TEXTS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", TOLD)
def test_a_file_that_may_be_meant_otherwise_is_told_once(tmp_path, capsys, kind):
    path = written(tmp_path, *TOLD[kind])
    corpus = Corpus(input_files([path], ".txt"))
    assert [list(corpus), list(corpus)] == [[LINES]] * 2
    assert capsys.readouterr().err.count(f"note: {path} is read as a single text") == 1


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_would_be_read_wrong_is_refused_by_name(tmp_path, kind):
    *file, why = REFUSED[kind]
    path = written(tmp_path, *file)
    with pytest.raises(DataError, match=re.escape(why)) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_field_of_rows_is_refused_if_no_input_has_rows(tmp_path, capsys):
    name = "a.md"
    (tmp_path / name).write_text('{"body": "a"}\n')
    flags = ["--output-prefix", f"{tmp_path}/d", "--json-keys", "body"]
    assert main(["--input", f"{tmp_path / name}", *flags]) == 1
    assert "--json-keys" in capsys.readouterr().err
    assert main(["--stdlib", *flags]) == 2
    assert "--json-keys" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_files_of_a_folder_are_found_in_any_case(tmp_path):
    for name in ("a.txt", "B.TXT", "c.md"):
        (tmp_path / name).write_text(name)
    assert sorted(Corpus(input_files([tmp_path], ".txt"))) == ["B.TXT", "a.txt"]


def test_conversations_are_read_from_every_form_of_rows(tmp_path):
    for kind in (
        "JSON lines, .ndjson",
        "JSON lines, .jsonl.gz",
        "JSON array with a byte-order mark",
        "Parquet",
    ):
        path = written(tmp_path, *RIGHT[kind])
        assert [row["text"] for _, row in Rows([path])] == TEXTS
    with pytest.raises(DataError, match=r"a\.csv is a table"):
        list(Rows([tmp_path / "a.csv"]))


def test_a_line_that_is_broken_is_refused_alone_under_any_encoding(tmp_path):
    for number, encoding in enumerate(("utf-8", "utf-16")):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes('{"text": "a"}\n{"text": \n{"text": "b"}\n'.encode(encoding))
        rows = [row for _, row in Rows([path])]
        assert [rows[0], rows[2]] == [{"text": "a"}, {"text": "b"}]
        assert isinstance(rows[1], DataError)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    assert isinstance([row for _, row in Rows([mixed])][1], DataError)


def test_the_page_lists_these_kinds():
    pairs = [
        *((f"pair of documents: {kind}", "right") for kind in PAIRS),
        ("pair whose one document is many sequences", "told"),
        ("pair of documents without ends, by --check", "told"),
        ("pair whose document bounds are damaged", "refused"),
    ]
    files = [
        *((kind, "right") for kind in RIGHT),
        *((kind, "told") for kind in TOLD),
        *((kind, "refused") for kind in REFUSED),
    ]
    check_page("Text, pairs and pictures", [*files, *pairs, *PICTURES])
