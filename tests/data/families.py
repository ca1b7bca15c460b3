"""Small folders of tokenizers, built as those of published families are."""

import json
import random

from tokenizers import (
    normalizers,
    pre_tokenizers,
)

from tests.data.family_files import (
    LLAMA_3,
    QWEN_2,
    QWEN_3_5,
    added,
    by_pattern,
    decoder_of,
    legacy_spaces,
    write,
)

SENTENCES = [added("<unk>"), added("<s>"), added("</s>")]
ENDED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN = [
    *(added(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")),
    *(
        added(text, special=False)
        for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
]
QWEN_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
}
OPENAI = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def llama_2(folder, **settings):
    config = (
        ENDED
        | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
        | settings
    )
    return write(
        folder, "llama", SENTENCES, config, "llama", normalizer=legacy_spaces(), begin="<s>"
    )


def llama_3(folder):
    tokens = [
        added(f"<|{name}|>")
        for name in ("begin_of_text", "end_of_text", "start_header_id", "eot_id")
    ]
    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return write(
        folder,
        "bytes",
        tokens,
        config,
        "llama",
        split=by_pattern(LLAMA_3),
        begin="<|begin_of_text|>",
        more={"ignore_merges": True},
        generation_config={"eos_token_id": [1201, 1203]},
    )


def mistral_1(folder):
    config = ENDED | {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    return write(
        folder, "llama", SENTENCES, config, "mistral", normalizer=legacy_spaces(), begin="<s>"
    )


def mistral_3(folder):
    tokens = [*SENTENCES, added("[INST]"), added("[/INST]"), added("[TOOL_CALLS]")]
    config = ENDED | {
        "tokenizer_class": "LlamaTokenizer",
        "add_prefix_space": True,
        "legacy": False,
    }
    split = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return write(folder, "llama", tokens, config, "mistral", split=split, begin="<s>")


def mistral_nemo(folder):
    tokens = [*SENTENCES, added("[INST]"), added("[/INST]")]
    config = ENDED | {"tokenizer_class": "PreTrainedTokenizerFast"}
    return write(
        folder,
        "bytes",
        tokens,
        config,
        "mistral",
        split=by_pattern(QWEN_2),
        begin="<s>",
        more={"ignore_merges": True},
    )


def qwen_2(folder):
    config = QWEN_CONFIG | {"add_prefix_space": False, "bos_token": None, "unk_token": None}
    path = write(
        folder,
        "bytes",
        QWEN[:3],
        config,
        "qwen2",
        split=by_pattern(QWEN_2),
        normalizer=normalizers.NFC(),
    )
    config["added_tokens_decoder"] = decoder_of(path)
    config["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def qwen_3(folder):
    path = write(
        folder,
        "bytes",
        QWEN,
        QWEN_CONFIG,
        "qwen3",
        split=by_pattern(QWEN_2),
        normalizer=normalizers.NFC(),
    )
    config = QWEN_CONFIG | {"added_tokens_decoder": decoder_of(path)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def qwen_3_5(folder):
    return write(
        folder,
        "bytes",
        QWEN,
        QWEN_CONFIG,
        "qwen3_5_text",
        split=by_pattern(QWEN_3_5),
        normalizer=normalizers.NFC(),
    )


def gemma_3(folder):
    names = ("<pad>", "<eos>", "<bos>", "<unk>")
    tokens = [
        *(added(text) for text in names),
        added("<mask>", special=False),
        *(added(text, special=False) for text in ("\n\n", "\n\n\n", "▁▁", "▁▁▁")),
        added("<start_of_turn>"),
        added("<end_of_turn>"),
        added("<image_soft_token>"),
    ]
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    config |= {"unk_token": "<unk>", "add_bos_token": True, "image_token": "<image_soft_token>"}
    path = write(
        folder,
        "gemma",
        tokens,
        config,
        "gemma3_text",
        normalizer=normalizers.Replace(" ", "▁"),
        begin="<bos>",
        split=pre_tokenizers.Split(" ", "merged_with_previous"),
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"added_tokens_decoder": decoder_of(path)})
    )
    return path


def olmo(folder, model_type="olmo3"):
    tokens = [
        added("<|pad|>"),
        added("<|endoftext|>"),
        added("<functions>", special=False),
        added("<|im_end|>"),
    ]
    config = OPENAI | {
        "tokenizer_class": "GPT2Tokenizer",
        "pad_token": "<|pad|>",
        "add_prefix_space": False,
    }
    return write(folder, "bytes", tokens, config, model_type, split=by_pattern(LLAMA_3))


def gpt_2(folder, **settings):
    config = OPENAI | {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024} | settings
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return write(
        folder, "bytes", [added("<|endoftext|>", normalized=True)], config, "gpt2", split=split
    )


def smollm_2(folder):
    tokens = [
        added(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
    ]
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    config |= {
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
    }
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return write(folder, "bytes", tokens, config, "llama", split=split)


def phi_3(folder):
    """Phi-3's: after its tokens white space is taken.

    tokenizer_config.json says so of one of which the other file does not.
    """
    turns = [added(f"<|{name}|>", rstrip=True) for name in ("user", "assistant", "end", "system")]
    tokens = [
        added("<unk>"),
        added("<s>"),
        added("</s>", rstrip=True),
        added("<|endoftext|>"),
        *turns,
    ]
    config = ENDED | {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": "<|endoftext|>",
        "legacy": False,
    }
    path = write(folder, "llama", tokens, config, "phi3", normalizer=legacy_spaces())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"added_tokens_decoder": decoder_of(path)})
    )
    return path


def phi_4(folder):
    names = ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>")
    tokens = [added(text, lstrip=True, rstrip=True) for text in names]
    config = OPENAI | {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<|endoftext|>"}
    path = write(folder, "bytes", tokens, config, "phi3", split=by_pattern(LLAMA_3))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"added_tokens_decoder": decoder_of(path)})
    )
    return path


