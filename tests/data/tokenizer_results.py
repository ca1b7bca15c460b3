"""Results of kinds of tokenizers, each made here: asserted to be right, told or refused."""

import json

import pytest
from tokenizers import Tokenizer, processors

from data.chat.rows import conversation_of
from data.chat.template import load_template
from data.text.begins import check_begins
from data.text.indexed import open_indexed
from data.text.prepare import Request, prepare
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.chat.templates import TEMPLATES, TURNS
from tests.data.families import llama_2, llama_3, phi_3, qwen_3
from tests.data.family_files import added
from tests.data.test_tokenizer_families import (
    KINDS,
    assert_alike,
    both,
    by_decoder,
    changed,
    without,
)
from train.config.derive import beyond_vocabulary


def alike(make):
    """Right: ids are those of transformers."""

    def run(folder):
        path = make(folder)
        assert_alike(*both(path), path, count=100)
        return "right"

    return run


COMPARED = set()
"""Kinds of test_tokenizer_families.py that are rows of the page and compared here alone."""


def alike_to(name):
    COMPARED.add(name)
    return alike(KINDS[name])


def refused(make, field, use=load_tokenizer):
    """Refused: the message names the field."""

    def run(folder):
        with pytest.raises(DataError, match=field):
            use(make(folder))
        return "refused"

    return run


def chat_of(content, role="user", template=TEMPLATES["chatml"]):
    """Tokenize a conversation whose turn has this content."""

    def use(path):
        changed(path, chat_template=template)
        turns = [
            turn | {"content": content} if turn["role"] == role else turn for turn in TURNS[:2]
        ]
        return load_template(str(path)).tokenize(load_tokenizer(path), turns)

    return use


def told_of_more_entries(folder):
    tokenizer = load_tokenizer(llama_2(folder, pad_token="[PAD]"))
    assert beyond_vocabulary(tokenizer.vocab_size - 1, tokenizer.vocab_size).startswith(
        "note: the tokenizer has"
    )
    assert "'[PAD]'" in tokenizer.missing(tokenizer.vocab_size - 1, tokenizer.vocab_size - 1)
    return "told"


def text_prepared(path, **settings):
    source = path.with_name("texts.jsonl")
    if not source.exists():
        source.write_text('{"text": "one"}\n{"text": "two"}\n')
    request = Request(inputs=(str(source),), tokenizer_model=str(path), vocab_size=None, **settings)
    return str(path.with_name("d")), prepare(request, path.with_name("d"), progress=False)[0]


def told_of_older_data(folder):
    path = llama_3(folder)
    prefix, _ = text_prepared(path, add_bos_token="never")
    record = json.loads((folder / "d.json").read_text())
    del record["prepared"]["begin"]
    (folder / "d.json").write_text(json.dumps(record))
    assert check_begins([prefix], load_tokenizer(path)).startswith("note: an older version")
    return "told"


def a_document_with(word, make):
    """Right: the word in a document is ordinary text."""

    def run(folder):
        tokenizer = load_tokenizer(make(folder))
        (token,) = tokenizer.tokenize_special(word)[0]
        ids = tokenizer.document(f"a{word}b")
        assert ids.count(token) == (token == tokenizer.eod)
        assert tokenizer.detokenize(ids[len(tokenizer.before) : -1]) == f"a{word}b"
        return "right"

    return run


