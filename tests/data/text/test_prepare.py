"""Prepared data reads back token by token, is kept when it is whole, and never half-written."""

import math

import numpy as np
import pytest

from data.text import prepare as module
from data.text.config import DataConfig
from data.text.indexed import check_indexed, entropy, token_counts
from data.text.megatron import build_datasets, megatron_core
from data.text.prepare import Prepared, Request, prepare
from data.text.workers import tokenized
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.text.corpora import NumberTokenizer, write_documents, write_texts
from tests.runtime.test_files import another_process


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.py").write_text(f"def function_{i}(x):\n    return [x, '▁', {i}]\n" * 20)
    return folder


def request_for(folder, **changes):
    return Request(**({"inputs": (str(folder),), "suffix": ".py", "vocab_size": 320} | changes))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (100_000, np.int32)]
)
def test_tokens_are_exact(tmp_path, vocab_size, dtype):
    tokenizer = NumberTokenizer(vocab_size)
    top = vocab_size - 1
    write_texts(["1 2 3", f"{top}", "4 5"], tmp_path / "d", tokenizer)
    indexed = check_indexed(tmp_path / "d", vocab_size)
    assert indexed.dtype == dtype
    assert indexed.token_ids().tolist() == [1, 2, 3, 0, top, 0, 4, 5, 0]
    low_level = megatron_core().IndexedDataset(str(tmp_path / "d"))
    assert [low_level[i].tolist() for i in range(len(low_level))] == [
        [1, 2, 3, 0],
        [top, 0],
        [4, 5, 0],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@pytest.mark.parametrize("text", ["70000", "-1", "1000"])
def test_ids_are_checked_before_writing(text):
    with pytest.raises(DataError, match=f"gives id {text}, outside its 1000 entries"):
        tokenized(NumberTokenizer(), ["1 2", text])


def test_drafts_that_an_earlier_version_would_resume_are_removed_and_no_others(tmp_path, folder):
    (tmp_path / ".d.resume.bin").write_bytes(b"draft")
    others = [".d.resume.lock", f".d.resume.{'0' * 32}.bin"]  # of a preparation of d.resume
    for name in others:
        (tmp_path / name).touch()
    prepare(request_for(folder), tmp_path / "d", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir() if ".resume." in path.name) == sorted(
        others
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_writing_leaves_nothing(tmp_path, folder, error, monkeypatch):
    def interrupted(*_):
        assert list(tmp_path.glob(".d.*.bin"))
        raise error

    monkeypatch.setattr(module, "write_index", interrupted)
    with pytest.raises(error):
        prepare(request_for(folder), tmp_path / "d", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_unigram_entropy(tmp_path):
    ids = [1, 1, 1, 1, 2, 2, 3, 0]
    prefix = write_documents(tmp_path / "d", [ids])
    expected = -sum(p * math.log(p) for p in (4 / 8, 2 / 8, 1 / 8, 1 / 8))
    assert entropy(token_counts(prefix)) == pytest.approx(expected, rel=1e-12)
    assert entropy(token_counts(prefix, limit=4)) == 0
    uniform = write_documents(tmp_path / "u", [list(range(900))])
    assert entropy(token_counts(uniform)) == pytest.approx(math.log(900), rel=1e-12)


def test_prepare_round_trip(tmp_path, folder):
    prefix = tmp_path / "new" / "d.v1"  # a dot in the name is no suffix
    prepared, reused = prepare(request_for(folder), prefix)
    assert not reused
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        f"d.v1{e}" for e in (".bin", ".idx", ".json", ".model")
    ]
    tokenizer = load_tokenizer(f"{prefix}.model")
    ids = check_indexed(prefix, tokenizer.vocab_size).token_ids()
    documents = [
        tokenizer.detokenize(part[:-1].tolist())
        for part in np.split(ids, np.flatnonzero(ids == tokenizer.eod) + 1)[:-1]
    ]
    assert sorted(documents) == sorted(path.read_text() for path in folder.iterdir())
    assert prepared == Prepared(
        tokenizer_sha256=tokenizer.sha256,
        documents=30,
        tokens=len(ids),
        dtype="uint16",
        begin=[],
        text_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        skipped_files=0,
        unigram_entropy=pytest.approx(entropy(token_counts(prefix)), rel=1e-12),
    )


def test_preparing_again_keeps_or_refuses(tmp_path, folder):
    prefix = tmp_path / "d"
    first, _ = prepare(request_for(folder), prefix)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob("d.*")}
    assert prepare(request_for(folder), prefix) == (first, True)
    for changes in ({"vocab_size": 310}, {"max_bytes": 100}, {"suffix": ".txt"}, {"inputs": ()}):
        name = next(iter(changes))
        with pytest.raises(DataError, match=rf"was made with {name} .*--overwrite"):
            prepare(request_for(folder, **changes), prefix)
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob("d.*")
    }
    text = (folder / "7.py").read_text()
    (folder / "7.py").write_text(text.replace("7", "8"))
    with pytest.raises(
        DataError, match=r"7\.py (has changed|is gone) since .*d\.bin was made; give --overwrite"
    ):
        prepare(request_for(folder), prefix)
    second, reused = prepare(request_for(folder, vocab_size=310), prefix, overwrite=True)
    assert not reused
    assert second.tokenizer_sha256 != first.tokenizer_sha256


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "d.idx").unlink(), "other files of the same data are missing"),
        (lambda d: (d / "d.json").unlink(), "other files of the same data are missing"),
        (lambda d: (d / "d.json").write_text("{}"), "not a record"),
        (lambda d: (d / "d.bin").write_bytes(b"short"), r"d\.bin has 5 bytes"),
        (lambda d: (d / "d.model").write_bytes(b"garbage"), "not a sentencepiece model"),
        (lambda d: write_documents(d / "d", [[1, 2]]), "disagree"),
    ],
)
def test_what_is_not_whole_is_not_kept(tmp_path, folder, damage, message):
    prefix = tmp_path / "d"
    prepare(request_for(folder), prefix)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        prepare(request_for(folder), prefix)
    prepare(request_for(folder), prefix, overwrite=True)
    assert prepare(request_for(folder), prefix)[1]


