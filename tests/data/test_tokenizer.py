"""Tokenizers give back what they were given, exactly, and refuse broken files."""

import json
import random

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from data.text.corpus import Corpus, stdlib_files
from data.tokenizer import SentencePieceTokenizer, load_tokenizer, train_tokenizer
from runtime.errors import DataError

AWKWARD = [
    "",
    "\n",
    "  leading and trailing  ",
    "\tif x:\r\n\t\treturn 1\r",
    "a\0b",
    "é漢字🙂 a\u0301 ﬁ \u2028\x85\ufeff",
    "▁ literal ▁▁space mark▁",
    "<|endoftext|> </s> <unk> <0x41>",
    "x" * 20_000,
]


@pytest.fixture(scope="module")
def sources():
    return list(Corpus(stdlib_files(), max_bytes=100_000))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sources):
    return SentencePieceTokenizer(
        train_tokenizer(sources, tmp_path_factory.mktemp("tokenizer") / "t", 800)
    )


def write_hugging_face(folder, *special, merges=()):
    """A byte-level tokenizer.json.

    A token is a byte, but for the special ones and the ``merges`` of two.
    """
    words = [*sorted(ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = Backend(BPE({word: number for number, word in enumerate(words)}, list(merges)))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


def test_python_sources_come_back_exactly(trained, sources):
    batch = [trained.tokenize(text) for text in sources]
    assert [trained.detokenize(ids) for ids in batch] == sources
    assert sum(map(len, batch)) < 0.5 * sum(len(text) for text in sources)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back_exactly(trained, tmp_path, text):
    hugging_face = load_tokenizer(write_hugging_face(tmp_path, "</s>"))
    assert (hugging_face.vocab_size, hugging_face.eod, hugging_face.pad) == (257, 256, -1)
    for tokenizer, min_id in (
        (trained, 1),
        (hugging_face, 0),
    ):  # 0 is the first one's unknown token: it has all bytes
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        assert all(min_id <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids


def test_random_text_comes_back_exactly(trained):
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(
            chr(draw.choice([draw.randrange(128), draw.randrange(0xD800), 0x2581]))
            for _ in range(50)
        )
        assert trained.detokenize(trained.tokenize(text)) == text


def test_training_is_deterministic_and_gives_what_megatron_needs(trained, tmp_path, sources):
    first, second = (train_tokenizer(sources, tmp_path / name, 500) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "b.model"]
    assert trained.vocab_size == 800
    assert 0 <= trained.eod < 800
    assert trained.pad == -1  # no real id: GPTDataset masks labels equal to it
    assert load_tokenizer(first).unique_identifiers != trained.unique_identifiers
    json.dumps(trained.unique_identifiers)


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        *(
            (["some text\n" * 10], size, f"vocab_size {size} .* give --vocab-size 265 or more$")
            for size in (1, 100)
        ),
        *(
            (["some text\n" * 10], size, f"vocab_size {size} .* --vocab-size 278 or less$")
            for size in (300, 1 << 40)
        ),
        (["", "\n"], 500, "no text"),
    ],
)
def test_what_no_tokenizer_is_trained_of(tmp_path, texts, vocab_size, message):
    with pytest.raises(DataError, match=message):
        train_tokenizer(texts, tmp_path / "t", vocab_size)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.model", None, "cannot read tokenizer .*none.model"),
        ("t.model", b"garbage" * 100, "t.model is not a sentencepiece model or is damaged; copy"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a Hugging Face"),
        ("t.bin", b"", "t.bin must be a sentencepiece"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, 0, 0),
        ({"add_bos_token": True}, 1, 0),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 1),
    ],
)
def test_a_sentencepiece_model_adds_what_the_file_beside_it_says(settings, before, after, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text of a few words, and some more"] * 50),
        model_prefix=str(tmp_path / "t"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path / "t.model")
    assert (tokenizer.before, tokenizer.after) == ((1,) * before, (2,) * after)
    assert tokenizer.document("some text") == [*[1] * before, *tokenizer.tokenize("some text"), 2]
    assert tokenizer.begin("always") == (1,)
