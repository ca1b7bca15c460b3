"""The tiny model's tokens are the words of short lines, and it is imported as any other model."""

from dataclasses import replace

import pytest

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tools.convert_hf import main as convert
from tools.line_retrieval import __main__ as command
from tools.line_retrieval.lines import Maker, Task


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
