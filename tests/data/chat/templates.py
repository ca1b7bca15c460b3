"""Five published chat templates, and what each makes of one conversation, by hand."""

import json

from data.chat.conversations import NAMED
from tests.data.test_tokenizer import write_hugging_face

ALTERNATE = "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
TEMPLATES = {
    "chatml": NAMED["chatml"].source,
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
        "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}"
        "{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        + ALTERNATE
        + "{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + "
        "system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}"
        "{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama 3": NAMED["llama3"].source,
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        + ALTERNATE
        + "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif "
        "message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}{% else %}{{ raise_exception('Only "
        "user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
}
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ '<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with the marks of what is generated."""
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
    "<|system|>", "<|assistant|>",
)  # fmt: skip
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
    "mistral": [("<s>[INST] Hi [/INST]", 0), ("Hello!</s>", 1), (" [INST] 2 + 2? [/INST]", 0), ("4</s>", 1), (" ", 0)],
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
    """Write a byte-level tokenizer.json with the special tokens, and a tokenizer_config.json; return its path."""
    folder.mkdir(exist_ok=True)
    config = TOKENS | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(write_hugging_face(folder, *SPECIAL, merges=merges))
