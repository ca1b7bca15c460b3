"""Conversations become packed samples, each counted and whole, or are refused by file and line."""

import json
import re
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.chat.convert import Chat
from data.chat.rows import conversation_of
from data.chat.template import load_template
from data.text.config import DataConfig
from data.text.indexed import check_indexed
from data.text.megatron import build_datasets
from data.text.prepare import Request, prepare
from data.text.record import chat_record
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.chat.templates import MARKED, TEMPLATES, TURNS, write_tokenizer

SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]}
        for turn in TURNS
    ],
}
MESSAGES = {
    "messages": [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
}
SIZE = 57
"""Tokens of TURNS in ChatML, of which 9 are learned."""


def prepared(folder, source, template=TEMPLATES["chatml"], name="chats", **chat):
    request = Request(
        inputs=(str(source),),
        suffix=".jsonl",
        vocab_size=None,
        tokenizer_model=write_tokenizer(folder / "tokenizer", template),
        chat=Chat(**({"seq_length": 200} | chat)),
    )
    return prepare(request, folder / "out" / name, progress=False)[0]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_rows(path, rows):
    """Write rows in the format of the suffix, a dataset's folder without one; return the path."""
    if path.suffix == ".jsonl":
        path.write_text("\n" + lines(*rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        Dataset.from_list(rows).save_to_disk(str(path))
    return path


def said(*contents):
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    }


@pytest.mark.parametrize(
    ("suffix", "row"),
    [(".jsonl", MESSAGES), (".json", SHAREGPT), (".parquet", MESSAGES), ("", SHAREGPT)],
)
def test_every_format_gives_the_same_bytes(suffix, row, tmp_path):
    facts = prepared(tmp_path, write_rows(tmp_path / f"in{suffix}", [row] * 5))
    assert facts.conversations == {
        "read": 5,
        "kept": 5,
        "split": 0,
        "truncated": 0,
        "refused": 0,
        "left_out": 0,
        "learned": 45,
        "samples": 2,
        "places": 400,
    }
    assert facts.tokens == 5 * SIZE
    assert "5 conversations read: 5 kept whole" in facts.summary
    assert facts.summary.endswith(
        f"in 2 samples, {1 - 5 * SIZE / 400:.2%} padding to seq_length 200"
    )
    ids = check_indexed(tmp_path / "out" / "chats", 300).token_ids().reshape(5, SIZE)
    mask = check_indexed(tmp_path / "out" / "chats_loss_mask", 2).token_ids().reshape(5, SIZE)
    assert (ids == ids[0]).all()
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    assert (
        tokenizer.detokenize(ids[0][mask[0] == 1].tolist(), special=True)
        == "Hello!<|im_end|>4<|im_end|>"
    )
    assert len(check_indexed(tmp_path / "out" / "chats", 300).bounds) == 3


def test_samples_are_the_conversations(tmp_path):
    """Every label is within its conversation, with loss where the file says.

    Positions come from the lengths, without padding.
    """
    texts = [("a", "b" * n) for n in (1, 30, 60, 90, 20)]
    prepared(
        tmp_path, write_rows(tmp_path / "in.jsonl", [said(*text) for text in texts]), seq_length=160
    )
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    config = DataConfig(
        data_path=(str(tmp_path / "out" / "chats"),),
        split="100,0,0",
        sft=True,
        reset_attention_mask=True,
        reset_position_ids=True,
    )
    train = build_datasets(config, 170, 1, tokenizer)[0]
    samples, whole = [], len(train)
    assert sorted(int(train[n]["starts"].sum()) for n in range(whole)) == sorted(
        int(train[n]["starts"].sum()) for n in range(whole, 2 * whole)
    )
    for n in range(whole):
        sample = train[n]
        begins = [*sample["starts"].nonzero().flatten().tolist(), 170]
        for begin, end in pairwise(begins):
            ids, labels, mask = (
                sample[name][begin:end] for name in ("tokens", "labels", "loss_mask")
            )
            if bool((ids == tokenizer.eod).all()):
                assert mask.sum() == 0
                continue
            learned = labels[mask == 1].tolist()
            samples.append(
                (
                    tokenizer.detokenize(ids.tolist(), special=True),
                    tokenizer.detokenize(learned, special=True),
                )
            )
            assert labels[:-1].tolist() == ids[1:].tolist()
            assert mask[-1] == 0
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert sorted(samples) == sorted((f"{head}{b}<|im_end|>\n", f"{b}<|im_end|>") for _, b in texts)
    filler = train[None]
    assert filler["loss_mask"].sum() == 0
    assert filler["tokens"].shape == train[0]["tokens"].shape


@pytest.mark.parametrize(
    ("policy", "length", "counts", "learned"),
    [
        ("split", 20, {"split": 1, "left_out": 1}, "Hello!<|im_end|>4<|im_end|>"),
        ("split", 28, {"split": 1, "left_out": 0}, "Hello!<|im_end|>4<|im_end|>"),
        ("truncate-left", 20, {"truncated": 1}, "4<|im_end|>"),
        ("truncate-right", 31, {"truncated": 1}, "Hello!<|im_end|>"),
    ],
)
def test_what_is_too_long(policy, length, counts, learned, tmp_path):
    """The answers in TURNS are tokens 21 to 27, and 54 and 55."""
    source = write_rows(tmp_path / "in.jsonl", [SHAREGPT])
    with pytest.raises(
        DataError,
        match=r"in\.jsonl, line 2: has 57 tokens, but seq_length is 20; .*--too-long split",
    ):
        prepared(tmp_path, source, seq_length=20)
    with pytest.raises(DataError, match="no remaining token carries loss"):
        prepared(tmp_path, source, seq_length=20, too_long="truncate-right")
    facts = prepared(tmp_path, source, seq_length=length, too_long=policy)
    assert {name: facts.conversations[name] for name in counts} == counts
    ids, mask = (
        check_indexed(tmp_path / "out" / name, 300).token_ids()
        for name in ("chats", "chats_loss_mask")
    )
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    assert facts.conversations["learned"] == int(mask.sum())
    # Pieces are in a random order.
    assert sorted(tokenizer.detokenize(ids[mask == 1].tolist(), special=True)) == sorted(learned)


BAD = {
    "not JSON": ("{", "not JSON in UTF-8"),
    "no object": ("3", "has no turns"),
    "no turns": ('{"messages": []}', "has no turns"),
    "turns as JSON": ('{"messages": "[]"}', "has messages as a string; give the turns as a list"),
    "turn is text": ('{"messages": ["x"]}', "turn 1 must be an object"),
    "empty turn": (lines(said("Hi", " ")), r"turn 2 \(assistant\) is empty"),
    "role": (
        '{"messages": [{"role": "robot", "content": "x"}]}',
        "turn 1 has the role 'robot'; it must be one of",
    ),
    "no answer": (lines(said("Hi")), "no turn is the assistant's"),
    "surrogate": (
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "turn 1 has a lone surrogate",
    ),
    "nested": (
        '{"messages": [{"role": ' + "[" * 900 + "]" * 900 + "}]}",
        r"turn 1 has the role '?\[\[\[.*; it must be",
    ),
    "deep": ("[" * 500_000, "not JSON in UTF-8"),
    "special": (lines(said("<|im_end|>", "x")), "turn 1 spells the special token"),
    "too long": (lines(said("x" * 200, "y")), "has 222 tokens, but seq_length is 200"),
}


def test_what_is_refused_is_named_or_listed_and_counted(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        lines(SHAREGPT) + "".join(line.strip() + "\n" for line, _ in BAD.values()) + lines(MESSAGES)
    )
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: not JSON in UTF-8[^\n]*$"):
        prepared(tmp_path, source)
    assert not (tmp_path / "out").exists()
    facts = prepared(tmp_path, source, skip_refused=True)
    assert (facts.conversations["read"], facts.conversations["kept"]) == (len(BAD) + 2, 2)
    assert facts.conversations["refused"] == len(BAD)
    listed = (tmp_path / "out" / "chats.refused.txt").read_text().splitlines()
    for number, (line, (_, message)) in enumerate(zip(listed, BAD.values(), strict=True), start=2):
        assert re.match(rf"{re.escape(str(source))}, line {number}: {message}", line), line
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chats.bin",
        "chats.idx",
        "chats.json",
        "chats.refused.txt",
        "chats_loss_mask.bin",
        "chats_loss_mask.idx",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.json", b'[{"a": 1},\n {"b"', r"in\.json, line 2, element 2: not JSON, or cut off"),
        ("in.json", b'{"a":\n 1}', r"in\.json: not an array"),
        ("in.json", b'[{"a": 1}]\n[{"a": 2}]', r"in\.json, line 1: text follows the array"),
        ("in.jsonl", b"", r"no conversation in"),
        ("in.parquet", b"PAR1 and no more", r"in\.parquet: not Parquet, or cut off"),
        ("in.txt", b"Hi", r"in\.txt has no rows"),
    ],
)
def test_a_broken_file_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, tmp_path / name, skip_refused=True)
    assert not (tmp_path / "out").exists()


