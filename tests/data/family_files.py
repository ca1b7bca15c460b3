"""The files of a tokenizer's folder: models, pre-tokenizers, added tokens, configurations."""

import json
from functools import cache

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from data.text.corpus import Corpus, stdlib_files

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def corpus():
    return [
        *Corpus(stdlib_files(), max_bytes=150_000),
        "Straße naïve 日本語 🙂 привет мир " * 20,
        "12 345 6789 " * 20,
    ]


@cache
def trained(kind):
    """The model of a tokenizer, as JSON.

    It is of bytes, or of characters with bytes for those that it lacks.
    """
    backend = Tokenizer(models.BPE())
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN_3_5), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        first, alphabet = [], sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        first = {
            "llama": ["<unk>", "<s>", "</s>", *BYTES],
            "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *BYTES],
        }[kind]
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=400,
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    model = json.loads(backend.to_str())["model"]
    if kind != "bytes":
        model |= {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    return json.dumps(model)


def added(text, **flags):
    """An entry of added_tokens, without its id."""
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {"content": text} | plain | flags


def begins_with(token, number):
    """A post-processor that puts a token first."""
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, number)]
    )


def write(
    folder,
    kind,
    tokens,
    settings,
    model_type,
    *,
    split=None,
    normalizer=None,
    begin=None,
    more=None,
    **files,
):
    """Write a folder of a tokenizer.

    It has tokenizer.json, tokenizer_config.json, config.json and ``files``, by name without .json.
    """
    model = json.loads(trained(kind))
    backend = Tokenizer.from_str(json.dumps({"version": "1.0", "model": model | (more or {})}))
    if split is not None:
        backend.pre_tokenizer = split
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = (
        decoders.ByteLevel()
        if kind == "bytes"
        else decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    )
    content = json.loads(backend.to_str())
    number, entries = len(model["vocab"]), []
    for token in tokens:
        token_id = model["vocab"].get(token["content"])
        entries.append({"id": number if token_id is None else token_id} | token)
        number += token_id is None
    content["added_tokens"] = sorted(entries, key=lambda entry: entry["id"])
    if begin is not None:
        ids = {entry["content"]: entry["id"] for entry in entries}
        ready = Tokenizer.from_str(json.dumps(content))
        ready.post_processor = begins_with(begin, ids[begin])
        content = json.loads(ready.to_str())
    elif kind == "bytes":
        content["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return path


def by_pattern(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def legacy_spaces():
    """The normalizer of LLaMA 2's tokenizer.json."""
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def decoder_of(path, **flags):
    """The added_tokens_decoder that goes with a tokenizer.json, with other flags."""
    entries = json.loads(path.read_text())["added_tokens"]
    return {
        str(entry["id"]): {name: value for name, value in entry.items() if name != "id"} | flags
        for entry in entries
    }
