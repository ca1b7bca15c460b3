"""Files of data with bits flipped, cut, zeroed or swapped: each is read, or refused in one line.

None crashes.
"""

import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest

from data.chat.template import load_template
from data.fingerprint import check_digests, write_digests
from data.latents.folder import LatentFolder
from data.text.corpus import Corpus
from data.text.indexed import check_indexed, open_indexed
from data.text.prepare import Request, prepare
from data.text.reader import TokenReader
from data.tokenizer import load_tokenizer
from runtime.errors import DataError, UserError
from tests.data.test_tokenizer import write_hugging_face
from tests.data.text.corpora import write_texts

TEXT = "It was the best of tokens, it was the worst of tokens: é漢🙂 ▁\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus with its tokenizer and record, a tokenizer.json and a corpus of it."""
    root = tmp_path_factory.mktemp("mutations")
    (root / "a.txt").write_text(TEXT * 100)
    prepare(Request(inputs=(str(root / "a.txt"),), vocab_size=300), root / "words", progress=False)
    write_hugging_face(root, "</s>")
    write_texts([TEXT] * 5, root / "letters", load_tokenizer(root / "tokenizer.json"))
    np.save(root / "shuffle.npy", np.arange(50))
    write_digests(root)
    return root


def mutations(whole, flips):
    """Bits flipped at places all over a file, most of them where formats have their headers.

    Then come other changes.
    """
    offsets = [
        *range(min(40, len(whole))),
        *(number * len(whole) // flips for number in range(flips)),
    ]
    for number, offset in enumerate(offsets):
        yield whole[:offset] + bytes([whole[offset] ^ 1 << number * 3 % 8]) + whole[offset + 1 :]
    yield from (whole[: len(whole) * cut // 8] for cut in range(8))
    yield from (
        whole[:offset] + bytes(16) + whole[offset + 16 :]
        for offset in range(0, len(whole), len(whole) // 6 + 1)
    )
    yield from (whole[:-1], whole + b"\x00", whole * 2)
    yield from (b"\x00", b"\xff" * 64, b'{"a": 1}', b"[" * 100_000, b"MMIDIDX\x00\x00")


def outcomes(path, contents, use):
    """Count the changed files that `use` takes and those that it refuses in one line.

    Any other error fails.
    """
    whole, read, errors = path.read_bytes(), 0, list[ValueError]()
    try:
        for content in contents:
            path.write_bytes(content)
            try:
                use()
                read += 1
            except ValueError as error:
                errors.append(error)
    finally:
        path.write_bytes(whole)
    assert {type(error) for error in errors} <= {UserError, DataError}
    assert [
        str(error) for error in errors if "\n" in str(error) or not 20 < len(str(error)) < 600
    ] == []
    return Counter(read=read, refused=len(errors))


def test_a_tokenizer_is_what_it_was_when_the_corpus_was_written(place):
    """By the digest noted beside the corpus, whether or not the file can be read."""
    model = place / "words.model"

    def use():
        tokenizer = load_tokenizer(model)
        open_indexed(place / "words").check_tokenizer(
            tokenizer.path, tokenizer.sha256, tokenizer.settings
        )

    use()
    outcome = outcomes(model, mutations(model.read_bytes(), 10), use)
    assert outcome["read"] == 0
    assert outcome["refused"] > 60


@pytest.mark.parametrize("name", ["words.model", "tokenizer.json"])
def test_a_damaged_tokenizer_without_a_record(place, name):
    path = place / name

    def use():
        tokenizer = load_tokenizer(path)
        assert 0 <= tokenizer.eod < tokenizer.vocab_size < 1 << 20
        tokenizer.detokenize(tokenizer.tokenize(TEXT))

    assert outcomes(path, mutations(path.read_bytes(), 20), use)["refused"] > 20


@pytest.mark.parametrize("end", [".idx", ".bin"])
def test_a_damaged_corpus(place, end):
    prefix, path = place / "letters", place / f"letters{end}"

    def use():
        indexed = check_indexed(prefix, 257)
        reader, begin = TokenReader(str(prefix)), 0
        for length in indexed.lengths.tolist():
            reader.read(indexed.dtype.type, length, begin)
            begin += length * indexed.dtype.itemsize

    use()
    outcome = outcomes(path, mutations(path.read_bytes(), 60), use)
    assert outcome["refused"] > (100 if end == ".idx" else 20)


def test_a_damaged_record(place):
    """The record of a preparation: of this request, or refused.

    Numbers of other types or beyond bounds too.
    """
    path, request = place / "words.json", Request(inputs=(str(place / "a.txt"),), vocab_size=300)
    whole, prefix = json.loads(path.read_text()), place / "words"

    def use():
        assert prepare(request, prefix, progress=False)[1]
        assert "tokens" in prepare(request, prefix, progress=False)[0].summary

    use()
    assert outcomes(path, mutations(path.read_bytes(), 20), use)["refused"] > 30
    wrong = [
        whole | {key: value}
        for key in ("made_with", "prepared", "inputs")
        for value in (None, 3, "x", [[1]], [1])
    ]
    wrong += [
        whole | {"prepared": whole["prepared"] | {name: value}}
        for name in (
            "documents",
            "tokens",
            "text_bytes",
            "skipped_files",
            "unigram_entropy",
            "unknown_tokens",
        )
        for value in (-1, 1 << 70, float("inf"), float("nan"), "1", None, [1], True)
    ]
    wrong += [
        whole | {"prepared": whole["prepared"] | {"conversations": value}}
        for value in ({}, [], 3, {"read": 1})
    ]
    outcome = outcomes(path, (json.dumps(record).encode() for record in wrong), use)
    assert outcome == {"read": 0, "refused": len(wrong)}


INDEX = {"version": 1, "shape": [1, 2, 2], "dtype": "float32"}
SHARD = {"latents": "a.npy", "labels": "b.npy", "samples": 3}


@pytest.mark.parametrize(
    "index",
    [
        3,
        [],
        INDEX,
        INDEX | {"shards": [3]},
        INDEX | {"shards": {}},
        INDEX | {"shards": [SHARD], "version": "1"},
        *(
            INDEX | {"shards": [SHARD | {"samples": value}]}
            for value in (-1, 0, 1 << 70, 3.0, "3", None, True, [3])
        ),
        *(
            INDEX | {"shards": [SHARD], "shape": value}
            for value in (3, [1], [1, 2, -2], [1, 2, 1 << 70], [1, 2, "2"])
        ),
        *(
            INDEX | {"shards": [SHARD | {"labels": value}]}
            for value in ("../b.npy", 3, None, "none.npy", "pipe.npy")
        ),
    ],
)
def test_an_index_of_latents_of_other_content(index, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 1, 2, 2), np.float32))
    np.save(tmp_path / "b.npy", np.zeros(3, np.int64))
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "index.json").write_text(json.dumps(INDEX | {"shards": [SHARD]}))
    assert len(LatentFolder(tmp_path)) == 3
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"^[^\n]{20,600}$"):
        LatentFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["index.json", "tokenizer_config.json", "words.json", "chat_template.jinja"]
)
def test_a_named_pipe_is_not_waited_for(name, place, tmp_path):
    for path in (*place.glob("words.*"), place / "tokenizer.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    request = Request(inputs=(str(place / "a.txt"),), vocab_size=300)
    if name == "words.json":
        open_indexed(tmp_path / "words").check_tokenizer("none", "0", None)  # as without a record
    use = {
        "index.json": lambda: LatentFolder(tmp_path),
        "words.json": lambda: prepare(request, tmp_path / "words", progress=False),
    }.get(name, lambda: load_template(str(tmp_path / "tokenizer.json")))
    with pytest.raises(
        DataError, match=r"has no index.json|has no chat template|words.json is not a file"
    ):
        use()


def test_a_damaged_cache(place):
    check_digests(place)
    for name in ("shuffle.npy", "digests.json"):
        path = place / name
        outcome = outcomes(path, mutations(path.read_bytes(), 30), lambda: check_digests(place))
        assert outcome["refused"] > 60
        assert name == "digests.json" or outcome["read"] == 0
    np.save(place / "more.npy", np.arange(3))
    with pytest.raises(DataError, match=r"does not list 'more.npy'.*remove"):
        check_digests(place)
    (place / "more.npy").unlink()
    (place / "shuffle.npy").unlink()
    with pytest.raises(DataError, match=r"lacks 'shuffle.npy'.*remove"):
        check_digests(place)


LINES = {
    json.dumps({f"field{n}": n for n in range(20)}): '"field7" and 12 more: name',
    '{"content": "a", "meta": {"url": 1}}': 'its fields are "content", "meta": .* --json-keys',
    "true": "holds true or false, not an object",
    '{"text": 3}': 'field "text" is a number, not text',
    '{"text": "\\ud800"}': 'field "text" .* is no text|lone surrogates',
    '{"text": "a"': "not JSON in UTF-8",
    '{"text": "caf\udce9"}': "not JSON in UTF-8",
    "[" * 100_000: "not JSON",
    "1" * 10_000: "not JSON",
}


@pytest.mark.parametrize(("line", "words"), LINES.items(), ids=range(len(LINES)))
def test_lines_without_text(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(
        f'{{"text": "good"}}\n\n{line}\n', errors="surrogateescape"
    )  # as the byte E9 alone
    with pytest.raises(ValueError, match=rf"^[^\n]*a\.jsonl, line 3: [^\n]*({words})[^\n]*$"):
        list(Corpus([path]))