def test_nested_rows_reach_no_other_process(tmp_path):
    """Pickling gives up at a tenth of what JSON reads."""
    nested = '{"id": ' + "[" * 900 + "]" * 900 + ", " + lines(SHAREGPT)[1:]
    (tmp_path / "in.jsonl").write_text(nested + BAD["nested"][0] + "\n")
    model = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"])
    request = Request(
        inputs=(f"{tmp_path}/in.jsonl",),
        vocab_size=None,
        tokenizer_model=model,
        chat=Chat(seq_length=200, skip_refused=True),
    )
    facts, _ = prepare(request, tmp_path / "out" / "d", progress=False, workers=2)
    assert (facts.conversations["kept"], facts.conversations["refused"]) == (1, 1)


def test_where_all_are_refused_the_first_says_why(tmp_path):
    with pytest.raises(
        DataError,
        match=r"all 2 conversations were refused, the first: .*in\.jsonl, line 2: has no turns",
    ):
        prepared(tmp_path, write_rows(tmp_path / "in.jsonl", [{}, {}]), skip_refused=True)


def test_a_request_for_the_same_keeps_and_another_template_does_not(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [SHAREGPT])
    first = prepared(tmp_path, source)
    data = tmp_path / "out" / "chats.bin"
    before = data.stat().st_mtime_ns
    assert prepared(tmp_path, source) == first
    assert data.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="was made with chat "):
        prepared(tmp_path, source, seq_length=300)
    with pytest.raises(DataError, match="was made with chat "):
        prepared(tmp_path, source, template=MARKED)


