"""RULER's questions solved by hand.

Each says its answers, as often and as rarely as the benchmark has them.
"""

import json
import re
from collections import Counter

import pytest

from runtime.errors import DataError
from tools.ruler.tasks import TASKS, RulerCase, Sources
from tools.ruler.texts import NOISE, Essays, Questions


def squad_of(article, paragraph):
    name = f"{article}.{paragraph}"
    question = {
        "question": f"Question {name}?",
        "answers": [{"text": name}],
        "is_impossible": paragraph == 2,
    }
    return {"context": f"Article {article}, paragraph {paragraph}.", "qas": [question]}


SQUAD = {"data": [{"paragraphs": [squad_of(article, n) for n in range(4)]} for article in range(5)]}
HOTPOTQA = [
    {
        "question": f"Q{n}?",
        "answer": f"A{n}",
        "context": [[f"T{n}", ["One. ", "Two."]], [f"U{n}", ["Three."]]],
    }
    for n in range(6)
]
LINES = [
    {"question": f"Q{n}?", "answers": [f"A{n}", "a"], "paragraphs": [f"P{n}"]} for n in range(6)
]


def asked(task, size, number=0, length=8192, sources=None):
    return TASKS[task].make(RulerCase(f"test:{number}", number, length, sources or Sources()), size)


NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: ([0-9a-f-]+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.mark.parametrize(
    ("task", "needles", "asks", "key", "value"),
    [
        ("niah_single_1", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_single_2", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_single_3", 1, 1, r"[a-z]+-[a-z]+", UUID),
        ("niah_multikey_1", 4, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_2", 51, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_3", 51, 1, UUID, UUID),
        ("niah_multivalue", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multiquery", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
    ],
)
def test_each_needle_is_there_once_and_says_the_answers(task, needles, asks, key, value):
    for number in range(4):
        question = asked(task, 50, number)
        needles_found = NEEDLE.findall(question.text)
        assert len(needles_found) == len({drawn for _, _, drawn in needles_found}) == needles
        assert all(re.fullmatch(key, k) and re.fullmatch(value, v) for _, k, v in needles_found)
        query = re.search(r"for (.+) mentioned", question.text)[1]
        keys_queried = re.split(r", and |, ", query)
        assert list(question.answers) == [
            v
            for k in keys_queried
            for _, other, v in sorted(
                needles_found,
                key=lambda row: (
                    question.answers.index(row[2]) if row[2] in question.answers else -1
                ),
            )
            if other == k
        ]
        assert len(question.answers) == asks
        assert all(question.text.count(answer) == 1 for answer in question.answers)
        assert query in question.prefix


def test_prompts_are_the_benchmarks_word_for_word():
    question = asked("niah_single_1", 1)
    (_, key, value) = NEEDLE.search(question.text).groups()
    needle = f"One of the special magic numbers for {key} is: {value}."
    lines = re.search(r"afterwards\.\n(.*)\nWhat", question.text, flags=re.DOTALL)[1].split("\n")
    assert sorted(lines) == sorted([needle, NOISE])
    assert question.text == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about "
        "the number afterwards.\n"
        + "\n".join(lines)
        + f"\nWhat is the special magic number for {key} mentioned in "
        "the provided text?"
    )
    assert (
        question.prefix == f" The special magic number for {key} mentioned in the provided text is"
    )
    several = asked("niah_multivalue", 1)
    assert several.text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    assert re.search(
        r"\nWhat are all the special magic numbers for \S+ mentioned in the provided text\?$",
        several.text,
    )
    assert re.fullmatch(
        r" The special magic numbers for \S+ mentioned in the provided text are", several.prefix
    )


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1", "niah_single_1"])
def test_needles_stay_as_the_haystack_grows_and_lie_anywhere(task):
    small, large = asked(task, 20), asked(task, 400)
    assert small.answers == large.answers
    assert NEEDLE.findall(small.text) == NEEDLE.findall(large.text)
    offsets = [asked(task, 100, n).text.index(asked(task, 100, n).answers[0]) for n in range(60)]
    longest = len(asked(task, 100).text)
    assert min(offsets) < 0.15 * longest
    assert max(offsets) > 0.85 * longest


def test_variables_are_tracked_through_the_text():
    for number in range(8):
        question = asked("vt", 30, number)
        shown, text = question.text.split("\n\nMemorize")
        value = re.search(r"assigned the value (\d+) in the text above\.$", text)[1]
        assignments = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text))
        reached = {name for name in assignments if follow(assignments, name) == value}
        assert set(question.answers) == reached
        assert len(reached) == 5
        assert f"5 variables are assigned the value {value}, they are: " in question.prefix
        begin, answer_text = shown.split("they are: ")
        links = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", begin))
        assert sorted(answer_text.split()) == sorted(links)
        assert {follow(links, name) for name in links} == {
            re.search(r"the value (\d+) in", begin)[1]
        }


def follow(assignments, name):
    while name in assignments:
        name = assignments[name]
    return name


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (8192, 30, 3)])
@pytest.mark.parametrize("size", [10, 1000])
def test_common_words_are_the_most_common(length, often, seldom, size):
    question = asked("cwe", size, length=length)
    *_, listed = question.text.split("Memorize the ones that appear most often.\n")
    words = re.findall(r"\d+\. (\S+)", listed.split("\nQuestion")[0])
    times = Counter(words)
    assert {word for word, _ in times.most_common(10)} == set(question.answers)
    assert sorted(times.values()) == [seldom] * size + [often] * 10
    shown = question.text.split(
        " Answer: The top 10 words that appear most often in the list are: "
    )[0]
    assert len(Counter(re.findall(r"\d+\. (\S+)", shown))) == (20 if length < 4096 else 40)


