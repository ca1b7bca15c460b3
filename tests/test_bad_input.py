"""Bad input gives one message and a failing status on every rank, soon.

Nothing is written over.
"""

import hashlib
import os
import re
import shutil
import sys

import pytest

from data.text import indexed
from data.text.prepare import Request, prepare
from pretrain_gpt import main
from runtime.ranks import run_ranks
from tests import starts
from tests.data.text.corpora import counting_documents, write_documents
from tests.endings import apart, end, refusal
from tests.pretraining import TINY, on_rank
from tests.starts import PATIENCE
from tools.prepare_data import main as prepare_data
from train.callbacks.metrics import METRICS

DOCUMENTS, LENGTH = 40, 60
SMALL = ("--seq-length", "32", "--global-batch-size", "2", "--train-iters", "2")
LASP = (
    "--model-type transnormer --num-query-groups none --context-parallel-size 2 "
    "--context-parallel-method lasp"
)
DIVERGING = "--lr 1e38 --clip-grad 0 --train-iters 30 --lr-decay-style constant"


def scan_ends_only():
    """As in a corpus too large to be read at the start: an id in its middle is met in a batch."""
    indexed.check_indexed.__defaults__ = (100,)


def write(prefix, bad=None):
    """Write documents of ids that fit the tokenizer; document ``bad`` has one id that does not."""
    documents = counting_documents(DOCUMENTS, LENGTH, vocab_size=290)
    if bad is not None:
        documents[bad][LENGTH // 2] = 60_000
    write_documents(prefix, documents)


def scramble(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(range(7, 71)))


def make_bad(root):
    """Write every broken file that the cases name."""
    write(root / "cut_bin")
    os.truncate(root / "cut_bin.bin", 1000)
    write(root / "bad_id", bad=20)
    write(root / "bad_id_valid", bad=DOCUMENTS - 4)
    for name in ("broken", "metrics_broken"):
        shutil.copytree(root / "run", root / name)
    scramble(root / "broken/iter_0000002/__0_0.distcp", 3000)
    lines = (root / "metrics_broken" / METRICS).read_text().splitlines()
    (root / "metrics_broken" / METRICS).write_text(f"{lines[0][:30]}\n{lines[1]}\n")
    (root / "key.toml").write_text("[train]\nseq_len = 32\n")
    (root / "empty").mkdir()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tokenizer, data that go with it and a run of two checkpoints, all good.

    That run has the flags that the cases share, so these fail by nothing but what they add.
    """
    root = tmp_path_factory.mktemp("bad_input")
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text(
        "It was the best of tokens, it was the worst of tokens.\n" * 200
    )
    prepare(Request(inputs=(str(root / "text"),), vocab_size=290), root / "words", progress=False)
    write(root / "good")
    run_ranks(on_rank, 2, flags_of(root, "--save @run --save-interval 1"))
    return root


def flags_of(root, flags=""):
    """A command line that works, and ``flags`` over it, in which @ stands for ``root``."""
    data = ["--data-path", "@good", "--tokenizer-model", "@words.model"]
    return [word.replace("@", f"{root}/") for word in (*TINY, *SMALL, *data, *flags.split())]


def snapshot(root):
    """Hashes of all files by name, but for the caches of sample indices, and the folders."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in root.rglob("*")
        if "cache" not in path.parts and not (path / "cache").is_dir()
    }


