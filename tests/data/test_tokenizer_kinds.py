"""Kinds of tokenizers that people have: each is right, told or refused, as the page says."""

import pytest

from data.tokenizer import load_tokenizer
from tests.data import kinds
from tests.data.families import (
    FAMILIES,
    gpt_2,
    llama_2,
    llama_3,
    qwen_2,
    qwen_3,
    smollm_2,
)
from tests.data.test_tokenizer_families import (
    OF_THE_PAGE,
    changed,
    with_files,
    without,
)
from tests.data.tokenizer_results import (
    COMPARED,
    a_document_with,
    alike,
    alike_to,
    begun,
    chat_of,
    ends_once,
    lacking,
    learned_end,
    plain_ends,
    refused,
    text_prepared,
    thinking,
    told_apart_later,
    told_of_dropped_characters,
    told_of_more_entries,
    told_of_older_data,
    words,
)

TABLE = [
    (
        "LLaMA 2's tokenizer, whose class ignores the normalizer of its tokenizer.json",
        alike(llama_2),
    ),
    ("`legacy` true or false", alike_to("LLaMA 2, legacy")),
    ("`add_prefix_space` true or false", alike_to("LLaMA 2, add_prefix_space false")),
    (
        "`add_bos_token` that contradicts tokenizer.json, which decides",
        alike_to("LLaMA 2, add_bos_token false"),
    ),
    ("a class that builds its own pre-tokenizer, such as Qwen2Tokenizer", alike(qwen_2)),
    (
        "a class that the model's type overrides",
        alike_to("Qwen 2, of class PreTrainedTokenizerFast"),
    ),
    (
        "`added_tokens_decoder` with other flags than tokenizer.json",
        alike_to("SmolLM 2, tokens with lstrip by tokenizer_config.json"),
    ),
    ("tokens with `rstrip` or `lstrip`, in text", alike(FAMILIES["Phi-4"])),
    ("tokens with `rstrip` around turns: which tokens are learned", learned_end),
    ("tokens with `single_word` or `normalized`", alike_to("Phi-4, tokens that are single words")),
    (
        "special tokens named in special_tokens_map.json alone",
        alike_to("LLaMA 2, names in special_tokens_map.json alone"),
    ),
    ("tokens in added_tokens.json", alike_to("GPT-2, tokens in added_tokens.json")),
    (
        "an end token that only tokenizer_config.json names",
        alike_to("Qwen 3, end token in no tokenizer.json"),
    ),
    ("a pad token added to the vocabulary", alike_to("LLaMA 2, a pad token added")),
    ("more entries than the model's vocabulary", told_of_more_entries),
    (
        "characters for which a BPE has no token, not even an unknown token",
        told_of_dropped_characters,
    ),
    ("a tokenizer that puts a begin token first", begun(llama_3, True)),
    ("a tokenizer that has a begin token but does not put it first", begun(smollm_2, False)),
    (
        "such a tokenizer with `--add-bos-token always`",
        begun(smollm_2, True, add_bos_token="always"),
    ),
    ("`--add-bos-token never`", begun(llama_3, False, add_bos_token="never")),
    (
        "`--add-bos-token always` without a begin token",
        refused(
            qwen_3,
            'add_bos_token is "always"',
            lambda path: text_prepared(path, add_bos_token="always"),
        ),
    ),
    (
        "documents that an older version of Longmesh prepared without begin tokens",
        told_of_older_data,
    ),
    ("a tokenizer that puts an end token last: one per document", ends_once),
    ("a special token in a document", a_document_with("<|im_start|>", qwen_3)),
    (
        "an end token whose entry has `special` false, in a document",
        a_document_with("<|im_end|>", plain_ends),
    ),
    (
        "an end token whose entry has `special` false, in a turn",
        refused(plain_ends, "'<.im_end.>' in its content", chat_of("a<|im_end|>b")),
    ),
    (
        "a token that begins turns, whose entry has `special` false, in a turn",
        refused(
            plain_ends, "'<.im_start.>' in its content", chat_of("a<|im_start|>b", "assistant")
        ),
    ),
    (
        "an end token named in generation_config.json, in a turn",
        refused(
            lambda folder: with_files(qwen_3(folder), generation_config={"eos_token_id": [1205]}),
            "'</tool_call>' in its content",
            chat_of("a</tool_call>b"),
        ),
    ),
    ("ordinary added words such as `<think>` in a turn", thinking),
    (
        "a template whose turns end with no token of the tokenizer",
        refused(lacking(qwen_3, "<|im_end|>"), "ends a turn with '<.im_end.>'", chat_of("Hi")),
    ),
    (
        "a document in which the end token is also an ordinary word",
        refused(
            words, "a text contains '</s>'", lambda path: load_tokenizer(path).tokenize("a </s>")
        ),
    ),
    (
        "flags, class or end tokens changed in tokenizer_config.json after the data was prepared",
        told_apart_later,
    ),
    (
        "`auto_map`: a tokenizer with its own code",
        refused(
            lambda folder: gpt_2(folder, auto_map={"AutoTokenizer": [None, "code.Own"]}), "auto_map"
        ),
    ),
    (
        "`split_special_tokens`",
        refused(lambda folder: gpt_2(folder, split_special_tokens=True), "split_special_tokens"),
    ),
    (
        "`fix_mistral_regex`",
        refused(lambda folder: gpt_2(folder, fix_mistral_regex=True), "fix_mistral_regex"),
    ),
    (
        "a class that Longmesh cannot rebuild, such as T5Tokenizer",
        refused(
            lambda folder: gpt_2(folder, tokenizer_class="T5Tokenizer"),
            "tokenizer_class T5Tokenizer",
        ),
    ),
    (
        "a tokenizer of whole words with the tokenizer_class of a BPE",
        refused(
            lambda folder: with_files(
                words(folder), tokenizer_config={"tokenizer_class": "LlamaTokenizer"}
            ),
            "tokenizer_class LlamaTokenizer",
        ),
    ),
    (
        "an invalid `added_tokens_decoder`",
        refused(
            lambda folder: gpt_2(folder, added_tokens_decoder={"x": 1}), "added_tokens_decoder"
        ),
    ),
    (
        "a tokenizer without an end token",
        refused(
            lambda folder: changed(
                without(gpt_2(folder, tokenizer_class="TokenizersBackend"), "<|endoftext|>"),
                bos_token=None,
                eos_token=None,
                unk_token=None,
            ),
            "no end-of-text token",
        ),
    ),
]


@pytest.mark.parametrize("name", [name for name, _ in TABLE])
def test_a_kind_gives_what_the_page_says(name, tmp_path):
    result = dict(TABLE)[name](tmp_path)
    assert (name, result) in kinds.rows_of_page("Tokenizers")


def test_the_page_lists_these_kinds():
    assert COMPARED == OF_THE_PAGE
    results = dict(kinds.rows_of_page("Tokenizers"))
    kinds.check_page("Tokenizers", [(name, results.get(name, "right")) for name, _ in TABLE])
