"""Long conversations take time that grows as their text does.

Their masks are those that every prefix gives.
"""

import dataclasses
import random
from pathlib import Path

import pytest

from data.chat import prefixes
from data.chat.rows import conversation_of, conversation_of_turns
from data.chat.template import ChatTemplate, load_template
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.chat.rich import RICH, write_folder
from tests.data.chat.templates import TEMPLATES

TRL = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
PUBLISHED = (
    "qwen2_5",
    "qwen3",
    "llama3",
    "llama3_1",
    "gemma3",
    "phi3",
    "glm4moe",
    "lfm2_v2",
    "deepseekv3",
    "cohere",
)
SOURCES = (
    TEMPLATES
    | {"rich": RICH}
    | {name: (TRL / f"{name}.jinja").read_text(encoding="utf-8") for name in PUBLISHED}
)


def loaded(folder, source):
    path = write_folder(folder, source)
    return load_tokenizer(path), load_template(path)


def chat(turns):
    roles = ("user", "assistant")
    return conversation_of_turns(
        [{"role": roles[n % 2], "content": f"words {n} " * 3} for n in range(turns)]
    )


def tool_chat(questions, calls):
    """Questions that the assistant answers after some calls each."""
    draw, turns = random.Random(2), [{"role": "system", "content": "Be brief."}]
    for number in range(questions):
        turns.append({"role": "user", "content": f"question {number}"})
        for _ in range(draw.randint((calls + 1) // 2, calls)):
            function = {"name": "weather", "arguments": {"city": f"Rome {draw.random()}"}}
            turns.append(
                {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
            )
            turns.append({"role": "tool", "content": f"result {draw.random()}"})
        turns.append({"role": "assistant", "content": f"answer {number}"})
    return conversation_of_turns(turns)


def written(template, tokenizer, conversation, monkeypatch):
    """The characters that a template writes for one conversation."""
    counts = []
    render = ChatTemplate.render

    def counted(self, *args, **options):
        text = render(self, *args, **options)
        counts.append(len(text))
        return text

    with monkeypatch.context() as patched:
        patched.setattr(ChatTemplate, "render", counted)
        template.encode(tokenizer, conversation)
    return sum(counts)


@pytest.mark.parametrize(
    "make", [chat, lambda turns: tool_chat(turns // 4, 1), lambda turns: tool_chat(1, turns // 2)]
)
def test_twice_the_turns_take_about_twice_the_text(make, tmp_path, monkeypatch):
    tokenizer, template = loaded(tmp_path, RICH)
    sizes = [written(template, tokenizer, make(turns), monkeypatch) for turns in (340, 680)]
    lengths = [len(template.render(make(turns).turns)) for turns in (340, 680)]
    assert sizes[1] / sizes[0] < 1.15 * lengths[1] / lengths[0]
    monkeypatch.setattr(prefixes, "ALL_COMPARED", 10**9)  # every prefix
    assert written(template, tokenizer, make(340), monkeypatch) > 3 * sizes[0]


MAKES = {
    "chat": lambda: chat(81),
    "tools": lambda: tool_chat(12, 3),
    "calls": lambda: tool_chat(1, 40),
}
DAILY = {
    ("chatml", "chat"),
    ("rich", "tools"),
    ("qwen3", "chat"),
    ("glm4moe", "tools"),
    ("rich", "calls"),
}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, marks=() if (name, make) in DAILY else pytest.mark.slow)
        for name in SOURCES
        for make in MAKES
    ],
)
def test_masks_are_those_of_every_prefix(make, name, tmp_path, monkeypatch):
    tokenizer, template = loaded(tmp_path, SOURCES[name])

    def masks():
        try:
            return template.tokenize(tokenizer, MAKES[make]())[1].tolist()
        except DataError as error:
            return str(error)

    short = masks()
    monkeypatch.setattr(prefixes, "ALL_COMPARED", 10**9)
    assert short == masks()


@pytest.mark.parametrize(
    "change",
    [
        "{% if loop.last and loop.index > 41 %}{{ 'late' }}{% endif %}",
        (
            "{% if loop.last and loop.index is divisibleby(2) and loop.index > 60 %}{{ 'late' }}{% "
            "endif %}"
        ),
        "{% if loop.index == messages | length - 4 %}{{ 'fourth from the end' }}{% endif %}",
    ],
)
def test_a_template_that_writes_late_turns_otherwise_is_refused(change, tmp_path):
    """Though the turns around look alike."""
    source = TEMPLATES["chatml"].replace("{% endfor %}", f"{change}{{% endfor %}}", 1)
    tokenizer, template = loaded(tmp_path, source)
    with pytest.raises(DataError, match="does not say exactly"):
        template.encode(tokenizer, chat(200))


def test_long_ones_are_exact_where_earlier_turns_are_not_and_are_not_learned(tmp_path):
    tokenizer, template = loaded(tmp_path, SOURCES["qwen3"])
    conversation = chat(100)
    with pytest.raises(DataError, match="does not say exactly"):
        template.encode(tokenizer, conversation)
    last = dataclasses.replace(conversation, learned=[number == 99 for number in range(100)])
    encoded = template.encode(tokenizer, last)
    text = tokenizer.detokenize(encoded.ids[encoded.learned].tolist(), special=True)
    assert text == f"<think>\n\n</think>\n\n{conversation.turns[99]['content']}<|im_end|>"


def test_a_row_of_thousands_of_turns_is_read(tmp_path):
    tokenizer, template = loaded(tmp_path, TEMPLATES["chatml"])
    turns = [{"from": ("human", "gpt")[n % 2], "value": f"words {n}"} for n in range(3000)]
    encoded = template.encode(tokenizer, conversation_of({"conversations": turns}, template.reads))
    assert len(encoded.ends) == 1500
