"""RULER scored: of a writer whose errors are known, of a model as by hand, on any mesh; and what is refused."""

import json

import pytest
import torch

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from runtime.ranks import run_ranks
from tests.data.chat.templates import TEMPLATES, write_tokenizer
from tests.tools.test_line_retrieval import run_of
from tools.common import answers
from tools.ruler import __main__ as command
from tools.ruler.__main__ import entry, place_of, score_tasks, table
from tools.ruler.answers import Cell, ask_all
from tools.ruler.examples import Maker, Prompts, answer_of
from tools.ruler.tasks import TASKS, Case, Sources
from tools.ruler.tiny import LEARNED, UNKNOWN, repeated, tokenizer_of_needles


class Knowing:
    """Answers with what follows the asked key in the text, and of several keys only those of the first."""

    replica, replicas, group = 0, 1, None

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def write(self, prompts, max_new_tokens, *, stop=()):
        self.asked.append((len(prompts), max_new_tokens))
        return [self.tokenizer.tokenize(self._answer(self.tokenizer.detokenize(prompt))) for prompt in prompts]

    def _answer(self, text):
        key = text.rpartition(" for ")[2].split(" mentioned")[0].split(",")[0]
        return text.split(f" for {key} is: ")[1].split(".")[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"]))


@pytest.mark.parametrize(("task", "share"), [("niah_single_2", 100), ("niah_multikey_2", 100), ("niah_multiquery", 25)])
def test_known_answers_are_counted(tokenizer, task, share):
    writer, prompts = Knowing(tokenizer), Prompts(tokenizer, load_template(tokenizer.path))
    cell = entry(ask_all(writer, place_of(prompts, Maker(task, 2000, 1, prompts, Sources())), 5, 2))
    assert (cell["task"], cell["length"], cell["score"]) == (task, 2000, share)
    assert writer.asked == [(2, 128), (2, 128), (1, 128)]
    assert len(cell["wrong"]) == (0 if share == 100 else 3)


def test_the_table_has_averages_and_the_effective_length():
    shares = {("vt", 4096): [1.0, 0.8], ("cwe", 4096): [0.9], ("vt", 8192): [0.7], ("cwe", 8192): [1.0]}
    cells = [Cell(*place, [(share, {}) for share in found]) for place, found in shares.items()]
    assert table(cells)[2:5] == [
        "| vt | 90.0 | 70.0 | 80.0 |",
        "| cwe | 90.0 | 100.0 | 95.0 |",
        "| average | 90.0 | 85.0 | 87.5 |",
    ]
    assert table(cells)[-1].startswith("effective length: 4096 (the longest whose average is above 85.6")
    assert table(cells[2:])[-1].startswith("effective length: less than all of these")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_of(folder, TEMPLATES["chatml"])


def scored(folder, *flags):
    """Score the two tasks with the shortest answers: each token of these is a step of all processes."""
    asked = folder / "asked.jsonl"
    if not asked.exists():  # ranks would read what another one writes
        asked.write_text(json.dumps({"question": "Who?", "answers": ["Ada"], "paragraphs": ["It was Ada."]}))
    command_line = ["score", str(folder), "--qa-1", str(asked), "--samples", "2", "--batch-size", "2"]
    args = command._parse([*command_line, "--lengths", "1000", "--tasks", "fwe", "qa_1", *flags])
    score_tasks(args, command.tasks_of(args), command.sources_of(args))
    return json.loads((folder / "evaluation" / "ruler.json").read_text())["cells"]


def test_a_run_is_asked_and_its_answers_are_its_own(run, capsys):
    folder, model = run
    cells = scored(folder, "--tasks", "fwe", "--samples", "1")
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.json")
    prompts = Prompts(tokenizer)
    example = Maker("fwe", 1000, 1, prompts, Sources()).make(0)
    ids = list(example.ids)
    with torch.no_grad():
        while len(ids) < len(example.ids) + 50 and ids[-1] != tokenizer.eod:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    written = prompts.text([i for i in ids[len(example.ids) :] if i != tokenizer.eod])
    told = {"number": 0, "answers": list(example.question.answers), "written": written}
    assert cells[0]["wrong"] == [told]
    said = capsys.readouterr().out
    assert "1000 tokens, fwe: 0.0" in said
    assert "1 examples of each task and length, prompts as of a base model, haystack of made sentences" in said
    assert (folder / "evaluation" / "ruler.png").read_bytes().startswith(b"\x89PNG")


def scored_on_rank(rank, world_size, folder, flags):
    scored(folder, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--context-parallel-size", "1", "--chat"), marks=pytest.mark.slow),
        pytest.param(("--tensor-model-parallel-size", "2"), marks=pytest.mark.slow),
        pytest.param(("--pipeline-model-parallel-size", "2"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_score_the_same(run, flags):
    folder, _ = run
    one = scored(folder, *([flag for flag in flags if flag == "--chat"]))
    run_ranks(scored_on_rank, 2, folder, flags)
    assert json.loads((folder / "evaluation" / "ruler.json").read_text())["cells"] == one


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lengths", "300"], r"fwe takes \d+ tokens and 50 for the answer at the least, and a length is"),
        (["--tasks", "vt", "fwe"], r"vt takes .* a length is 1000; give .* or leave the task out: --tasks fwe"),
        (["--tasks", "qa_2"], "tasks names qa_2, whose questions come from a file; give --qa-2 FILE, HotpotQA's JSON"),
        (["--tasks", "niah"], "tasks names niah, and there are niah_single_1, "),
        (["--essays", "nowhere.txt"], "essays is nowhere.txt, which cannot be read"),
        (["--tasks", "qa_2", "--qa-2", "nowhere.json"], "nowhere.json has no questions that can be read"),
    ],
)
def test_what_cannot_be_asked_is_named_before_the_processes_join(run, flags, said, monkeypatch):
    monkeypatch.delattr(answers, "opened")
    with pytest.raises(ValueError, match=said):
        scored(run[0], *flags)


def test_a_prompt_longer_than_any_text_is_refused(run):
    with pytest.raises(ValueError, match="lengths names 99999999, and texts of up to 16777216 tokens are made"):
        scored(run[0], "--lengths", "99999999")


def test_a_prompt_beyond_the_table_of_positions_is_refused(tmp_path):
    run_of(tmp_path, TEMPLATES["chatml"], model_type="gpt")
    with pytest.raises(ValueError, match="lengths names 1000, and the model has max_position_embeddings 256"):
        scored(tmp_path)


def test_examples_are_written_as_the_benchmarks_and_to_train_on(tmp_path, tokenizer, capsys):
    made = tmp_path / "made.jsonl"
    flags = ["--tasks", "niah_single_1", "vt", "--lengths", "4000", "--samples", "2"]
    assert command.main(["make", str(made), *flags, "--tokenizer-model", tokenizer.path]) == 0
    rows = [json.loads(line) for line in made.read_text().splitlines()]
    assert [(row["task"], row["index"]) for row in rows] == [(t, n) for n in (0, 1) for t in ("niah_single_1", "vt")]
    for row in rows:
        tokens = len(tokenizer.tokenize(row["input"] + row["answer_prefix"]))  # the tokenizer adds none
        assert row["length"] == tokens + TASKS[row["task"]].new_tokens <= 4000
        assert all(answer in row["input"] for answer in row["outputs"])
    assert "4 examples, prompts of" in capsys.readouterr().out
    assert command.main(["make", str(made), *flags[3:], "--tokenizer-model", tokenizer.path, "--samples", "1"]) == 0
    said = "note: qa_1, qa_2 left out: their questions come from files, which --qa-1 and --qa-2 name\n"
    assert capsys.readouterr().err == said
    assert command.main(["make", str(made), *flags, "--messages", "--tokenizer-model", tokenizer.path]) == 0
    taught = [json.loads(line)["messages"] for line in made.read_text().splitlines()]
    assert all(turns[1]["content"] for turns in taught)
    assert not {turns[0]["content"] for turns in taught} & {row["input"] for row in rows}


def test_a_question_that_does_not_fit_is_told_and_ends_nothing(tmp_path, tokenizer, capsys):
    rows = [
        {"question": "Who?", "answers": [name], "paragraphs": [name + " word" * n]}
        for name, n in (("Al", 9999), ("Bo", 3))
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--tasks", "qa_1", "--qa-1", str(tmp_path / "q.jsonl"), "--lengths", "2000", "--samples", "2"]
    assert command.main(["make", str(tmp_path / "made.jsonl"), *flags, "--tokenizer-model", tokenizer.path]) == 0
    assert "note: qa_1 at 2000 tokens leaves out 1 questions that do not fit" in capsys.readouterr().err
    made = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert [row["outputs"] for row in made] == [["Bo"], ["Bo"]]


def test_the_tiny_tokenizer_knows_all_of_its_tasks():
    backend = tokenizer_of_needles()
    for task in LEARNED:
        question = TASKS[task].make(Case("any", 0, 1024, Sources()), 300)
        text = question.text + question.prefix + answer_of(question)
        assert UNKNOWN not in backend.encode(text).tokens
        assert [backend.decode(backend.encode(f" {answer}").ids).strip() for answer in question.answers] == [
            *question.answers
        ]
    user, again = (turn["content"] for turn in repeated(3, 1, 4))
    assert again == 4 * user
    assert UNKNOWN not in backend.encode(user).tokens
