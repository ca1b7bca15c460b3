"""Examples written by the command: the benchmark's, and to train on, the same for a seed."""

import hashlib
import json

import pytest

from data.chat.rows import conversation_of
from data.chat.template import load_template
from tools.convert_hf import main as convert
from tools.ruler.__main__ import main
from tools.ruler.tasks import TASKS


def made(tokenizer, path, *flags):
    """Rows of line retrieval to train on, unless flags say otherwise."""
    lines = [
        "--messages",
        "--tasks",
        "line_retrieval",
        "--lengths",
        "400",
        "--samples",
        "6",
        "--vocabulary",
        "small",
    ]
    flags = flags if "--tasks" in flags else [*lines, "--questions", "3", *flags]
    assert main(["make", str(path), "--tokenizer-model", tokenizer.path, *flags]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_examples_are_written_as_the_benchmarks_and_to_train_on(tmp_path, tokenizer, capsys):
    file = tmp_path / "made.jsonl"
    flags = ["--tasks", "niah_single_1", "vt", "--lengths", "4000", "--samples", "2"]
    rows = made(tokenizer, file, *flags)
    assert [(row["task"], row["index"]) for row in rows] == [
        (t, n) for n in (0, 1) for t in ("niah_single_1", "vt")
    ]
    for row in rows:
        tokens = len(
            tokenizer.tokenize(row["input"] + row["answer_prefix"])
        )  # the tokenizer adds none
        assert row["length"] == tokens + TASKS[row["task"]].new_tokens <= 4000
        assert all(answer in row["input"] for answer in row["outputs"])
    assert "4 examples, prompts of" in capsys.readouterr().out
    assert (
        main(["make", str(file), *flags[3:], "--tokenizer-model", tokenizer.path, "--samples", "1"])
        == 0
    )
    message = (
        "note: qa_1, qa_2 left out, since their questions come from files; give the files with "
        "--qa-1 FILE and --qa-2 FILE\n"
    )
    assert capsys.readouterr().err == message
    taught = [row["messages"] for row in made(tokenizer, file, *flags, "--messages")]
    assert all(turns[1]["content"] for turns in taught)
    assert not {turns[0]["content"] for turns in taught} & {row["input"] for row in rows}


def test_a_seed_gives_the_same_bytes_anywhere(tmp_path, tokenizer, capsys):
    """The digest holds on any machine and for any Python: no draw is another one's."""
    rows = made(tokenizer, tmp_path / "a.jsonl")
    assert "6 examples" in capsys.readouterr().out
    assert (
        hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()[:16] == "94efef82faa2d7a0"
    )
    template = load_template(tokenizer.path)
    assert all(
        len(template.tokenize(tokenizer, conversation_of(row).turns)[0]) <= 400 for row in rows
    )
    other = made(tokenizer, tmp_path / "b.jsonl", "--seed", "2")
    assert len({row["messages"][0]["content"] for row in rows + other}) == 12
    asked_rows = made(
        tokenizer,
        tmp_path / "c.jsonl",
        "--tasks",
        "line_retrieval",
        "--lengths",
        "999",
        "--samples",
        "1",
    )
    assert [row["task"] for row in asked_rows] == [
        f"line_retrieval {depth}%" for depth in (0, 25, 50, 75, 100)
    ]
    assert all(row["outputs"][0] in row["input"] for row in asked_rows)


def test_a_question_that_does_not_fit_is_told_and_ends_nothing(tmp_path, tokenizer, capsys):
    rows = [
        {"question": "Who?", "answers": [name], "paragraphs": [name + " word" * n]}
        for name, n in (("Al", 9999), ("Bo", 3))
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--tasks",
        "qa_1",
        "--qa-1",
        str(tmp_path / "q.jsonl"),
        "--lengths",
        "2000",
        "--samples",
        "2",
    ]
    assert [row["outputs"] for row in made(tokenizer, tmp_path / "made.jsonl", *flags)] == [
        ["Bo"],
        ["Bo"],
    ]
    assert (
        "note: qa_1 at 2000 tokens leaves out 1 questions that do not fit"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a.jsonl", "--lengths", "30"], "for 1 line and as many questions, but a length is 30"),
        (["a.json"], "does not end in .jsonl"),
        (["a.jsonl", "--tokenizer-model", "none.json"], "cannot read tokenizer none.json"),
        (["a.jsonl", "--chat-template", "none.jinja"], "cannot read the chat template none.jinja"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, tokenizer, flags, message):
    monkeypatch.chdir(tmp_path)
    line_flags = [
        "--messages",
        "--tasks",
        "line_retrieval",
        "--lengths",
        "400",
        "--tokenizer-model",
        tokenizer.path,
    ]
    assert main(["make", *line_flags, *flags]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_is_for_training_alone_is_refused_without_messages(capsys):
    command = [
        "make",
        "a.jsonl",
        "--tasks",
        "line_retrieval",
        "--lengths",
        "400",
        "--tokenizer-model",
        "none.json",
    ]
    for flags in (["--questions", "2"], ["--form", "repeat"]):
        assert main([*command, *flags]) == 2
        assert "--questions and --form repeat need --messages" in capsys.readouterr().err


def test_a_tiny_model_is_written_once_and_imported(tmp_path, capsys):
    folder = tmp_path / "tiny"
    command = ["model", str(folder), "--task", "line_retrieval", "--hidden-size", "32"]
    assert main(command) == 0
    assert "1,732 tokens" in capsys.readouterr().out
    assert convert(["import", str(folder), str(tmp_path / "run")]) == 0
    assert main(command) == 1
    assert "exists; choose a new folder" in capsys.readouterr().err
    assert main(["model", str(tmp_path / "odd"), "--hidden-size", "12"]) == 1
    assert "hidden_size is 12; it must be a multiple of 8" in capsys.readouterr().err
    assert not (tmp_path / "odd").exists()
