"""The command line of tools/prepare_data.py, started as a user does."""

import json
import os
import sys

import numpy as np
import pytest

from data.tokenizer import load_tokenizer
from tests.data.chat.templates import TEMPLATES, TURNS, write_tokenizer
from tests.data.text.corpora import write_pair
from tests.starts import ended
from tools.common.inspect_data import LONGER, share_lines, shares
from tools.prepare_data import main


def write_text(folder, documents=20):
    folder.mkdir()
    for i in range(documents):
        (folder / f"{i}.txt").write_text(
            f"It was the {i}th of many short stories about tokens.\n" * 30
        )
    return folder


def test_writes_then_keeps_then_refuses(tmp_path, capsys):
    text = write_text(tmp_path / "text")
    flags = ["--input", str(text), "--output-prefix", str(tmp_path / "d")]
    assert main([*flags, "--vocab-size", "320"]) == 0
    wrote = capsys.readouterr().out
    assert "20 documents" in wrote
    assert "bytes per token, unigram entropy" in wrote
    assert f"--tokenizer-model {tmp_path / 'd'}.model" in wrote
    (tmp_path / "d" / "cache").mkdir(parents=True)  # as a run on these files leaves it
    assert main([*flags, "--vocab-size", "320"]) == 0
    assert capsys.readouterr().out == wrote.replace("wrote", "kept")
    assert main([*flags, "--vocab-size", "330"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "--overwrite" in error
    assert main([*flags, "--vocab-size", "330", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--chat --input x --output-prefix y", "--chat needs --seq-length;"),
        ("--chat --output-prefix y", "--chat needs --input and --seq-length;"),
        ("--input none --output-prefix d", "input none does not exist; check the path\n"),
        ("--check none", "none.idx does not exist; check the path"),
        (
            "--input x --output-prefix .",
            "--output-prefix is ., but that is a folder; give ./NAME to write into it\n",
        ),
    ],
)
def test_the_line_names_what_is_wrong(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(flags.split()) in (1, 2)
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


CONTRADICTING = """
    --input x | --stdlib --input x | --tokenizer-model t.model --vocab-size 300 | --max-bytes 0
    --vocab-size -3
    --workers 0 | --inspect 2 | --check x --stdlib | --check x --whole
    --chat --input x --output-prefix y --seq-length 8 | --input x --output-prefix y --too-long split
    --chat --input x --output-prefix y --seq-length 8 --chat-template mine.jinja
    --input x --output-prefix y --strict
"""


@pytest.mark.parametrize("flags", CONTRADICTING.replace("|", "\n").strip().splitlines())
def test_contradicting_flags(flags):
    assert main(flags.split()) == 2


def test_conversations_are_prepared_checked_and_shown(tmp_path, capsys):
    tokenizer, source = write_tokenizer(tmp_path / "t", TEMPLATES["zephyr"]), tmp_path / "in.jsonl"
    source.write_text((json.dumps({"messages": TURNS}) + "\n") * 3 + "{\n")
    flags = [
        "--chat",
        "--input",
        str(source),
        "--output-prefix",
        f"{tmp_path}/c",
        "--tokenizer-model",
        tokenizer,
    ]
    assert main([*flags, "--seq-length", "128"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {source}, line 4: not JSON")
    assert main([*flags, "--seq-length", "128", "--skip-refused"]) == 0
    out = capsys.readouterr().out
    assert "4 conversations read: 3 kept whole, 0 split, 0 truncated, 1 refused" in out
    assert f"listed in {tmp_path}/c.refused.txt" in out
    assert "--sft --seq-length 128" in out
    assert main(["--check", f"{tmp_path}/c", "--tokenizer-model", tokenizer, "--inspect", "1"]) == 0
    out = capsys.readouterr().out
    prefix = "c: 3 conversations, 93 tokens (uint16), packed into 1 samples of up to 93 tokens"
    assert f"{prefix}, 0.00% padding to the longest; " in out
    assert "<|assistant|>\n⟦Hello!</s>⟧\n<|user|>\n2 + 2?</s>\n<|assistant|>\n⟦4</s>⟧\n" in out
    assert out.count("=== sample") == 1


def test_what_nothing_reads_is_said_once_a_key(tmp_path, capsys):
    tokenizer, source = write_tokenizer(tmp_path / "t", TEMPLATES["zephyr"]), tmp_path / "in.jsonl"
    source.write_text((json.dumps({"messages": TURNS, "persona": "a poet", "id": 1}) + "\n") * 3)
    flags = [
        "--chat",
        "--input",
        str(source),
        "--tokenizer-model",
        tokenizer,
        "--seq-length",
        "128",
    ]
    assert main([*flags, "--output-prefix", f"{tmp_path}/c"]) == 0
    assert (
        capsys.readouterr().out.count("3 conversations have the row's persona, which nothing reads")
        == 1
    )
    assert main([*flags, "--output-prefix", f"{tmp_path}/d", "--strict"]) == 1
    assert "line 1: has the row's persona, which nothing reads" in capsys.readouterr().err
    assert not list(tmp_path.glob("d*"))


def test_a_tokenizer_is_trained_for_a_template_by_name(tmp_path, capsys):
    source, prefix = tmp_path / "in.jsonl", f"{tmp_path}/c"
    source.write_text((json.dumps({"messages": TURNS}) + "\n") * 30)
    flags = [
        "--input",
        str(source),
        "--output-prefix",
        prefix,
        "--seq-length",
        "128",
        "--vocab-size",
        "264",
    ]
    assert main(["--chat", *flags, "--chat-template", "chatml"]) == 0
    out = capsys.readouterr().out
    assert f"--tokenizer-model {prefix}_tokenizer/tokenizer.json --sft" in out
    assert main(["--check", prefix, "--inspect", "1"]) == 0
    assert "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n" in capsys.readouterr().out


def test_long_texts_are_shown_abridged_with_the_lengths_of_conversations(tmp_path, capsys):
    tokenizer, source = write_tokenizer(tmp_path / "t", TEMPLATES["zephyr"]), tmp_path / "in.jsonl"
    long = [{"role": "user", "content": "a" * 800}, {"role": "assistant", "content": "b" * 100}]
    source.write_text(2 * (json.dumps({"messages": long}) + "\n"))
    flags = [
        "--input",
        str(source),
        "--output-prefix",
        f"{tmp_path}/c",
        "--tokenizer-model",
        tokenizer,
    ]
    assert main(["--chat", *flags, "--seq-length", "3000"]) == 0
    capsys.readouterr()
    shows = ["--check", f"{tmp_path}/c", "--tokenizer-model", tokenizer, "--inspect", "1"]
    assert main(shows) == 0
    out = capsys.readouterr().out
    assert (
        f"<|user|>\n{'a' * 391}\n... 133 of 933 characters left out; --whole shows them ...\naaa"
        in out
    )
    assert "--- conversation 1 of 2" in out, "the sample is to be longer than 1,024 tokens"
    assert "tokens in conversations longer than\n    1,024   0.00%" in out
    assert main([*shows, "--whole"]) == 0
    assert f"{'a' * 800}</s>\n<|assistant|>\n⟦{'b' * 100}</s>⟧\n" in capsys.readouterr().out


def test_text_that_the_tokenizer_does_not_know_is_told(tmp_path, capsys):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"</s>": 0, "<unk>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text, is_told in (("one two three two", True), ("one two two", False)):
        (tmp_path / "text.txt").write_text(text)
        words = ["--input", str(tmp_path / "text.txt"), "--suffix", ".txt", "--tokenizer-model"]
        assert (
            main(
                [
                    *words,
                    str(tmp_path / "tokenizer.json"),
                    "--output-prefix",
                    str(tmp_path / str(is_told)),
                ]
            )
            == 0
        )
        assert (
            "warning: the tokenizer does not know 1 pieces of the text (20.00% of 5 tokens)"
            in capsys.readouterr().out
        ) == is_told


def test_a_prefix_of_text_is_checked_whole(tmp_path, capsys):
    text = write_text(tmp_path / "text", 3)
    assert (
        main(["--input", str(text), "--output-prefix", f"{tmp_path}/d", "--vocab-size", "320"]) == 0
    )
    capsys.readouterr()
    assert main(["--check", f"{tmp_path}/d", "--inspect", "2"]) == 0
    out = capsys.readouterr().out
    assert "3 documents" in out
    assert out.count("=== document") == 2
    assert "many short stories about tokens.\n" in out
    assert out.endswith(
        "    1,024   0.00%\n    4,096   0.00%\n   32,768   0.00%\n  131,072   0.00%\n"
    )
    with open(f"{tmp_path}/d.bin", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x05\x00")
    assert main(["--check", f"{tmp_path}/d"]) == 1
    assert "1 documents that do not end with" in capsys.readouterr().err


def test_a_pair_of_megatrons_without_ends_is_told_and_its_sentences_are_one_document(
    tmp_path, capsys
):
    text = write_text(tmp_path / "text", 3)
    assert (
        main(["--input", str(text), "--output-prefix", f"{tmp_path}/d", "--vocab-size", "320"]) == 0
    )
    tokenizer = load_tokenizer(tmp_path / "d.model")
    sentences = [
        [tokenizer.tokenize(text) for text in ("One. ", "Two. ", "Three.")],
        [tokenizer.tokenize("Four.")],
    ]
    write_pair(tmp_path / "m", sentences)
    capsys.readouterr()
    assert (
        main(
            [
                "--check",
                f"{tmp_path}/m",
                "--tokenizer-model",
                f"{tmp_path}/d.model",
                "--inspect",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "2 documents" in out
    assert "2 of them do not end with the tokenizer's end-of-document token" in out
    assert out.count("=== document") == 2
    assert "One. Two. Three.\n" in out


def test_help_waits_for_nothing_large():
    """These imports make the help slow, on any machine."""
    code = (
        "import runpy, sys; sys.argv = ['prepare_data', '--help']\n"
        "try:\n    runpy.run_module('tools.prepare_data', run_name='__main__')\n"
        "finally:\n    print('LOADED', {'torch', 'numpy', 'sentencepiece'} & set(sys.modules))"
    )
    run = ended([sys.executable, "-c", code])
    assert "--output-prefix" in run.stdout, run.stderr
    assert run.stdout.endswith("LOADED set()\n")


def test_shares_of_long_documents_are_those_of_counting():
    lengths = np.random.default_rng(0).integers(0, 200_000, 300).astype(np.int32)
    lengths[:4] = LONGER  # a document of just so many tokens is not longer
    longer = np.array([0, 1, *LONGER, 199_999, 10**6])
    want = [
        sum(int(length) for length in lengths if length > limit) / int(lengths.sum())
        for limit in longer
    ]
    assert np.allclose(shares(lengths, longer), want, rtol=0, atol=1e-12)
    assert list(share_lines(np.array([1024, 1025, 5000, 92951]), "document")) == [
        "tokens in documents longer than",
        "    1,024  98.98% ████████████████████████████████████████",
        "    4,096  97.95% ███████████████████████████████████████",
        "   32,768  92.95% █████████████████████████████████████",
        "  131,072   0.00%",
    ]
