"""A template that reads all that a conversation may have.

There are tokenizers for other people's templates too.
"""

import json
import re
from pathlib import Path

from tests.data.chat.templates import source_of
from tests.data.test_tokenizer import write_hugging_face

RICH = source_of("rich")
"""ChatML with tools, documents, a variable, names, thoughts and calls."""
SPECIAL = re.compile(
    r"<[|\uff5c][^<>{}'\" ]*[|\uff5c]>|<start_of_turn>|<end_of_turn>|\[/?[A-Z_]+\]"
)


def write_folder(folder, source, tool_use=None):
    """A byte-level tokenizer with the special tokens that a template spells, and the template.

    Returns its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = sorted({"<s>", "</s>", "<|im_start|>", "<|im_end|>", *SPECIAL.findall(source)})
    named = [{"name": "default", "template": source}, {"name": "tool_use", "template": tool_use}]
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": source if tool_use is None else named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(write_hugging_face(folder, *special))


def theirs(path):
    """The tokenizer of transformers of such a folder."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads(Path(path).with_name("tokenizer_config.json").read_text())
    template = config["chat_template"]
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return PreTrainedTokenizerFast(
        tokenizer_file=path, chat_template=template, bos_token="<s>", eos_token="</s>"
    )
