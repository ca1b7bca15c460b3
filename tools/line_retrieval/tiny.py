"""A tiny LLaMA or Qwen3.5 of random weights, in a folder that transformers wrote; its tokens are words of short lines.

A name, a value and the end of a line are a token each. By its chat template a question ends with the name that it asks
for, so that the answer is what followed that name before: what two layers can learn.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.hf.shards import new_folder
from runtime.errors import UserError
from tools.line_retrieval.lines import ADJECTIVES, NOUNS, VALUES

HEADS = 4
UNKNOWN, USER, END = "<|unknown|>", "<|user|>", "<|end|>"
OF_FILE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def write_model(
    folder: Path,
    hidden_size: int,
    seed: int,
    words: Callable[[], Any] | None = None,
    model_type: str = "llama",
    **shape: Any,
) -> str:
    """Write model, tokenizer and chat template; return what was written. Raises UserError if the folder exists.

    ``words`` makes the `tokenizers.Tokenizer`, by default ``tokenizer_of_words``; ``shape`` is more of the family's
    configuration.
    """
    if hidden_size % (2 * HEADS):
        raise UserError(
            f"hidden_size is {hidden_size}; it must be a multiple of {2 * HEADS}: {HEADS} heads, even for rope"
        )
    import torch

    try:
        from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig
    except ImportError as error:
        raise UserError(
            "a model is written by transformers: pip install transformers (make venv EXTRAS=dev)"
        ) from error
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=(words or tokenizer_of_words)(),
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER],
    )
    tokenizer.chat_template = OF_FILE["template"]
    torch.manual_seed(seed)
    kind: Any
    kind, own = (Qwen3_5TextConfig, OF_FILE["hybrid"]) if model_type == "qwen3_5" else (LlamaConfig, {})
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **{"num_attention_heads": HEADS, **own},
        **shape,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    with new_folder(folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return f"wrote {folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens"


def tokenizer_of_words() -> Any:
    """Return a `tokenizers.Tokenizer` of the short lines' words."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    names = (f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS)
    words = [UNKNOWN, USER, END, "\n", *VALUES, *names]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("?", "removed"),
            pre_tokenizers.Split(Regex(r" (?=\S+\n)"), "removed"),  # before a line's last word, its value
            pre_tokenizers.Split("; ", "removed"),
            pre_tokenizers.Split("\n", "isolated"),
        ]
    )
    return tokenizer
