"""Made conversations: an asked line is in the record once, a seed gives the same bytes, a tiny model has its words."""

import hashlib
import json
import re
from dataclasses import replace

import pytest

from data.chat.rows import conversation_of
from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.chat.templates import TEMPLATES, write_tokenizer
from tools import line_retrieval as command
from tools.convert_hf import main as convert
from tools.ruler.lines import ADJECTIVES, FILLERS, NOUNS, VALUES, Maker, Task

KEYS = {"full": r"in line (\S+)\?$", "small": r"(\S+ \S+)\?$"}
LINES = {"full": r"^line (\S+): REGISTER_CONTENT is (<\d+>)$", "small": r"^(\S+ \S+) (\S+)$"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"]))


def maker(tokenizer, **task):
    given = {"tokens": 1500, "purpose": "train", "seed": 1} | task
    return Maker(Task(**given), load_template(tokenizer.path), tokenizer)


def length(tokenizer, turns):
    """Token ids as training has them."""
    return len(load_template(tokenizer.path).tokenize(tokenizer, turns)[0])


@pytest.mark.parametrize("vocabulary", ["full", "small"])
@pytest.mark.parametrize("form", ["lines", "needle"])
def test_each_asked_line_is_there_once_and_says_the_answer(tokenizer, form, vocabulary):
    makes = maker(tokenizer, form=form, vocabulary=vocabulary, questions=4)
    for sample in range(5):
        made = makes.make(sample)
        assert made.tokens == length(tokenizer, made.turns) <= 1500
        assert [turn["role"] for turn in made.turns] == ["user", "assistant"] * 4
        record = made.turns[0]["content"]
        found = re.findall(LINES[vocabulary], record, flags=re.MULTILINE)
        found = [pair for pair in found if vocabulary == "full" or pair[1] in VALUES]
        assert len(found) == (made.lines if form == "lines" else 4)
        assert len(dict(found)) == len(found)
        asked = [re.search(KEYS[vocabulary], turn["content"])[1] for turn in made.turns[::2]]
        assert len(set(asked)) == 4
        assert [dict(found)[key] for key in asked] == [turn["content"] for turn in made.turns[1::2]]
        assert not any(turn["content"] in asked for turn in made.turns)
        longer = makes._turns(sample, made.lines + 1, None)
        assert length(tokenizer, longer) > 1500


def test_words_do_not_stand_for_each_other():
    fillers = {word for filler in FILLERS for word in filler.split()}
    groups = (ADJECTIVES, NOUNS, VALUES, fillers)
    assert len({word for group in groups for word in group}) == sum(map(len, groups)) == 169


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_asked_line_stands_at_its_depth(tokenizer, depth):
    made = maker(tokenizer, vocabulary="small").make(3, depth)
    record = made.turns[0]["content"].splitlines()
    asked = record.pop().removesuffix("?")
    assert record.index(f"{asked} {made.turns[1]['content']}") == round(depth * (made.lines - 1))
    assert len(record) == made.lines


def test_a_long_record_has_longer_names(tokenizer):
    made = maker(tokenizer, tokens=60_000, vocabulary="small").make(0)
    names = [line.rsplit(" ", 1)[0] for line in made.turns[0]["content"].splitlines()[:-1]]
    assert made.lines > 2048
    assert len(set(names)) == len(names) == made.lines
    assert {len(name.split()) for name in names} == {3}


def written(tmp_path, tokenizer, name, *flags):
    path = tmp_path / name
    argv = ["make", str(path), "--tokens", "400", "--samples", "6", "--vocabulary", "small", "--questions", "3"]
    assert command.main([*argv, "--tokenizer-model", tokenizer.path, *flags]) == 0
    return path


def test_a_seed_gives_the_same_bytes_anywhere(tmp_path, tokenizer, capsys):
    """The digest holds on any machine and for any Python: no draw is another one's."""
    first = written(tmp_path, tokenizer, "a.jsonl")
    assert "6 conversations" in capsys.readouterr().out
    assert hashlib.sha256(first.read_bytes()).hexdigest()[:16] == "94efef82faa2d7a0"
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    assert all(length(tokenizer, conversation_of(row).turns) <= 400 for row in rows)
    records = {row["messages"][0]["content"] for row in rows}
    other = [json.loads(line) for line in written(tmp_path, tokenizer, "b.jsonl", "--seed", "2").open()]
    assert len(records | {row["messages"][0]["content"] for row in other}) == 12


def test_what_is_scored_was_not_trained_on(tokenizer):
    """Seed and sample are the same in both."""
    train, score = (
        maker(tokenizer, purpose=purpose, vocabulary="small").make(0, 0.5).turns[0]["content"].splitlines()[:-1]
        for purpose in ("train", "score")
    )
    assert len(set(train) & set(score)) < 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a.jsonl", "--tokens", "30"], "tokens is 30, and a conversation of 1 line and as many questions takes"),
        (["a.json"], "does not end in .jsonl"),
        (["a.jsonl", "--tokenizer-model", "none.json"], "cannot read tokenizer none.json"),
        (["a.jsonl", "--chat-template", "none.jinja"], "cannot read the chat template none.jinja"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, tokenizer, flags, message):
    monkeypatch.chdir(tmp_path)
    assert command.main(["make", "--tokenizer-model", tokenizer.path, *flags]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_record_is_repeated_as_often_as_asked_and_its_lengths_differ(tokenizer):
    makes = maker(tokenizer, tokens=400, vocabulary="small", form="repeat", questions=3)
    mades = [makes.make(sample) for sample in range(20)]
    for made in mades:
        user, assistant = (turn["content"] for turn in made.turns)
        assert assistant == 3 * user
        words = user.split("; ")[:-1]
        assert sum(" " in word for word in words) == made.lines >= 2
        assert {*words} - {*VALUES} == {word for word in words if " " in word}
        assert made.tokens == length(tokenizer, made.turns) <= 400
    assert len({made.lines for made in mades}) > 3


def test_ends_of_records_are_asked_for_often_and_no_line_twice(tokenizer):
    places = []
    for sample in range(60):
        turns = maker(tokenizer, vocabulary="small", questions=5).make(sample).turns
        *record, first = turns[0]["content"].splitlines()
        names = [line.rsplit(" ", 1)[0] for line in record]
        asked = [first.removesuffix("?"), *(turn["content"].removesuffix("?") for turn in turns[2::2])]
        assert len(set(asked)) == 5
        places.append(names.index(asked[0]) / (len(names) - 1))
    assert 10 < places.count(0) < 30
    assert 10 < places.count(1) < 30


def test_a_line_is_three_tokens_and_a_question_ends_with_its_name(tmp_path, capsys):
    folder = tmp_path / "tiny"
    assert command.main(["model", str(folder), "--hidden-size", "32"]) == 0
    assert "1,732 tokens" in capsys.readouterr().out
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    template = load_template(tokenizer.path)
    task = Task(tokens=96, purpose="train", seed=1, vocabulary="small", questions=4)
    made = Maker(task, template, tokenizer).make(0)
    ids, learned = template.tokenize(tokenizer, made.turns)
    words = [tokenizer.detokenize([token], special=True) for token in ids]
    lines, asked = made.turns[0]["content"].rsplit("\n", 1)
    record = [part for line in lines.splitlines() for part in (*line.rsplit(" ", 1), "\n")]
    assert words[: 2 + len(record)] == ["<|user|>", *record, asked.removesuffix("?")]
    assert [word for word, learns in zip(words, learned, strict=True) if learns] == [
        part for turn in made.turns[1::2] for part in (turn["content"], "<|end|>")
    ]
    assert "<|unknown|>" not in words
    with pytest.raises(DataError, match="vocabulary is full, and the tokenizer does not know all of its words"):
        Maker(replace(task, vocabulary="full"), template, tokenizer)
    assert convert(["import", str(folder), str(tmp_path / "run")]) == 0
    assert command.main(["model", str(folder)]) == 1
    assert "exists; choose a new folder" in capsys.readouterr().err
    assert command.main(["model", str(tmp_path / "odd"), "--hidden-size", "12"]) == 1
    assert "hidden_size is 12; it must be a multiple of 8" in capsys.readouterr().err
    assert not (tmp_path / "odd").exists()