def test_frequent_words_follow_the_zeta_distribution():
    question = asked("fwe", 1000)
    coded = re.search(r"coded words\. (.*)\nQuestion", question.text)[1].split()
    (dots, dots_count), *ranked = Counter(coded).most_common()
    assert (dots, dots_count) == ("...", 607)  # 1000 / zeta(2)
    assert [times for _, times in ranked[:3]] == [151, 67, 37]
    assert tuple(word for word, _ in ranked[:3]) == question.answers


@pytest.mark.parametrize(
    ("name", "text", "count", "paragraphs"),
    [
        ("squad.json", json.dumps(SQUAD), 15, 20),
        ("hotpotqa.json", json.dumps(HOTPOTQA), 6, 12),
        ("lines.jsonl", "\n".join(map(json.dumps, LINES)), 6, 6),
    ],
)
def test_questions_have_their_paragraphs_among_others(tmp_path, name, text, count, paragraphs):
    (tmp_path / name).write_text(text)
    questions = Questions(tmp_path / name)
    assert (len(questions.questions), len(questions.paragraphs)) == (count, paragraphs)
    for size in (0, 2, 4, 50):
        for number in range(3):
            question = asked("qa_1", size, number, sources=Sources(questions={"qa_1": questions}))
            entry = questions.questions[number]
            numbers = re.findall(r"^Document (\d+):\n", question.text, flags=re.MULTILINE)
            assert [int(n) for n in numbers] == list(range(1, len(entry.paragraphs) + size + 1))
            assert all(
                question.text.count(f":\n{paragraph}\n") == 1 for paragraph in entry.paragraphs
            )
            assert question.text.endswith(f"\n\nQuestion: {entry.question}")
            assert question.answers == entry.answers
            if entry.near and size <= len(entry.near):  # those of the same article come first
                others = re.findall(r":\n(Article .*)", question.text)
                assert {other[:9] for other in others} == {entry.paragraphs[0][:9]}


def test_essays_of_a_file_are_read_in_order_again_and_again(tmp_path):
    (tmp_path / "essays.json").write_text(json.dumps({"text": "First one.  Second\none! Third."}))
    essays = Essays(tmp_path / "essays.json")
    assert essays.first(5) == ["First one.", "Second one!", "Third.", "First one.", "Second one!"]
    question = asked("niah_single_2", 4, sources=Sources(essays))
    assert NEEDLE.sub("", question.text).count("First one.") == 2
    paragraphs = Essays()
    assert paragraphs.first(50) == Essays().first(80)[:50]
    assert len(set(paragraphs.first(500))) > 490


@pytest.mark.parametrize(
    ("task", "written", "answers", "score"),
    [
        ("niah_multivalue", "They are 12, 34 and 5.", ("12", "34", "56", "78"), 0.5),
        ("niah_single_1", "ABC", ("abc",), 1.0),
        ("niah_single_1", "", ("abc",), 0.0),
        ("qa_1", "in Paris", ("paris", "London"), 1.0),
        ("qa_2", "Rome", ("Paris", "London"), 0.0),
        ("vt", "AB CD", ("AB", "EF"), 0.5),
    ],
)
def test_scores_are_the_papers(task, written, answers, score):
    """string_match_all is the share of answers in the text; string_match_part is one of them."""
    assert TASKS[task].score(written, answers) == score


GOOD = {"question": "Who?", "answers": ["Ada"], "paragraphs": ["It was Ada."]}
CONTEXT = {"context": "It was Ada.", "qas": [{"question": "Who?", "answers": [{"text": "Ada"}]}]}
UNANSWERABLE = {
    "context": "None.",
    "qas": [{"question": "Who?", "answers": [], "is_impossible": True}],
}
UNANSWERED = {"context": "None.", "qas": [{"question": "Who?", "answers": []}]}
HOTPOT = {"question": "Who?", "answer": "Ada", "context": [["Ada", ["It was Ada."]]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            ([GOOD, GOOD | {field: value}, GOOD], f"line 2: {field} ")
            for field, value in (
                ("answers", [" "]),
                ("answers", []),
                ("answers", ["Ada", ""]),
                ("question", ""),
                ("paragraphs", []),
            )
        ),
        ([GOOD, "", '{"question": "Who?"'], "has .*line 3"),
        ([GOOD, "", '{"question": "Who?"}'], "has .*line 3"),
        ([GOOD, "", "[]"], "has .*line 3"),
        ([GOOD, "", '{"question": "Who?", "answers": "a"}'], "has .*line 3"),
        ([{"data": [{"paragraphs": [CONTEXT, UNANSWERED]}]}], "question 2: answers is empty"),
        ([[HOTPOT, HOTPOT | {"answer": ""}]], "question 2: answers has an empty text"),
    ],
)
def test_a_question_that_any_text_would_answer_or_none_is_refused_by_its_place(
    tmp_path, content, message
):
    """An empty answer is in every text, so that it would score 100 for any."""
    lines = (line if isinstance(line, str) else json.dumps(line) for line in content)
    (tmp_path / "q.json").write_text("\ufeff" + "\n".join(lines))
    with pytest.raises(DataError, match=rf"q\.json,? {message}"):
        Questions(tmp_path / "q.json")


def test_questions_without_an_answer_are_left_out_and_lines_are_those_of_json(tmp_path):
    file = tmp_path / "q.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [CONTEXT, UNANSWERABLE]}]}))
    assert len(Questions(file).questions) == 1
    file.write_text(json.dumps(GOOD | {"question": "Who\u2028is it?"}, ensure_ascii=False))
    assert Questions(file).questions[0].question == "Who\u2028is it?"
