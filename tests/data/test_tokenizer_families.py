"""Tokenizers of published families give the ids of transformers.

Special tokens in the text are among them.
"""

import json

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from data.tokenizer import load_tokenizer
from data.tokenizer.classes import BUILDERS, NOT_READ, OVERRIDDEN, REGISTERED
from tests.data.families import (
    FAMILIES,
    OPENAI,
    gemma_3,
    gpt_2,
    llama_2,
    llama_3,
    olmo,
    phi_3,
    phi_4,
    qwen_2,
    qwen_3,
    qwen_3_5,
    smollm_2,
    texts,
)
from tests.data.family_files import added, decoder_of, write


def both(path):
    return load_tokenizer(path), AutoTokenizer.from_pretrained(path.parent)


def assert_alike(ours, theirs, path, count=200):
    """Ids of texts: special tokens read as such, with what is added around, or as ordinary text."""
    for text in texts(path, count):
        ids = ours.tokenize_special(text)[0]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
        assert [*ours.before, *ids, *ours.after] == theirs(text)["input_ids"], repr(text)
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.tokenize(text) == plain, repr(text)
    assert ours.vocab_size == len(theirs)
    assert theirs.eos_token_id in (ours.eod, None)  # ours is a well-known one if no file names it


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_ids_are_those_of_transformers(name, tmp_path):
    path = FAMILIES[name](tmp_path)
    ours, theirs = both(path)
    assert_alike(ours, theirs, path)


def changed(path, **settings):
    """Write settings into the tokenizer_config.json of a folder; None takes one out."""
    file = path.with_name("tokenizer_config.json")
    config = json.loads(file.read_text()) | settings
    file.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return path


def with_files(path, **files):
    for name, value in files.items():
        path.with_name(f"{name}.json").write_text(json.dumps(value))
    return path


def without(path, *tokens):
    """Take added tokens out of a tokenizer.json."""
    content = json.loads(path.read_text())
    content["added_tokens"] = [
        entry for entry in content["added_tokens"] if entry["content"] not in tokens
    ]
    path.write_text(json.dumps(content))
    return path


def only_the_file(path):
    for name in ("tokenizer_config.json", "config.json"):
        path.with_name(name).unlink()
    return path


def by_decoder(path, **flags):
    return changed(path, added_tokens_decoder=decoder_of(path, **flags))


def flagged(make, **flags):
    return lambda folder: by_decoder(make(folder), **flags)


def of(make, **settings):
    """A family's folder with other settings in its tokenizer_config.json."""
    return lambda folder: changed(make(folder), **settings)


def names_elsewhere(folder):
    path = changed(llama_2(folder), bos_token=None, eos_token=None, unk_token=None)
    names = {
        "bos_token": added("<s>"),
        "eos_token": added("</s>", rstrip=True),
        "unk_token": "<unk>",
    }
    return with_files(path, special_tokens_map=names | {"additional_special_tokens": ["<call>"]})


def pad_beside(folder):
    path = changed(gpt_2(folder), pad_token="<pad>")
    return with_files(path, added_tokens={"<pad>": 1201, "<word>": 1202})


def begun_neox(folder):
    tokens = [added("<|endoftext|>"), added("<|padding|>")]
    config = OPENAI | {"tokenizer_class": "GPTNeoXTokenizer"}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return write(folder, "bytes", tokens, config, "gpt_neox", split=split, begin="<|endoftext|>")


