"""A tokenizer is trained for a template, and transformers loads its folder and renders equally."""

import json
from pathlib import Path

import pytest

from data.chat.conversations import NAMED, train_chat_tokenizer
from data.chat.convert import Chat
from data.chat.template import load_template
from data.text.indexed import check_indexed
from data.text.prepare import prepare
from data.text.record import Request, tokenizer_of
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from runtime.files import owned
from tests.data.chat.templates import TURNS


def request_for(folder, name="chatml", **changes):
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(30))
    )
    chat = Chat(seq_length=100, chat_template=name)
    return Request(
        **({"inputs": (str(folder / "in.jsonl"),), "vocab_size": 264, "chat": chat} | changes)
    )


@pytest.mark.parametrize("name", NAMED)
def test_transformers_renders_equally(name, tmp_path):
    from transformers import AutoTokenizer

    request, prefix = request_for(tmp_path, name), tmp_path / "d.v1"
    facts, _ = prepare(request, prefix, progress=False)
    assert facts.conversations["learned"] > 0
    path = tokenizer_of(request, prefix)
    tokenizer, template = load_tokenizer(path), load_template(path)
    assert tokenizer.vocab_size == 264
    theirs = AutoTokenizer.from_pretrained(str(Path(path).parent))
    turns = [*TURNS[:1], {"role": "assistant", "content": "Straße, ▁ 日本\n\n  x\ufdd0"}]
    for conversation in (TURNS, turns):
        ids, learned = template.tokenize(tokenizer, conversation)
        assert (
            ids.tolist()
            == theirs.apply_chat_template(conversation, tokenize=True, return_dict=True)[
                "input_ids"
            ]
        )
        assert learned.sum() > 0
    assert theirs.eos_token_id == tokenizer.eod
    assert check_indexed(prefix, 264).token_ids().max() < 264
    assert sorted(path.name for path in tmp_path.glob("d.v1*")) == [
        "d.v1.bin",
        "d.v1.idx",
        "d.v1.json",
        "d.v1_loss_mask.bin",
        "d.v1_loss_mask.idx",
        "d.v1_tokenizer",
    ]


def test_what_is_trained_is_kept_and_written_anew(tmp_path):
    request, prefix = request_for(tmp_path), tmp_path / "d"
    first = prepare(request, prefix, progress=False)
    assert prepare(request, prefix, progress=False) == (first[0], True)
    path = Path(tokenizer_of(request, prefix))
    with pytest.raises(DataError, match="was made with vocab_size 264, not 261"):
        prepare(request_for(tmp_path, vocab_size=261), prefix, progress=False)
    assert load_tokenizer(path).vocab_size == 264
    prepare(request_for(tmp_path, vocab_size=261), prefix, overwrite=True, progress=False)
    assert load_tokenizer(path).vocab_size == 261
    again = request_for(tmp_path, tokenizer_model=str(path), vocab_size=None)
    prepare(again, prefix, overwrite=True, progress=False)  # reads the tokenizer that lies there
    assert load_tokenizer(path).vocab_size == 261


@pytest.mark.parametrize(("name", "other"), [("c", "c.v1"), ("c.v1", "c")])
def test_another_prefix_is_prepared_at_the_same_time(name, other, tmp_path, monkeypatch):
    """It is not refused, nor does it remove the draft of this one's tokenizer.

    The draft that a killed one left is removed.
    """

    def beside(*arguments):
        trained = train_chat_tokenizer(*arguments)
        with owned(tmp_path, other):
            return trained

    monkeypatch.setattr("data.text.prepare.train_chat_tokenizer", beside)
    request, prefix = request_for(tmp_path), tmp_path / name
    last = Path(tokenizer_of(request, prefix)).parent
    last.with_name(f".{last.stem}.{'0' * 32}{last.suffix}").mkdir()
    prepare(request, prefix, progress=False)
    assert load_tokenizer(tokenizer_of(request, prefix)).vocab_size == 264
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 257},
            "vocab_size is 257, but 256 bytes and the special tokens of chatml take 258 entries",
        ),
        (
            {"vocab_size": 5000},
            r"vocab_size is 5000, but the conversations yield only \d+ entries; "
            r"give --vocab-size \d+ or less",
        ),
        (
            {"name": "alpaca"},
            (
                "chat_template is alpaca, but a tokenizer can be trained only for chatml, llama3; "
                "give one"
            ),
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        prepare(request_for(tmp_path, **changes), tmp_path / "out" / "d", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
