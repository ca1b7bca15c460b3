"""RULER's examples fill their length, and are the same in any process."""

import hashlib
import json
import random
import re

import pytest

from runtime.errors import DataError
from tools.ruler.examples import ExampleMaker, left_out, makers
from tools.ruler.prompts import Prompts, fill
from tools.ruler.tasks import TASKS, Sources
from tools.ruler.texts import Questions

GIVEN = [task for task in TASKS if not task.startswith("qa")]


def base(tokenizer):
    return Prompts(tokenizer, None, (tokenizer.eod,))


@pytest.mark.parametrize("task", GIVEN)
@pytest.mark.parametrize("by_template", [False, True])
def test_an_example_fills_its_length(tokenizer, chat, task, by_template):
    """One more piece of the haystack does not fit beside the answer."""
    prompts = chat if by_template else base(tokenizer)
    maker = ExampleMaker(task, 9000, 1, prompts, Sources())
    for number in range(3):
        example = maker.make(number)
        assert example.ids == prompts.ids(example.question)
        assert len(example.ids) + example.new_tokens <= 9000
        more = TASKS[task].make(maker._case_of(number), example.size + 1)
        assert len(prompts.ids(more)) + example.new_tokens > 9000
        text = tokenizer.detokenize(example.ids)
        assert text.endswith(example.question.text + example.question.prefix) or by_template
        parts = example.question.text, "assistant\n" + example.question.prefix
        assert not by_template or (all(part in text for part in parts) and text.endswith(parts[1]))


@pytest.mark.parametrize("task", ["niah_multikey_3", "cwe"])
def test_seed_number_length_and_purpose_each_draw_another(tokenizer, task):
    prompts = base(tokenizer)
    examples = [
        ExampleMaker(task, length, seed, prompts, Sources(), purpose).make(number).question.answers
        for length in (7000, 9000)
        for seed in (1, 2)
        for purpose in ("train", "score")
        for number in (0, 1)
    ]
    assert len(set(examples)) == 16


PINNED = "0f5a1a753eba4d2840c04bdaa1af403e0546d82c83986a03f105507ac77abd51"


def test_examples_are_these_bytes_in_any_process(tokenizer):
    """In one that hashes as it likes, in any order, and on any machine."""
    together, makers = hashlib.sha256(), {}
    for task in reversed(GIVEN):  # others are made before
        makers[task] = ExampleMaker(task, 9000, 3, Prompts(tokenizer), Sources())
        makers[task].make(0)
    for task in GIVEN:
        example = makers[task].make(2)
        together.update(repr((example.ids, example.question)).encode())
    assert together.hexdigest() == PINNED


def test_fill_finds_the_last_that_fits():
    draw = random.Random(1)
    for _ in range(300):
        min_index, grows = draw.randrange(3), [draw.randrange(1, 40) for _ in range(200)]
        tokens = [sum(grows[:size]) for size in range(200)]
        room = draw.randrange(tokens[min_index], tokens[-1])
        last_index = fill(
            room,
            lambda size, tokens=tokens: tokens[min(size, 199)] + 40 * max(size - 199, 0),
            min_index,
            draw.randrange(min_index, 199),
            draw.choice([0.01, 1, 20, 1e6]),
        )
        assert tokens[last_index] <= room < tokens[last_index + 1]


def test_a_length_without_room_is_refused(tokenizer):
    with pytest.raises(
        DataError, match=r"niah_single_1 takes at least \d+ tokens and 128 for the answer, but"
    ):
        ExampleMaker("niah_single_1", 300, 1, base(tokenizer), Sources())


def test_answers_follow_the_prompt(tokenizer):
    prompts = base(tokenizer)
    question = ExampleMaker("niah_multivalue", 2000, 1, prompts, Sources()).make(0).question
    ids, prompt = prompts.with_answer(question)
    assert ids[:prompt] == prompts.ids(question)
    assert tokenizer.detokenize(ids[prompt:]) == " " + " ".join(question.answers)
    assert prompts.text([*tokenizer.tokenize(" a\tb\x01c "), tokenizer.vocab_size]) == "a\nb\nc"


def questions_of(folder, lengths):
    """Write questions whose own paragraphs have so many words."""
    rows = [
        {
            "question": f"Who is {n}?",
            "answers": [f"name{n}"],
            "paragraphs": [f"name{n} " + "word " * words],
        }
        for n, words in enumerate(lengths)
    ]
    file = folder / "asked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sources(questions={"qa_1": Questions(file)})


def test_questions_that_do_not_fit_are_left_out_and_told_and_the_others_keep_their_order(
    tokenizer, tmp_path
):
    sources = questions_of(tmp_path, [9000, 5, 5, 9000, 5])
    (maker,) = makers(["qa_1"], [2000], 1, base(tokenizer), sources, samples=7)
    examples = [maker.make(number) for number in range(7)]
    assert [example.question.answers[0] for example in examples] == [
        f"name{n}" for n in (1, 2, 4, 1, 2, 4, 1)
    ]
    assert all(len(example.ids) + example.new_tokens <= 2000 for example in examples)
    assert [example.number for example in examples] == [*range(7)]
    (note,) = left_out([maker])
    assert "qa_1 at 2000 tokens leaves out 2 questions that do not fit" in note
    assert "Who is 0?" in note
    with pytest.raises(
        DataError,
        match=r"qa_1 takes at least \d+ tokens and 32 for the answer.* leave out the task",
    ):
        makers(
            ["qa_1"], [2000], 1, base(tokenizer), questions_of(tmp_path, [9000, 8000]), samples=2
        )
    again = ExampleMaker("qa_1", 2000, 1, base(tokenizer), sources)
    assert [again.make(number).ids for number in (6, 0)] == [examples[6].ids, examples[0].ids]


def test_an_example_whose_draw_is_too_long_gives_its_number_to_the_next(tokenizer):
    """At the least length of the first one, some later ones do not fit."""
    prompts = base(tokenizer)
    with pytest.raises(DataError) as error:
        ExampleMaker("niah_multikey_1", 50, 1, prompts, Sources())
    length = int(re.search(r"give a length of (\d+)", str(error.value))[1])
    while True:
        try:
            maker = ExampleMaker("niah_multikey_1", length, 1, prompts, Sources())
            break
        except DataError:
            length += 1
    examples = [maker.make(number) for number in range(20)]
    assert all(len(example.ids) + example.new_tokens <= length for example in examples)
    assert left_out([maker])