FAST = "PreTrainedTokenizerFast"
END, THINK = "<|im_end|>", "<think>"
KINDS = {
    "LLaMA 2, legacy": of(llama_2, legacy=True),
    "LLaMA 2, legacy false": of(llama_2, legacy=False),
    "LLaMA 2, add_prefix_space false": of(llama_2, add_prefix_space=False),
    "LLaMA 2, add_prefix_space false and legacy": of(llama_2, add_prefix_space=False, legacy=True),
    "LLaMA 2, add_bos_token false": of(llama_2, add_bos_token=False),
    "LLaMA 2, of class LlamaTokenizerFast": of(llama_2, tokenizer_class="LlamaTokenizerFast"),
    "LLaMA 2, of class PreTrainedTokenizerFast": of(llama_2, tokenizer_class=FAST),
    "LLaMA 2, a pad token added": of(llama_2, pad_token="[PAD]"),
    "LLaMA 2, names in special_tokens_map.json alone": names_elsewhere,
    "LLaMA 3, of class LlamaTokenizer": of(llama_3, tokenizer_class="LlamaTokenizer"),
    "GPT-2, add_prefix_space": of(gpt_2, add_prefix_space=True),
    "GPT-2, without a class": lambda folder: gpt_2(folder, tokenizer_class=None),
    "GPT-2, tokenizer.json alone": lambda folder: only_the_file(gpt_2(folder)),
    "GPT-2, tokens in added_tokens.json": pad_beside,
    "Qwen 2, of class PreTrainedTokenizerFast": of(qwen_2, tokenizer_class=FAST),
    "Qwen 3, end token in no tokenizer.json": lambda folder: changed(
        without(qwen_3(folder), END, "</think>"), added_tokens_decoder=None
    ),
    "Qwen 3, tokens in added_tokens_decoder alone": lambda folder: without(
        qwen_3(folder), END, THINK
    ),
    "Qwen 3, extra_special_tokens": of(qwen_3, extra_special_tokens=["<more>", THINK]),
    "Qwen 3.5, of class Qwen2Tokenizer for another model": lambda folder: with_files(
        qwen_3_5(folder), config={"model_type": "llama"}
    ),
    "Gemma 3, of class GemmaTokenizerFast": of(gemma_3, tokenizer_class="GemmaTokenizerFast"),
    "OLMo 2": lambda folder: olmo(folder, "olmo2"),
    "OLMo Hybrid": lambda folder: olmo(folder, "olmo_hybrid"),
    "SmolLM 2, tokens with lstrip by tokenizer_config.json": flagged(smollm_2, lstrip=True),
    "SmolLM 2, tokens with rstrip by tokenizer_config.json": flagged(smollm_2, rstrip=True),
    "Phi-3, tokens without rstrip by tokenizer_config.json": flagged(phi_3, rstrip=False),
    "Phi-4, tokens that are single words": flagged(phi_4, single_word=True),
    "Phi-4, normalized tokens": flagged(phi_4, normalized=True),
    "GPT-NeoX, a token first": begun_neox,
}


OF_THE_PAGE = {
    "LLaMA 2, legacy",
    "LLaMA 2, add_prefix_space false",
    "LLaMA 2, add_bos_token false",
    "LLaMA 2, names in special_tokens_map.json alone",
    "Qwen 2, of class PreTrainedTokenizerFast",
    "SmolLM 2, tokens with lstrip by tokenizer_config.json",
    "Phi-4, tokens that are single words",
    "GPT-2, tokens in added_tokens.json",
    "Qwen 3, end token in no tokenizer.json",
    "LLaMA 2, a pad token added",
}
"""Rows of data_kinds.md, which test_tokenizer_kinds.py compares."""


@pytest.mark.parametrize("name", [name for name in KINDS if name not in OF_THE_PAGE])
def test_settings_beside_a_tokenizer_give_the_ids_of_transformers(name, tmp_path):
    path = KINDS[name](tmp_path)
    assert_alike(*both(path), path, count=100)


@pytest.mark.parametrize(
    "name", ["LLaMA 2, legacy", "SmolLM 2, tokens with lstrip by tokenizer_config.json"]
)
def test_tokenizer_json_alone_gives_other_ids(name, tmp_path):
    """So the comparisons above can fail."""
    path = KINDS[name](tmp_path)
    ours, alone = load_tokenizer(path), Tokenizer.from_file(str(path))
    samples = texts(path)
    assert any(
        ours.tokenize_special(text)[0] != alone.encode(text, add_special_tokens=False).ids
        for text in samples
    )


def test_the_tables_of_classes_are_those_of_transformers():
    from transformers.models.auto import tokenization_auto as auto
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    names = {
        kind: name.removesuffix("Fast")
        for kind, name in auto.TOKENIZER_MAPPING_NAMES.items()
        if name
    }
    ours = {"TokenizersBackend", *BUILDERS}
    # Without the package mistral-common, which has tokenizers of its own.
    theirs = {
        kind: name.replace("MistralCommonBackend", "TokenizersBackend")
        for kind, name in names.items()
    }
    assert {kind: name for kind, name in theirs.items() if name in ours} == REGISTERED
    assert auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == OVERRIDDEN

    for name in set(theirs.values()) - ours:
        kind = auto.tokenizer_class_from_name(name)
        builds = not issubclass(kind, TokenizersBackend) or any(
            "__init__" in part.__dict__
            for part in kind.__mro__[: kind.__mro__.index(TokenizersBackend)]
        )
        assert (name in NOT_READ) == builds, name
    assert not NOT_READ & ours
