"""Five published chat templates, and what each makes of one conversation, by hand."""

import json
from pathlib import Path

from data.chat.conversations import NAMED
from tests.data.test_tokenizer import write_hugging_face

FOLDER = Path(__file__).with_name("jinja")


def source_of(name):
    """A template of the folder jinja."""
    path = FOLDER / f"{name.replace(' ', '_')}.jinja"
    return path.read_text(encoding="utf-8").removesuffix("\n")


TEMPLATES = {
    "chatml": NAMED["chatml"].source,
    "llama 2": source_of("llama 2"),
    "llama 3": NAMED["llama3"].source,
    "mistral": source_of("mistral"),
    "zephyr": source_of("zephyr"),
}
MARKED = source_of("marked")
"""ChatML with the marks of what is generated."""
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|user|>",
    "<|system|>",
    "<|assistant|>",
)
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
BY_HAND = {
    "chatml": [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
        ("Hello!<|im_end|>", 1),
        ("\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("4<|im_end|>", 1),
        ("\n", 0),
    ],
    "llama 2": [
        ("<s>[INST] Hi [/INST]", 0),
        (" Hello! </s>", 1),
        ("<s>[INST] 2 + 2? [/INST]", 0),
        (" 4 </s>", 1),
    ],
    "llama 3": [
        ("<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", 0),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
        ("Hello!<|eot_id|>", 1),
        ("<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>", 0),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
        ("4<|eot_id|>", 1),
    ],
    "mistral": [
        ("<s>[INST] Hi [/INST]", 0),
        ("Hello!</s>", 1),
        (" [INST] 2 + 2? [/INST]", 0),
        ("4</s>", 1),
        (" ", 0),
    ],
    "zephyr": [
        ("<|user|>\nHi</s>\n<|assistant|>\n", 0),
        ("Hello!</s>", 1),
        ("\n<|user|>\n2 + 2?</s>\n<|assistant|>\n", 0),
        ("4</s>", 1),
        ("\n", 0),
    ],
}
"""Pieces of the text, and whether they are learned."""


def write_tokenizer(folder, template, merges=()):
    """Write a byte-level tokenizer.json with the special tokens, and a tokenizer_config.json.

    Return its path.
    """
    folder.mkdir(exist_ok=True)
    config = TOKENS | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(write_hugging_face(folder, *SPECIAL, merges=merges))
