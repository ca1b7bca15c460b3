"""Made conversations: an asked line is in the record once and says the answer."""

import re

import pytest

from tools.ruler.lines import ADJECTIVES, FILLERS, NOUNS, VALUES, LineMaker, LineTask

KEYS = {"full": r"in line (\S+)\?$", "small": r"(\S+ \S+)\?$"}
LINES = {"full": r"^line (\S+): REGISTER_CONTENT is (<\d+>)$", "small": r"^(\S+ \S+) (\S+)$"}


def maker(chat, depth=0, depths=0, **task):
    return LineMaker(
        LineTask(**{"tokens": 1500, "purpose": "train", "seed": 1} | task), chat, depth, depths
    )


def length(chat, turns):
    """Token ids as training has them."""
    return len(chat.template.tokenize(chat.tokenizer, turns)[0])


@pytest.mark.parametrize("vocabulary", ["full", "small"])
@pytest.mark.parametrize("form", ["lines", "needle"])
def test_each_asked_line_is_there_once_and_says_the_answer(chat, form, vocabulary):
    makes = maker(chat, form=form, vocabulary=vocabulary, questions=4)
    for sample in range(3):
        example = makes.make(sample)
        assert length(chat, example.turns) <= 1500
        assert [turn["role"] for turn in example.turns] == ["user", "assistant"] * 4
        record = example.turns[0]["content"]
        pairs = re.findall(LINES[vocabulary], record, flags=re.MULTILINE)
        pairs = [pair for pair in pairs if vocabulary == "full" or pair[1] in VALUES]
        assert len(pairs) == (example.size if form == "lines" else 4)
        assert len(dict(pairs)) == len(pairs)
        keys_asked = [
            re.search(KEYS[vocabulary], turn["content"])[1] for turn in example.turns[::2]
        ]
        assert len(set(keys_asked)) == 4
        assert [dict(pairs)[key] for key in keys_asked] == [
            turn["content"] for turn in example.turns[1::2]
        ]
        assert not any(turn["content"] in keys_asked for turn in example.turns)
        assert length(chat, makes._turns(sample, example.size + 1, None)) > 1500


def test_words_do_not_stand_for_each_other():
    fillers = {word for filler in FILLERS for word in filler.split()}
    groups = (ADJECTIVES, NOUNS, VALUES, fillers)
    assert len({word for group in groups for word in group}) == sum(map(len, groups)) == 169


@pytest.mark.parametrize("depth", [0, 3, 10])
def test_the_asked_line_stands_at_its_depth(chat, depth):
    example = maker(chat, depth, 11, vocabulary="small").make(3)
    record = example.question.text.splitlines()
    key = record.pop().removesuffix("?")
    assert record.index(f"{key} {example.question.answers[0]}") == round(
        depth / 10 * (example.size - 1)
    )
    assert len(record) == example.size
    assert example.task == f"line_retrieval {10 * depth}%"
    assert [
        example.score(example.question.answers[0]),
        example.score("other"),
        example.score(""),
    ] == [1, 0, 0]


def test_a_long_record_has_longer_names(chat):
    example = maker(chat, tokens=60_000, vocabulary="small").make(0)
    names = [line.rsplit(" ", 1)[0] for line in example.question.text.splitlines()[:-1]]
    assert example.size > 2048
    assert len(set(names)) == len(names) == example.size
    assert {len(name.split()) for name in names} == {3}


def test_what_is_scored_was_not_trained_on(chat):
    """Seed and sample are the same in both."""
    train, score = (
        maker(chat, 0, 1, purpose=purpose, vocabulary="small")
        .make(0)
        .question.text.splitlines()[:-1]
        for purpose in ("train", "score")
    )
    assert len(set(train) & set(score)) < 3


def test_a_record_is_repeated_as_often_as_asked_and_its_lengths_differ(chat):
    makes = maker(chat, tokens=400, vocabulary="small", form="repeat", questions=3)
    mades = [makes.make(sample) for sample in range(20)]
    for example in mades:
        user, assistant = (turn["content"] for turn in example.turns)
        assert assistant == 3 * user
        words = user.split("; ")[:-1]
        assert sum(" " in word for word in words) == example.size >= 2
        assert {*words} - {*VALUES} == {word for word in words if " " in word}
        assert length(chat, example.turns) <= 400
    assert len({example.size for example in mades}) > 3


def test_ends_of_records_are_asked_for_often_and_no_line_twice(chat):
    depths, makes = [], maker(chat, vocabulary="small", questions=5)
    for sample in range(60):
        turns = makes.make(sample).turns
        *record, first = turns[0]["content"].splitlines()
        names = [line.rsplit(" ", 1)[0] for line in record]
        keys_asked = [
            first.removesuffix("?"),
            *(turn["content"].removesuffix("?") for turn in turns[2::2]),
        ]
        assert len(set(keys_asked)) == 5
        depths.append(names.index(keys_asked[0]) / (len(names) - 1))
    assert 10 < depths.count(0) < 30
    assert 10 < depths.count(1) < 30