def told_apart_later(folder):
    """Files beside tokenizer.json that change ids of data prepared before.

    Those that do not, do not count.
    """
    path = llama_2(folder)
    prefix, _ = text_prepared(path)
    config = path.with_name("tokenizer_config.json")
    before = config.read_text()

    def check():
        tokenizer = load_tokenizer(path)
        open_indexed(prefix).check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
        assert text_prepared(path)[1].documents == 2

    changed(path, model_max_length=77, chat_template="x", pad_token="<unk>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    check()
    for changes in (
        {"added_tokens_decoder": {"2": added("</s>", rstrip=True)}},
        {"eos_token": "<unk>"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"legacy": True},
    ):
        config.write_text(before)
        check()
        changed(path, **changes)
        tokenizer = load_tokenizer(path)
        with pytest.raises(DataError, match=r"files beside tokenizer .*tokenizer_config\.json"):
            open_indexed(prefix).check_tokenizer(
                tokenizer.path, tokenizer.sha256, tokenizer.settings
            )
        with pytest.raises(DataError, match=r"files beside .*tokenizer_config\.json, changed"):
            text_prepared(path)
    return "refused"


def begun(make, begins, **settings):
    """Right: documents begin with the begin token or not."""

    def run(folder):
        path = make(folder)
        _, prepared = text_prepared(path, **settings)
        assert prepared.begin == ([load_tokenizer(path).bos] if begins else [])
        return "right"

    return run


def ends_once(folder):
    """Right: a document ends once, behind another token that the tokenizer puts last."""
    path = llama_3(folder)
    backend = Tokenizer.from_file(str(path))
    names = ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>")
    special = [(name, backend.token_to_id(name)) for name in names]
    begin, end, other = (number for _, number in special)
    for last, after in (("<|eot_id|>", []), ("<|end_of_text|>", [other])):
        backend.post_processor = processors.TemplateProcessing(
            single=f"<|begin_of_text|> $A {last}", special_tokens=special
        )
        backend.save(str(path))
        tokenizer = load_tokenizer(path)
        assert tokenizer.document("a b") == [begin, *tokenizer.tokenize("a b"), *after, end]
    return "right"


def learned_end(folder):
    """Right: the token that ends an answer is learned, though it takes the line break after it."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    path = phi_3(folder)
    ids, learned = chat_of("Hi", template=template)(path)
    tokenizer = load_tokenizer(path)
    text = tokenizer.detokenize(ids[learned].tolist(), special=True)
    assert text.replace(" ", "") == "Hello!<|end|>"
    assert ids.tolist().count(tokenizer.tokenize_special("<|end|>")[0][0]) == 2
    return "right"


def thinking(folder):
    path = qwen_3(folder)
    ids, _ = chat_of("<think>a</think>b", "assistant")(path)
    assert load_tokenizer(path).tokenize_special("<think>")[0][0] in ids
    return "right"


def words(folder):
    """A tokenizer.json of words, whose end token is one of them."""
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "</s>": 2}, "unk_token": "<unk>"}
    path = folder / "tokenizer.json"
    whole = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    path.write_text(json.dumps(whole | {"added_tokens": [{"id": 2} | added("</s>")]}))
    return path


def plain_ends(folder):
    """End tokens whose entries are not special."""
    path = without(qwen_3(folder))
    content = json.loads(path.read_text())
    for entry in content["added_tokens"]:
        entry["special"] = False
    path.write_text(json.dumps(content))
    return by_decoder(changed(path, additional_special_tokens=None), special=False)


def lacking(make, *tokens):
    return lambda folder: changed(
        without(make(folder), *tokens), added_tokens_decoder=None, eos_token="<|endoftext|>"
    )


def told_of_dropped_characters(folder):
    """A BPE of characters, without bytes and without an unknown token.

    transformers drops the others in silence.
    """
    path = folder / "tokenizer.json"
    vocab = {character: number for number, character in enumerate("one tw<|imstar_>du\nH")}
    tokens = [
        {"id": 40 + number} | added(text)
        for number, text in enumerate(("</s>", "<|im_start|>", "<|im_end|>"))
    ]
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
                "added_tokens": tokens,
            }
        )
    )
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(path)
    assert (
        tokenizer.detokenize(tokenizer.tokenize("oneÜ t"), special=True).replace(" ", "") == "onet"
    )
    assert [tokenizer.dropped(text) for text in ("one two", "oneÜ ßt")] == [0, 2]
    assert [tokenizer.dropped("</s>o", special=special) for special in (False, True)] == [
        1,
        0,
    ]  # a slash
    assert text_prepared(path)[1].unknown_tokens == 0
    path.with_name("d.bin").unlink()
    path.with_name("texts.jsonl").write_text('{"text": "one Übel"}\n')
    request = Request(
        inputs=(str(path.with_name("texts.jsonl")),), tokenizer_model=str(path), vocab_size=None
    )
    assert prepare(request, path.with_name("e"), progress=False)[0].unknown_tokens == 3

    source = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    changed(path, chat_template=source)
    for content, dropped in (("one", 0), ("Übel", 1)):
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "two"}]
        encoded = load_template(str(path)).encode(tokenizer, conversation_of(turns))
        assert [
            "characters for which the tokenizer has no token" in note for note in encoded.notes
        ] == [True] * dropped
    return "told"
