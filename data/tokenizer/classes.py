"""Tokenizer classes of transformers 5.24, as tables and builders.

For the library's general class, tokenizer.json defines the whole tokenizer. The other classes here
take only the vocabulary and the merges from it and build everything else themselves, so a
normalizer or pre-tokenizer in the file has no effect. tests/data/test_tokenizer_families.py
compares tables and ids with the installed transformers.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END = "<|endoftext|>"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_WITH_MARKS = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"

Merges = Sequence[tuple[str, str]]
Builder = Callable[[Mapping[str, int], Merges, Mapping[str, Any]], "Tokenizer"]

_TABLES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_NAMES = {key: frozenset(text.split()) for key, text in _TABLES["names"].items()}
REGISTERED = {kind: name for name, kinds in _TABLES["rebuilt"].items() for kind in kinds.split()}
REGISTERED |= dict.fromkeys(_TABLES["names"]["general"].split(), "TokenizersBackend")
OVERRIDDEN = _NAMES["overridden"]
NOT_READ = frozenset(f"{name}Tokenizer" for name in _NAMES["not_read"])

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "GPTNeoXTokenizer": {
        "unk_token": _END,
        "bos_token": _END,
        "eos_token": _END,
        "pad_token": "<|padding|>",
    },
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "Qwen3_5Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
}
"""Default settings of each class; entries of tokenizer_config.json override them."""


def class_of(
    path: Path, config: Mapping[str, Any], model: Mapping[str, Any], *, has_bytes: bool
) -> str | None:
    """Return the class that rebuilds a tokenizer; None if its tokenizer.json is used as it is.

    The rules are those of transformers' AutoTokenizer, for folders without code.

    Args:
        path: the tokenizer.json, for messages.
        config: its tokenizer_config.json.
        model: the model's config.json.
        has_bytes: True if the tokenizer.json is byte-level, which a LlamaTokenizer is not.

    Raises DataError if tokenizer_class is a class that is not supported here.
    """
    declared_class = config.get("tokenizer_class") or model.get("tokenizer_class")
    model_type = model.get("model_type")
    registered_class = REGISTERED.get(model_type) if isinstance(model_type, str) else None
    name = declared_class if isinstance(declared_class, str) else registered_class
    class_name = (name or "").removesuffix("Fast")

    if class_name == "LlamaTokenizer" and has_bytes and model_type not in OVERRIDDEN:
        return None
    if registered_class == "TokenizersBackend":
        return None
    if registered_class is not None and model_type in OVERRIDDEN:
        return registered_class
    if class_name in NOT_READ:
        raise DataError(
            f"{path.with_name('tokenizer_config.json')} has tokenizer_class {name}, which "
            "transformers builds in a way that is not supported here; set it to "
            f"PreTrainedTokenizerFast if {path.name} alone defines the tokenizer"
        )
    return class_name if class_name in BUILDERS else None


def _llama(vocab: Mapping[str, int], merges: Merges, config: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    scheme = "always" if config.get("legacy") else "first"
    prefix = config.get("add_prefix_space")
    if prefix is not None and not prefix:
        scheme = "never"
    backend = Tokenizer(
        models.BPE(vocab=dict(vocab), merges=list(merges), fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _gemma(vocab: Mapping[str, int], merges: Merges, config: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = config["unk_token"]
    model = models.BPE(
        vocab=dict(vocab),
        merges=list(merges),
        fuse_unk=True,
        unk_token=unknown["content"] if isinstance(unknown, dict) else str(unknown),
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _bytes(vocab: Mapping[str, int], merges: Merges) -> "Tokenizer":
    """Return a byte-level tokenizer without a pre-tokenizer."""
    from tokenizers import Tokenizer, decoders, models

    model = models.BPE(
        vocab=dict(vocab),
        merges=list(merges),
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
    )
    backend = Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2(vocab: Mapping[str, int], merges: Merges, config: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import pre_tokenizers

    backend = _bytes(vocab, merges)
    prefix = bool(config.get("add_prefix_space"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return backend


def _gpt_neox(vocab: Mapping[str, int], merges: Merges, config: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import normalizers

    backend = _gpt2(vocab, merges, config)
    backend.normalizer = normalizers.NFC()
    return backend


def _qwen(pattern: str) -> Builder:
    """Return the builder of tokenizers that split text by this pattern."""

    def build(vocab: Mapping[str, int], merges: Merges, config: Mapping[str, Any]) -> "Tokenizer":
        from tokenizers import Regex, normalizers, pre_tokenizers

        backend = _bytes(vocab, merges)
        backend.normalizer = normalizers.NFC()
        prefix = bool(config.get("add_prefix_space"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
        return backend

    return build


BUILDERS: dict[str, Builder] = {
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "Qwen2Tokenizer": _qwen(_CONTRACTIONS + _WORDS),
    "Qwen3_5Tokenizer": _qwen(_CONTRACTIONS + _WORDS_WITH_MARKS),
}