def test_conversations_and_text_are_not_taken_for_each_other(tmp_path):
    prepared(tmp_path, write_rows(tmp_path / "in.jsonl", [SHAREGPT] * 3))
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    path = str(tmp_path / "out" / "chats")
    both = {"split": "100,0,0", "reset_attention_mask": True, "reset_position_ids": True}
    with pytest.raises(DataError, match=r"with a loss mask .*give --sft"):
        build_datasets(DataConfig(data_path=(path,), **both), 64, 1, tokenizer)
    with pytest.raises(
        DataError, match=r"samples of 171 tokens, but seq_length is 100; give --seq-length 171"
    ):
        build_datasets(DataConfig(data_path=(path,), sft=True, **both), 100, 1, tokenizer)
    (tmp_path / "out" / "chats_loss_mask.idx").unlink()
    with pytest.raises(
        DataError, match=r"chats_loss_mask\.idx does not exist; --sft reads.*: leave out --sft"
    ):
        build_datasets(DataConfig(data_path=(path,), sft=True, **both), 200, 1, tokenizer)


def test_text_in_place_of_conversations_has_no_loss_mask(tmp_path):
    prepared(tmp_path, write_rows(tmp_path / "in.jsonl", [SHAREGPT, {}]), skip_refused=True)
    (tmp_path / "text.txt").write_text("no conversation")
    model = str(tmp_path / "tokenizer" / "tokenizer.json")
    text = Request(inputs=(str(tmp_path / "text.txt"),), tokenizer_model=model, vocab_size=None)
    prepare(text, tmp_path / "out" / "chats", overwrite=True, progress=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "chats.bin",
        "chats.idx",
        "chats.json",
    }


def test_the_records_of_a_blend_give_all_ends_and_the_template_if_it_is_one(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [SHAREGPT])
    for name, template in (("a", "chatml"), ("b", "chatml"), ("c", "zephyr")):
        prepared(tmp_path, source, TEMPLATES[template], name)
    prefixes = {name: str(tmp_path / "out" / name) for name in ("a", "b", "c")}
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    turn, end = (tokenizer.tokenize_special(name)[0][0] for name in ("<|im_end|>", "</s>"))
    alike = chat_record([prefixes["a"], prefixes["b"]])
    assert alike == {"chat_template": TEMPLATES["chatml"], "tool_use": None, "ends": [turn]}
    several = chat_record(list(prefixes.values()))
    assert several == {"chat_template": None, "tool_use": None, "ends": [turn, end]}
    assert (
        chat_record([str(tmp_path / "none")]) is None
    )  # of an older preparation, or of another program
    (tmp_path / "out" / "a.json").write_text('{"chat": {"ends": ["x"]}}')
    with pytest.raises(DataError, match=r"a\.json is not a record"):
        chat_record([prefixes["a"]])


def test_a_template_for_tools_is_taken_where_a_row_has_some(tmp_path):
    from tests.data.chat.rich import RICH, theirs, write_folder

    path = write_folder(tmp_path, TEMPLATES["chatml"], tool_use=RICH)
    tokenizer, template = load_tokenizer(path), load_template(path)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for row in ({"messages": TURNS}, {"messages": TURNS, "tools": tools}):
        encoded = template.encode(tokenizer, conversation_of(row, template.reads))
        want = theirs(path).apply_chat_template(TURNS, tools=row.get("tools"), return_dict=True)
        assert encoded.ids.tolist() == want["input_ids"]
