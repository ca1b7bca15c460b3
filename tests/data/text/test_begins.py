"""Documents begin with what the tokenizer adds, in preparation, evaluation and training alike."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data.text.begins import check_begins, recorded_begin
from data.text.config import DataConfig
from data.text.indexed import open_indexed
from data.text.megatron import build_datasets
from data.text.prepare import Request, prepare
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.families import FAMILIES, gemma_3, llama_3, smollm_2
from tools.prepare_data import main as prepare_data

TEXTS = ["A first text.", "And <s> another one", ""]
ADDING = ["LLaMA 2", "LLaMA 3", "Mistral 0.3", "Gemma 3"]
NOT_ADDING = ["SmolLM 2", "OLMo 3", "Qwen 3", "GPT-2"]


def documents(prefix):
    indexed = open_indexed(prefix)
    ids, documents = indexed.token_ids().tolist(), []
    for length in indexed.lengths:
        documents.append(ids[:length])
        ids = ids[length:]
    return documents


def prepared(folder, path, name="d", **settings):
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    inputs = (str(folder / "texts.jsonl"),)
    request = Request(inputs=inputs, tokenizer_model=str(path), vocab_size=None, **settings)
    prepare(request, folder / name, progress=False)
    return str(folder / name)


@pytest.mark.parametrize("name", [*ADDING, *NOT_ADDING])
def test_documents_are_what_transformers_gives_and_the_end_token(name, tmp_path):
    path = FAMILIES[name](tmp_path)
    prefix = prepared(tmp_path, path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    want = [
        [*theirs(text, split_special_tokens=True)["input_ids"], theirs.eos_token_id]
        for text in TEXTS
        if text
    ]
    got = [document for document in documents(prefix) if len(document) > 2]
    assert got == want
    assert recorded_begin(prefix) == ((theirs.bos_token_id,) if name in ADDING else ())


def test_the_flag_adds_or_leaves_out_the_begin_token(tmp_path):
    path = smollm_2(tmp_path)
    tokenizer = load_tokenizer(path)
    always = documents(prepared(tmp_path, path, "always", add_bos_token="always"))
    plain = documents(prepared(tmp_path, path, "plain"))
    assert always == [[tokenizer.bos, *document] for document in plain]
    (tmp_path / "llama").mkdir()
    without = documents(
        prepared(tmp_path, llama_3(tmp_path / "llama"), "never", add_bos_token="never")
    )
    assert without[0][0] != load_tokenizer(tmp_path / "llama" / "tokenizer.json").bos


def older(prefix):
    """The record as it was before documents had begin tokens."""
    file = Path(f"{prefix}.json")
    record = json.loads(file.read_text())
    del record["prepared"]["begin"], record["made_with"]["add_bos_token"]
    file.write_text(json.dumps(record))


def test_older_data_is_told_in_training_and_not_kept_for_a_new_request(tmp_path, capsys):
    path = gemma_3(tmp_path)
    prefix = prepared(tmp_path, path, add_bos_token="never")
    older(prefix)
    assert "without 2 ('<bos>'), which" in check_begins([prefix], load_tokenizer(path))
    build_datasets(DataConfig(data_path=(prefix,), split="1,0,0"), 8, 1, load_tokenizer(path))
    assert "note: an older version of Longmesh prepared the documents of" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"the tokens \[\], but would now begin with \[2\]"):
        prepared(tmp_path, path)


def test_data_of_two_beginnings_is_not_mixed(tmp_path):
    path = gemma_3(tmp_path)
    new, old = (
        prepared(tmp_path, path, "new"),
        prepared(tmp_path, path, "old", add_bos_token="never"),
    )
    config = DataConfig(data_path=(new, old), split="1,0,0")
    with pytest.raises(
        DataError,
        match=r"documents of .*new in data_path begin with 2 \('<bos>'\), but documents of .*old",
    ):
        build_datasets(config, 8, 1, load_tokenizer(path))
    older(old)
    with pytest.raises(DataError, match="begin with no token"):
        build_datasets(config, 8, 1, load_tokenizer(path))


def test_the_flag_is_refused_with_conversations(capsys):
    flags = (
        "--chat --input a --output-prefix b --seq-length 8 --tokenizer-model t "
        "--add-bos-token "
        "always"
    )
    assert prepare_data(flags.split()) == 2
    assert "--add-bos-token is for text" in capsys.readouterr().err
