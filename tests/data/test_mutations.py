"""Files of data with bits flipped, cut, zeroed or swapped: each is read, or refused in one line; none crashes."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.text.corpus import Corpus
from data.text.digests import check_digests, write_digests
from data.text.indexed import TokenReader, check_indexed, open_indexed
from data.text.prepare import Request, prepare
from data.tokenizer import load_tokenizer
from runtime.errors import UserError
from tests.data.test_tokenizer import write_hugging_face
from tests.data.text.corpora import write_texts

TEXT = "It was the best of tokens, it was the worst of tokens: é漢🙂 ▁\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with its tokenizer and record, a tokenizer.json and a corpus of it."""
    root = tmp_path_factory.mktemp("mutations")
    (root / "a.txt").write_text(TEXT * 100)
    prepare(Request(inputs=(str(root / "a.txt"),), vocab_size=300), root / "words", progress=False)
    write_hugging_face(root, "</s>")
    write_texts([TEXT] * 5, root / "letters", load_tokenizer(root / "tokenizer.json"))
    np.save(root / "shuffle.npy", np.arange(50))
    write_digests(root)
    return root


def mutations(whole: bytes, flips: int) -> Iterator[bytes]:
    """Bits flipped at places all over a file, most of them where formats have their headers; then whatever else."""
    places = [*range(min(40, len(whole))), *(number * len(whole) // flips for number in range(flips))]
    for number, at in enumerate(places):
        yield whole[:at] + bytes([whole[at] ^ 1 << number * 3 % 8]) + whole[at + 1 :]
    yield from (whole[: len(whole) * cut // 8] for cut in range(8))
    yield from (whole[:at] + bytes(16) + whole[at + 16 :] for at in range(0, len(whole), len(whole) // 6 + 1))
    yield from (whole[:-1], whole + b"\x00", whole * 2)
    yield from (b"\x00", b"\xff" * 64, b'{"a": 1}', b"[" * 100_000, b"MMIDIDX\x00\x00")


def outcomes(path: Path, contents: Iterable[bytes], use: Callable[[], object]) -> Counter[str]:
    """How often `use` went through with the file so changed, and was refused in one line; any other error fails."""
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
    assert [str(error) for error in errors if "\n" in str(error) or not 20 < len(str(error)) < 600] == []
    return Counter(read=read, refused=len(errors))


def test_a_tokenizer_is_what_it_was_when_the_corpus_was_written(place: Path) -> None:
    """By the digest noted beside the corpus, whether or not the file can be read."""
    model = place / "words.model"

    def use() -> None:
        tokenizer = load_tokenizer(model)
        open_indexed(place / "words").check_tokenizer(tokenizer.path, tokenizer.sha256)

    use()
    found = outcomes(model, mutations(model.read_bytes(), 40), use)
    assert found["read"] == 0
    assert found["refused"] > 90


@pytest.mark.parametrize("name", ["words.model", "tokenizer.json"])
def test_a_damaged_tokenizer_without_a_record(place: Path, name: str) -> None:
    path = place / name

    def use() -> None:
        tokenizer = load_tokenizer(path)
        assert 0 <= tokenizer.eod < tokenizer.vocab_size < 1 << 20
        tokenizer.detokenize(tokenizer.tokenize(TEXT))

    assert outcomes(path, mutations(path.read_bytes(), 60), use)["refused"] > 20


def test_tokenizers_of_other_kinds(place: Path) -> None:
    kinds = {name: (place / name).read_bytes() for name in ("words.model", "tokenizer.json", "words.bin", "words.json")}
    for name in ("words.model", "tokenizer.json"):
        others = [content for other, content in kinds.items() if other != name]
        found = outcomes(place / name, iter(others), lambda name=name: load_tokenizer(place / name))
        assert found == {"read": 0, "refused": 3}


@pytest.mark.parametrize("end", [".idx", ".bin"])
def test_a_damaged_corpus(place: Path, end: str) -> None:
    prefix, path = place / "letters", place / f"letters{end}"

    def use() -> None:
        indexed = check_indexed(prefix, 257)
        reader, begin = TokenReader(str(prefix)), 0
        for length in indexed.lengths.tolist():
            reader.read(indexed.dtype.type, length, begin)
            begin += length * indexed.dtype.itemsize

    use()
    found = outcomes(path, mutations(path.read_bytes(), 60), use)
    assert found["refused"] > (100 if end == ".idx" else 20)


def test_a_damaged_cache(place: Path) -> None:
    check_digests(place)
    for name in ("shuffle.npy", "digests.json"):
        path = place / name
        found = outcomes(path, mutations(path.read_bytes(), 30), lambda: check_digests(place))
        assert found["refused"] > 60
        assert name == "digests.json" or found["read"] == 0


@pytest.mark.parametrize("change", ["nothing noted", "one not noted", "one lost"])
def test_a_cache_is_of_the_arrays_noted(tmp_path: Path, change: str) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.arange(3))
    write_digests(tmp_path)
    check_digests(tmp_path)
    if change == "nothing noted":
        (tmp_path / "digests.json").write_text("{}")
    elif change == "one not noted":
        np.save(tmp_path / "c.npy", np.arange(3))
    else:
        (tmp_path / "b.npy").unlink()
    message = {"nothing noted": "has not noted 'a.npy'", "one not noted": "has not noted 'c.npy'"}
    with pytest.raises(DataError, match=f"{message.get(change, 'lacks .b.npy')}.*remove"):
        check_digests(tmp_path)


LINES = {
    '{"content": "a", "meta": {"url": 1}}': 'no field "text"; its fields are "content", "meta": .* --json-keys',
    "{}": 'no field "text"; its fields are none',
    json.dumps({f"field{n}": n for n in range(20)}): '"field7" and 12 more: name',
    "[1]": 'holds a list, not an object with its text under "text"',
    "3": "holds a number, not an object",
    "2.5": "holds a number",
    '"text"': "holds a string",
    "null": "holds null",
    "true": "holds true or false",
    '{"text": 3}': 'field "text" is a number, not text',
    '{"text": null}': 'field "text" is null',
    '{"text": ["a"]}': 'field "text" is a list',
    '{"text": {"a": 1}}': 'field "text" is an object',
    '{"text": "\\ud800"}': 'field "text" .* is no text|lone surrogates',
    '{"text": "a"': "not JSON in UTF-8",
    "text": "not JSON",
    "[" * 100_000: "not JSON",
    "1" * 10_000: "not JSON",
}


@pytest.mark.parametrize(("line", "words"), LINES.items(), ids=range(len(LINES)))
def test_lines_without_text(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"^[^\n]*a\.jsonl, line 3: [^\n]*({words})[^\n]*$"):
        list(Corpus([path]))


def test_flipped_bits_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good é"}\n' * 3)
    found = outcomes(path, mutations(path.read_bytes(), 40), lambda: list(Corpus([path])))
    assert found["read"] > 10
    assert found["refused"] > 30
