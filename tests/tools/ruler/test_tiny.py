"""Tiny models have tokens for all words of their tasks.

The answer so is what followed the key.
"""

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tools.ruler.lines import LineMaker, LineTask
from tools.ruler.prompts import Prompts, answer_of
from tools.ruler.tasks import TASKS, RulerCase, Sources
from tools.ruler.tiny import (
    END,
    LEARNED,
    OF_FILE,
    UNKNOWN,
    USER,
    repeated,
    tokenizer_of_needles,
    tokenizer_of_words,
)


def test_a_line_is_three_tokens_and_a_question_ends_with_its_name(tmp_path):
    written = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_words(),
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER],
    )
    written.chat_template = OF_FILE["template"]
    written.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    chat = Prompts(tokenizer, load_template(tokenizer.path))
    task = LineTask(tokens=96, purpose="train", seed=1, vocabulary="small", questions=4)
    turns = LineMaker(task, chat).make(0).turns
    ids, learned = chat.template.tokenize(tokenizer, turns)
    words = [tokenizer.detokenize([token], special=True) for token in ids]
    lines, question = turns[0]["content"].rsplit("\n", 1)
    record = [part for line in lines.splitlines() for part in (*line.rsplit(" ", 1), "\n")]
    assert words[: 2 + len(record)] == ["<|user|>", *record, question.removesuffix("?")]
    assert [word for word, learns in zip(words, learned, strict=True) if learns] == [
        part for turn in turns[1::2] for part in (turn["content"], "<|end|>")
    ]
    assert "<|unknown|>" not in words
    with pytest.raises(
        DataError, match="vocabulary is full, but the tokenizer does not know all of its words"
    ):
        LineMaker(replace(task, vocabulary="full"), chat)


def test_the_needles_tokenizer_knows_all_of_its_tasks():
    backend = tokenizer_of_needles()
    for task in LEARNED:
        question = TASKS[task].make(RulerCase("any", 0, 1024, Sources()), 300)
        text = question.text + question.prefix + answer_of(question)
        assert UNKNOWN not in backend.encode(text).tokens
        answers = [
            backend.decode(backend.encode(f" {answer}").ids).strip() for answer in question.answers
        ]
        assert answers == [*question.answers]
    user, again = (turn["content"] for turn in repeated(3, 1, 4))
    assert again == 4 * user
    assert UNKNOWN not in backend.encode(user).tokens
