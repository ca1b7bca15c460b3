"""Conversations of published families.

Ids and masks are those of transformers, tokens with rstrip and lstrip too.
"""

import random

import pytest
from transformers import AutoTokenizer

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from tests.data.families import FAMILIES
from tests.data.test_tokenizer_families import changed


def marked(user, answer, before="", space=""):
    """A template that marks answers.

    Return what it writes for a user's turn, an answer's begin and an answer's end.
    """
    begin, end = answer
    return (
        before
        + "{% for m in messages %}{% if m.role == 'user' %}"
        + user.replace("CONTENT", "{{ m.content }}")
        + "{% else %}"
        + begin
        + f"{{% generation %}}{space}{{{{ m.content }}}}"
        + end[0]
        + "{% endgeneration %}"
        + end[1]
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + begin
        + "{% endif %}"
    )


CHATML = marked(
    "<|im_start|>user\nCONTENT<|im_end|>\n",
    ("<|im_start|>assistant\n", ("<|im_end|>", "{{ '\\n' }}")),
)
PHI_4 = marked(
    "<|im_start|>user<|im_sep|>CONTENT<|im_end|>",
    ("<|im_start|>assistant<|im_sep|>", ("<|im_end|>", "")),
)
HEADER = "<|start_header_id|>"
TEMPLATES = {
    "Qwen 2": CHATML,
    "Qwen 3": CHATML,
    "Qwen 3.5": CHATML,
    "SmolLM 2": CHATML,
    "OLMo 3": marked("<|im_end|>user\nCONTENT<|im_end|>\n", ("a:", ("<|im_end|>", "{{ '\\n' }}"))),
    "Phi-3": marked("<|user|>\nCONTENT<|end|>\n", ("<|assistant|>\n", ("<|end|>", "{{ '\\n' }}"))),
    "Phi-4": PHI_4,
    "Gemma 3": marked(
        "<start_of_turn>user\nCONTENT<end_of_turn>\n",
        ("<start_of_turn>model\n", ("<end_of_turn>", "{{ '\\n' }}")),
        "{{ bos_token }}",
    ),
    "LLaMA 3": marked(
        f"{HEADER}user{HEADER}\n\nCONTENT<|eot_id|>",
        (f"{HEADER}assistant{HEADER}\n\n", ("<|eot_id|>", "")),
        "{{ bos_token }}",
    ),
    "LLaMA 2": marked("{{ bos_token }}[INST] CONTENT [/INST]", ("", ("</s>", "")), space=" "),
    "Mistral 0.3": marked("[INST] CONTENT[/INST]", ("", ("</s>", "")), "{{ bos_token }}", " "),
}
PIECES = [
    "What is it?",
    "def f(x):\n    return x\n",
    "Straße",
    "日本語 🙂",
    "12 345",
    "a  b",
    "\n\n",
    "don't",
    "▁",
    "e\u0301",
    "- x\n- y",
]
WORDS = {"Qwen 3": ["<think>", "</think>", "<tool_call>"], "Qwen 3.5": ["<think>", "</tool_call>"]}


def conversations(name, count=50):
    """Conversations whose contents neither begin nor end with white space.

    Ordinary added words are among them.
    """
    draw, pieces = random.Random(0), PIECES + WORDS.get(name, [])
    for _ in range(count):
        yield [
            {
                "role": role,
                "content": f"x{''.join(draw.choice(pieces) for _ in range(draw.randrange(1, 5)))}y",
            }
            for _ in range(draw.randrange(1, 4))
            for role in ("user", "assistant")
        ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_familys_conversations_are_those_of_transformers(name, tmp_path):
    path = changed(FAMILIES[name](tmp_path), chat_template=TEMPLATES[name])
    tokenizer, template = load_tokenizer(path), load_template(str(path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for turns in conversations(name):
        want = theirs.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = template.tokenize(tokenizer, turns)
        assert ids.tolist() == want["input_ids"], turns
        assert learned.astype(int).tolist() == want["assistant_masks"], turns