def test_existing_tokenizer_is_used(tmp_path, folder):
    prepare(request_for(folder), tmp_path / "a")
    request = request_for(folder, tokenizer_model=str(tmp_path / "a.model"), vocab_size=None)
    prepare(request, tmp_path / "b")
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()
    assert not (tmp_path / "b.model").exists()
    prepare(request_for(folder, vocab_size=310), tmp_path / "a", overwrite=True)
    with pytest.raises(DataError, match=r"a\.model is not the tokenizer that wrote .*b\.bin"):
        prepare(request, tmp_path / "b")


def test_a_line_without_text_is_one_error_and_no_complaint_of_the_vocabulary(tmp_path, capfd):
    source = tmp_path / "a.jsonl"
    source.write_text('{"content": "def f(): return 1", "id": 3}\n' * 40)
    request = Request(inputs=(str(source),), vocab_size=280)
    with pytest.raises(
        DataError, match=r'a\.jsonl, line 1: has no field "text"; its fields are "content", "id"'
    ):
        prepare(request, tmp_path / "d")
    capfd.readouterr()
    source.write_text('{"text": "def f(): return 1"}\n' * 40 + "[1]\n")
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 41: holds a list"
    ):  # amid the tokenizer's training
        prepare(request, tmp_path / "e", progress=False)
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_one_preparation_of_a_prefix_at_a_time(tmp_path, folder):
    """The second is refused while the first lives.

    What the first left, killed, is removed by the next.
    """
    with another_process(tmp_path, "d") as child:
        with pytest.raises(DataError, match=rf"cannot write .*/d: .* in use by process {child}"):
            prepare(request_for(folder), tmp_path / "d", progress=False)
        assert len(list(tmp_path.glob(".d.*"))) == 2, "a lock and a draft"
        prepare(request_for(folder), tmp_path / "other", progress=False)
    prepare(request_for(folder), tmp_path / "d", progress=False)
    assert not list(tmp_path.glob(".*"))


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path, folder):
    prepare(request_for(folder), tmp_path / "d", progress=False)
    config, tokenizer = (
        DataConfig(data_path=(f"{tmp_path}/d",)),
        load_tokenizer(tmp_path / "d.model"),
    )
    build_datasets(config, 8, 1, tokenizer)
    content = bytearray((tmp_path / "d.model").read_bytes())
    content[-3] ^= 1  # what it is trained with, which nothing here reads
    (tmp_path / "d.model").write_bytes(content)
    with pytest.raises(
        DataError,
        match=r"tokenizer .*d\.model is not the one that wrote .*d\.bin, or is damaged",
    ):
        build_datasets(config, 8, 1, load_tokenizer(tmp_path / "d.model"))