CASES = {
    "truncated .bin": (
        "--data-path @cut_bin",
        "cut_bin.bin has 1000 bytes",
        "write the pair again",
    ),
    "token id": ("--data-path @bad_id", "bad_id.bin holds token id 60000", "--tokenizer-model"),
    # One document has it, so that one of the two ranks reads it and the other one does not.
    "token id in a batch": (
        "--data-path @bad_id --train-iters 60",
        "bad_id.bin: sample",
        "60000",
        "290",
    ),
    "token id in a validation batch": (
        "--data-path @bad_id_valid --split 90,10 --eval-interval 1 --eval-iters 3",
        *("bad_id_valid.bin: sample", "60000", "290"),
    ),
    "missing tokenizer on one rank": ("", "no.model", "--tokenizer-model"),
    "another architecture": (
        "--load @run --num-layers 3",
        "iter_0000002",
        "num_layers is 2 in the checkpoint and 3 in this run",
    ),
    "another kind of model": (
        "--load @run --model-type gpt --position-embedding-type rope",
        "a model of model_type llama, but this run's is gpt",
    ),
    "broken named checkpoint": (
        "--load @broken --ckpt-step 2",
        "broken/iter_0000002/__0_0.distcp",
        "SHA-256",
    ),
    "missing checkpoint": (
        "--load @empty --exit-on-missing-checkpoint",
        "empty, which has no checkpoint",
    ),
    "world size": ("--context-parallel-size 3", "context_parallel_size is 3", "multiple of 3"),
    "unknown method": (
        "--context-parallel-method rings",
        "context-parallel-method",
        "rings",
        "zigzag",
    ),
    "unknown key": ("--config @key.toml", "key.toml", "seq_len", "did you mean seq_length"),
    "a run is there": (
        "--save @run",
        "run, but it holds a run",
        "iteration 2",
        "--load",
        "another --save",
    ),
    "metrics are corrupt": (
        "--load @metrics_broken --save @metrics_broken --train-iters 3",
        f"metrics_broken/{METRICS}, line 1",
    ),
    "no wandb": ("--wandb-project x", "wandb_project", "pip install"),
    "TensorBoard cannot be written": ("--tensorboard-dir /proc/events", "/proc/events"),
    "divergence": (
        DIVERGING,
        "10 steps in a row were bad, the last one in iteration 11: the loss was not finite",
    ),
}
"""Command lines of 2 ranks that must fail, and what the message must say."""
BEFORE = {
    "token id in a batch": scan_ends_only,
    "token id in a validation batch": scan_ends_only,
    "no wandb": lambda: sys.modules.update(wandb=None),
}
"""Called on each rank first."""
OF_RANK_1 = {"missing tokenizer on one rank": " --tokenizer-model @no.model"}


def end_cases(rank, world_size, root):
    """A rank that waited for the others in vain would wait for longer than ``run_ranks`` does."""
    endings, defaults, wandb = {}, indexed.check_indexed.__defaults__, sys.modules.get("wandb")
    for name in apart(CASES):
        indexed.check_indexed.__defaults__ = defaults
        BEFORE.get(name, lambda: None)()
        flags = CASES[name][0] + OF_RANK_1.get(name, "") * rank
        endings[name] = end(main, flags_of(root, flags), 2 * PATIENCE)
        if wandb is not None:
            sys.modules["wandb"] = wandb
    return endings


@pytest.fixture(scope="module")
def endings(place):
    """The ending of every case on each of two ranks; they had the same files, and changed none."""
    make_bad(place)
    before = snapshot(place)
    rank_endings = run_ranks(end_cases, 2, place)
    assert snapshot(place) == before
    return rank_endings


@pytest.mark.parametrize("name", CASES)
def test_one_message_names_what_is_wrong(name, endings):
    line = refusal([rank[name] for rank in endings])
    for word in CASES[name][1:]:
        assert word in line


def torchrun(script, arguments):
    """Start two processes as a user does, which must fail in time.

    Return the one line that begins with error:.
    """
    process = starts.ended([*starts.torchrun(2), str(script), *arguments])
    assert process.returncode != 0
    assert 'pretrain_gpt.py", line' not in process.stderr, "no traceback of ours"
    (line,) = (line for line in process.stderr.splitlines() if line.startswith("error:"))
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param("--context-parallel-size 3", "context_parallel_size is 3", id="before"),
        pytest.param(f"{LASP} {DIVERGING}", r"not finite.*lower lr", id="diverged"),
    ],
)
def test_torchrun_ends_all_ranks_before_they_joined_and_where_one_has_a_state_that_is_not_finite(
    flags, words, place, endings
):
    """The rank after that one waits for the state, so the launcher alone can end it.

    It speaks of no lost peer.
    """
    assert re.search(words, torchrun("pretrain_gpt.py", flags_of(place, flags)))


@pytest.mark.parametrize("file_name", ["an empty folder", "a.txt", "a.jsonl"])
def test_what_no_corpus_is_made_of_is_one_line_and_nothing_is_written(file_name, tmp_path, capsys):
    (source := tmp_path / "text").mkdir()
    if file_name.startswith("a."):
        (source / file_name).touch()
        source = source / file_name if file_name == "a.jsonl" else source
    before = snapshot(tmp_path)
    assert (
        prepare_data(["--input", str(source), "--output-prefix", str(tmp_path / "out" / "d")]) == 1
    )
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert str(source) in err
    assert snapshot(tmp_path) == before
