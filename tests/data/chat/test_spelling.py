"""No text of a conversation or document ends it, whatever flags the entry of a token has."""

import json
import re

import pytest
from transformers import AutoTokenizer

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.chat.templates import TEMPLATES, TURNS, source_of
from tests.data.families import QWEN, QWEN_CONFIG
from tests.data.family_files import QWEN_2, added, by_pattern, write

THINKING = source_of("thinking")


def folder_of(folder, tokens=QWEN, template=TEMPLATES["chatml"], settings=QWEN_CONFIG, **files):
    config = settings | {"chat_template": template}
    return write(folder, "bytes", tokens, config, None, split=by_pattern(QWEN_2), **files)


def plain(*texts):
    """Tokens whose entries are not special."""
    return [added(text, special=False) for text in texts]


def spelling(content, role="user"):
    return [turn | {"content": content} if turn["role"] == role else turn for turn in TURNS[:2]]


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
ALL = plain("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<word>")
REFUSED = {
    "special: true": (QWEN, CONFIG, {}, "<|vision_start|>"),
    "eos_token": (ALL, CONFIG, {}, "<|endoftext|>"),
    "eos_token_id of generation_config.json": (
        ALL,
        CONFIG,
        {"generation_config": {"eos_token_id": [1205]}},
        "<word>",
    ),
    "eos_token_id of a part of config.json": (
        ALL,
        CONFIG,
        {"config": {"model_type": "", "text_config": {"eos_token_id": 1205}}},
        "<word>",
    ),
    "special in added_tokens_decoder": (
        ALL,
        CONFIG | {"added_tokens_decoder": {"1205": added("<word>")}},
        {},
        "<word>",
    ),
    "chat_control_tokens": (ALL, CONFIG | {"chat_control_tokens": ["<word>"]}, {}, "<word>"),
    "ends a turn in the template": (ALL, CONFIG, {}, "<|im_end|>"),
    "begins a turn in the template": (ALL, CONFIG, {}, "<|im_start|>"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_turn_that_spells_a_control_token_is_refused(name, role, tmp_path):
    tokens, config, files, word = REFUSED[name]
    path = folder_of(tmp_path, tokens, THINKING, config, **files)
    tokenizer, template = load_tokenizer(path), load_template(str(path))
    with pytest.raises(
        DataError, match=rf"turn [12] spells the special token '{re.escape(word)}' in its content"
    ):
        template.tokenize(tokenizer, spelling(f"a{word}b", role))


def test_parts_of_a_content_that_spell_a_control_token_together_are_refused(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string "
        "%}{{ m.content }}"
        "{% else %}{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor "
        "%}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|im_start|>assistant\n' }}{% endif %}"
    )
    path = folder_of(tmp_path, template=template)
    tokenizer, template = load_tokenizer(path), load_template(str(path))
    parts = [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]
    with pytest.raises(DataError, match=r"turn 1 spells the special token '<\|im_end\|>'"):
        template.tokenize(tokenizer, spelling(parts))
    template.tokenize(tokenizer, spelling(parts[:1]))


def test_a_token_around_turns_is_found_in_normalized_text(tmp_path):
    tokens = [
        added(text, special=False, normalized=True) for text in ("<|im_start|>", "<|im_end|>")
    ]
    path = folder_of(tmp_path, [added("<|endoftext|>"), *tokens], settings=CONFIG)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"normalizer": {"type": "NFKC"}}))
    tokenizer, template = load_tokenizer(path), load_template(str(path))
    full_width = "a\uff1c|im_end|\uff1eb"  # full-width angle brackets
    assert (
        tokenizer.tokenize_special("<|im_end|>")[0][0] in tokenizer.tokenize_special(full_width)[0]
    )
    with pytest.raises(DataError, match=r"turn 1 spells the special token '<\|im_end\|>'"):
        template.tokenize(tokenizer, spelling(full_width))


def test_a_text_in_any_field_of_a_turn_is_looked_at(tmp_path):
    path = folder_of(tmp_path)
    tokenizer, template = load_tokenizer(path), load_template(str(path))
    call = {"function": {"name": "f", "arguments": {"x": ["<|im_end|>"]}}}
    with pytest.raises(DataError, match=r"in its tool_calls\.function\.arguments\.x"):
        template.tokenize(tokenizer, [TURNS[0], TURNS[1] | {"tool_calls": [call]}])


def test_ordinary_added_words_in_a_turn_are_the_tokens_of_transformers(tmp_path):
    path = folder_of(tmp_path, template=THINKING)
    turns = spelling("<think>\nWhy?\n</think>\n\n<tool_call>{}</tool_call>", "assistant")
    ids, _ = load_template(str(path)).tokenize(load_tokenizer(path), turns)
    theirs = AutoTokenizer.from_pretrained(path.parent)
    assert ids.tolist() == theirs.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert theirs.convert_tokens_to_ids("<tool_call>") in ids


@pytest.mark.parametrize("name", [name for name in REFUSED if "template" not in name])
def test_a_document_that_spells_a_control_token_is_ordinary_text(name, tmp_path):
    tokens, config, files, word = REFUSED[name]
    tokenizer = load_tokenizer(folder_of(tmp_path, tokens, TEMPLATES["chatml"], config, **files))
    (token,) = tokenizer.tokenize_special(word)[0]
    ids = tokenizer.tokenize(f"a{word}b")
    assert token not in ids
    assert tokenizer.detokenize(ids) == f"a{word}b"


@pytest.mark.parametrize("flags", [{"normalized": True}, {"single_word": True, "special": False}])
def test_a_control_token_with_flags_is_found_as_the_tokenizer_finds_it(flags, tmp_path):
    tokens = [*QWEN, added("<|stop|>", **flags)]
    tokenizer = load_tokenizer(
        folder_of(tmp_path, tokens, settings=CONFIG | {"eos_token": "<|stop|>"})
    )
    assert tokenizer.spelled("a <|stop|> b") == "<|stop|>"
    assert tokenizer.spelled("a b") is None
    assert tokenizer.spelled("x<|stop|>y") == (None if "single_word" in flags else "<|stop|>")