def gpt_neox(folder):
    tokens = [
        added("<|endoftext|>"),
        added("<|padding|>"),
        added("  ", normalized=True, special=False),
    ]
    config = OPENAI | {"tokenizer_class": "GPTNeoXTokenizer", "pad_token": "<|padding|>"}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return write(
        folder, "bytes", tokens, config, "gpt_neox", split=split, normalizer=normalizers.NFC()
    )


FAMILIES = {
    "LLaMA 2": llama_2,
    "LLaMA 3": llama_3,
    "Mistral 0.1": mistral_1,
    "Mistral 0.3": mistral_3,
    "Mistral NeMo": mistral_nemo,
    "Qwen 2": qwen_2,
    "Qwen 3": qwen_3,
    "Qwen 3.5": qwen_3_5,
    "Gemma 3": gemma_3,
    "OLMo 3": olmo,
    "GPT-2": gpt_2,
    "SmolLM 2": smollm_2,
    "Phi-3": phi_3,
    "Phi-4": phi_4,
    "GPT-NeoX": gpt_neox,
}


def texts(path, count=200):
    """Texts of code, words, digits, white space and many scripts, with special tokens in them."""
    names = [entry["content"] for entry in json.loads(path.read_text())["added_tokens"]]
    pieces = [
        "def f(x):\n    return x ** 2\n",
        "Straße",
        "naïve",
        "e\u0301",
        "日本語",
        "🙂",
        "привет",
        "12345",
        " 7 ",
        "3.14",
        "don't",
        "DON'T",
        "\t",
        "\n",
        "\n\n",
        "   ",
        " ",
        "▁",
        "<0x41>",
        "\u00a0",
        "\u2028",
        "ﬁ",
        "नमस्ते",
        "a" * 40,
        "<|",
        "|>",
        "</",
        "\r\n",
        "hello",
        " world",
        "<|im_end",
        "s>",
        "\ufeff",
    ]
    draw = random.Random(0)
    lines = [
        "",
        " ",
        "  leading",
        "\n",
        " \n x",
        "trailing  ",
        *names,
        *(f" {name} x" for name in names),
    ]
    while len(lines) < count:
        lines.append(
            "".join(draw.choice(draw.choice([pieces, names])) for _ in range(draw.randrange(1, 12)))
        )
    return lines[:count]
