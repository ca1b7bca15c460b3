"""Broken files for tests/test_bad_input.py."""

import os
import shutil

import numpy as np

from checkpoint.manifest import read_manifest
from tests.data.text.corpora import counting_documents, write_documents
from tests.parallel.tiny import rewrite_manifest
from train.watching.metrics import METRICS

DOCUMENTS, LENGTH = 40, 60


def write(prefix, bad=None):
    """Write documents of ids that fit the tokenizer; document ``bad`` has one id that does not."""
    documents = counting_documents(DOCUMENTS, LENGTH, vocab_size=290)
    if bad is not None:
        documents[bad][LENGTH // 2] = 60_000
    write_documents(prefix, documents)


def cut(path, size):
    os.truncate(path, size)


def scramble(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(range(7, 71)))


def make_bad(root):
    """Write every broken file that the cases name."""
    for name in ("cut_bin", "cut_idx", "cut_header", "no_magic", "pointers"):
        write(root / name)
    cut(root / "cut_bin.bin", 1000)
    cut(root / "cut_idx.idx", 300)
    cut(root / "cut_header.idx", 20)
    scramble(root / "no_magic.idx", 0)
    scramble(root / "pointers.idx", 34 + 4 * DOCUMENTS + 80)
    write(root / "bad_id", bad=20)
    write(root / "bad_id_valid", bad=DOCUMENTS - 4)
    write(root / "lone_bin")
    (root / "lone_bin.idx").unlink()
    np.full(1000, 7, np.uint8).tofile(root / "damaged.model")
    for name in ("broken", "all_broken", "metrics_broken", "fifo", "endless", "locked"):
        shutil.copytree(root / "run", root / name)
    (root / "fifo/iter_0000002/manifest.json").unlink()
    os.mkfifo(root / "fifo/iter_0000002/manifest.json")
    extra = read_manifest(root / "endless/iter_0000002").extra
    extra["progress"]["consumed_samples"] = 2**70
    rewrite_manifest(root / "endless/iter_0000002", extra=extra)
    (root / "locked/.lock").mkdir()
    for folder in ("broken/iter_0000002", "all_broken/iter_0000001", "all_broken/iter_0000002"):
        scramble(root / folder / "__0_0.distcp", 3000)
    lines = (root / "metrics_broken" / METRICS).read_text().splitlines()
    (root / "metrics_broken" / METRICS).write_text(f"{lines[0][:30]}\n{lines[1]}\n")
    (root / "key.toml").write_text("[train]\nseq_len = 32\n")
    (root / "type.toml").write_text('[optimizer]\nlr = "high"\n')
    (root / "method.toml").write_text('[context]\ncontext_parallel_method = "rings"\n')
    (root / "syntax.toml").write_text("[train\n")
    (root / "file").write_text("in the way")
    (root / "empty").mkdir()
