"""Conversations of the families that are imported.

Ids and masks are those of transformers and of TRL.
"""

import random
from pathlib import Path

import pytest

from data.chat.rows import conversation_of
from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from tests.data.chat.rich import theirs, write_folder
from tests.data.chat.templates import source_of

TRL = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
COUNT = 50
PUBLISHED = {
    "LLaMA 3": ("llama3", ""),
    "LLaMA 3.1": ("llama3_1", "tools"),
    "Qwen2.5": ("qwen2_5", "tools"),
    "Qwen3": ("qwen3", "tools thoughts"),
    "Qwen3 2507": ("qwen3_instruct_2507", "tools"),
    "Qwen3.5": ("qwen3_5_think", "tools thoughts"),
    "Gemma 3": ("gemma3", ""),
    "Phi-3": ("phi3", ""),
    "Phi-3.5": ("phi3_5", ""),
    "DeepSeek R1": ("deepseek_r1_distill", ""),
    "GLM 4": ("glm4moe", "tools thoughts"),
}
WRITTEN = {"Mistral": ("mistral tools", "tools"), "OLMo 3": ("olmo 3", "tools thoughts")}
"""Mistral's of 2025 and one as OLMo 3's, both with marks of what is generated."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
PIECES = (
    "Straße",
    "日本",
    "2 + 2 = 4",
    "```python\nx = 1\n```",
    "é\u0301",
    "🙂",
    "\n- a\n- b",
    "<b>",
    "a \"b\" 'c'",
    "\\n",
)


def text(draw):
    return " ".join(draw.choices(PIECES, k=draw.randint(1, 6))).strip() + draw.choice(
        (".", "!", "")
    )


def conversation(draw, has):
    """A conversation of one to four questions, some with a system, calls of a tool and thoughts."""
    turns = [{"role": "system", "content": text(draw)}] if draw.random() < 0.4 else []
    calls, thinks = (
        "tools" in has and draw.random() < 0.6,
        "thoughts" in has and draw.random() < 0.6,
    )
    thought = lambda: {"reasoning_content": text(draw)} if thinks else {}  # noqa: E731
    for _ in range(draw.randint(1, 4)):
        turns.append({"role": "user", "content": text(draw)})
        if calls and draw.random() < 0.7:
            arguments = {"city": text(draw), "days": draw.randint(1, 9)}
            call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call], **thought()})
            turns.append({"role": "tool", "name": "weather", "content": text(draw)})
        turns.append({"role": "assistant", "content": text(draw), **thought()})
    return {"messages": turns, **({"tools": [TOOL]} if calls else {})}


def compare(folder, source, has):
    """Compare all ids and masks of ``COUNT`` conversations with those of transformers."""
    path = write_folder(folder, source)
    tokenizer, template, other = load_tokenizer(path), load_template(path), theirs(path)
    draw = random.Random(5)
    for _ in range(COUNT):
        row = conversation(draw, has)
        encoded = template.encode(tokenizer, conversation_of(row, template.reads))
        want = other.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert encoded.ids.tolist() == want["input_ids"]
        assert encoded.learned.tolist() == [mask == 1 for mask in want["assistant_masks"]]


@pytest.mark.parametrize("family", WRITTEN)
def test_ids_and_masks_of_a_template_with_marks_are_those_of_transformers(family, tmp_path):
    name, has = WRITTEN[family]
    compare(tmp_path, source_of(name), has)


@pytest.mark.parametrize(
    "family", sorted(PUBLISHED.keys() - {"LLaMA 3.1"})
)  # which TRL does not train
def test_ids_and_masks_of_a_published_template_are_those_of_trl(family, tmp_path):
    """TRL trains with what `get_training_chat_template` returns for the published template."""
    from trl.chat_template_utils import get_training_chat_template

    name, has = PUBLISHED[family]
    source = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    other = theirs(write_folder(tmp_path / "published", source))
    compare(tmp_path / "training", get_training_chat_template(other), has)


@pytest.mark.parametrize(
    "family", sorted(PUBLISHED.keys() - {"DeepSeek R1"})
)  # whose prompt begins a thought
def test_ids_of_a_published_template_without_marks_are_those_of_transformers(family, tmp_path):
    """By prefixes. What it learns are the assistant's words and the tokens that end its turns."""
    name, _ = PUBLISHED[family]
    path = write_folder(tmp_path, (TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    tokenizer, template, other = load_tokenizer(path), load_template(path), theirs(path)
    draw = random.Random(6)
    for _ in range(COUNT):
        row = conversation(draw, "")
        turns = row["messages"]
        for turn in turns[
            :-1
        ]:  # the last answer alone: Qwen3 and others write the earlier ones otherwise
            turn |= {"train": False} if turn["role"] == "assistant" else {}
        encoded = template.encode(tokenizer, conversation_of(row, template.reads))
        plain = [{key: turn[key] for key in ("role", "content")} for turn in turns]
        assert (
            encoded.ids.tolist() == other.apply_chat_template(plain, return_dict=True)["input_ids"]
        )
        assert turns[-1]["content"] in tokenizer.detokenize(
            encoded.ids[encoded.learned].tolist(), special=True
        )
