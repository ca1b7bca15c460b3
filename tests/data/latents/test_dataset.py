"""Samples of latents, whatever wrote them, and what is refused.

A writing that fails leaves nothing, and says why.
"""

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from data.latents.dataset import LatentDataConfig, build_latent_datasets, digits
from data.latents.folder import LatentFolder
from data.latents.writing import write_latents
from runtime.errors import DataError, UserError
from runtime.ranks import run_ranks

SHAPE = (2, 4, 4)


def samples(count, seed=0, shape=SHAPE):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, *shape)).astype(np.float32), generator.integers(
        0, 3, count
    )


def folder(path, count=10, **options):
    latents, labels = samples(count)
    write_latents(
        path, [(latents[:7], labels[:7]), (latents[7:], labels[7:])], samples_per_shard=4, **options
    )
    return path


def built(*paths, seed=1, shape=SHAPE, classes=3, **settings):
    config = LatentDataConfig(data_path=tuple(map(str, paths)), **settings)
    return build_latent_datasets(config, shape, classes, seed)


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_folder_gives_back_what_was_written(tmp_path, kind, dtype):
    folder(tmp_path, kind=kind, dtype=dtype)
    latents, labels = samples(10)
    latents_folder = LatentFolder(tmp_path)
    assert (len(latents_folder), latents_folder.shape, len(latents_folder.shards)) == (10, SHAPE, 3)
    assert latents_folder.labels.tolist() == labels.tolist()
    for row in range(10):
        assert latents_folder.latents(row).dtype == np.float32
        np.testing.assert_array_equal(latents_folder.latents(row), latents[row].astype(dtype))
    labels_file = {"npy": "labels-00002.npy", "safetensors": "latents-00002.safetensors"}[kind]
    shard, within = latents_folder.locate(9)
    assert (shard.labels_path, within) == (tmp_path / labels_file, 1)


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_latents_are_written_as_they_are_read_whatever_their_strides(tmp_path, kind):
    """An autoencoder's come with the channels innermost in memory."""
    latents, labels = samples(6)
    innermost = np.ascontiguousarray(latents.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    write_latents(tmp_path, [(innermost, labels)], kind=kind)
    np.testing.assert_array_equal(
        [LatentFolder(tmp_path).latents(row) for row in range(6)], latents
    )


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path):
    train, valid = built(folder(tmp_path), split="70,30")
    assert (len(train), len(valid)) == (7, 3)
    epochs = [[train.row(epoch * 7 + i) for i in range(7)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(epochs[0]))}
    validation_rows = {valid.row(i) for i in range(3)}
    assert validation_rows | set(epochs[0]) == set(range(10))
    again, _ = built(tmp_path, split="70,30")
    assert again.row(12) == epochs[1][5]  # whatever was read before
    other, other_valid = built(tmp_path, split="70,30", seed=2)
    assert [other.row(i) for i in range(7)] != epochs[0]
    assert [other.row(i) for i in range(7)] != epochs[1]
    assert {other_valid.row(i) for i in range(3)} == validation_rows


def test_samples_carry_their_number_and_fillers_none(tmp_path):
    train, _ = built(folder(tmp_path))
    latents, labels = samples(10)
    sample = train[13]
    row = train.row(13)
    np.testing.assert_array_equal(sample["latents"].numpy(), latents[row])
    assert (sample["labels"].item(), sample["sample"].item()) == (labels[row], 13)
    assert {sample[name].dtype for name in ("labels", "sample")} == {torch.int64}
    filler = train[None]
    assert not filler["latents"].any()
    assert filler["latents"].shape == SHAPE
    assert (filler["labels"].item(), filler["sample"].item()) == (0, -1)


def test_folders_are_taken_together(tmp_path):
    latents, labels = samples(5, seed=9)
    write_latents(tmp_path / "b", [(latents, labels)])
    train, _ = built(folder(tmp_path / "a"), tmp_path / "b", split="100")
    samples_by_row = {train.row(i): train[i] for i in range(15)}
    assert len(samples_by_row) == 15
    for row in range(5):
        np.testing.assert_array_equal(samples_by_row[10 + row]["latents"].numpy(), latents[row])


def test_digits_are_scaled_and_labelled():
    train, valid = built("digits", shape=(1, 8, 8), classes=10)
    assert (len(train), len(valid)) == (1617, 180)
    dataset = digits()
    images = [dataset.latents(row) for row in range(len(dataset))]
    assert (np.min(images), np.max(images)) == (-1, 1)
    assert sorted(set(dataset.labels.tolist())) == list(range(10))
    row = train.row(5)
    np.testing.assert_array_equal(train[5]["latents"].numpy(), images[row])
    assert train[5]["labels"] == dataset.labels[row]


def corrupt(path, row, value):
    """In place, so that who has the file open reads it too."""
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r+")
    else:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))["latents"]
        array = np.memmap(
            path, np.float32, "r+", 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
        )
    array[row, 0, 1, 1] = value
    array.flush()
    del array


@pytest.mark.parametrize(("row", "value"), [(2, np.nan), (3, np.inf)])
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_nan_is_named_with_file_and_row(tmp_path, monkeypatch, kind, row, value):
    """By a check of the folder in blocks, here of 3 rows, and by the sample.

    The sample tells it where it came after the start of a run.
    """
    train, _ = built(folder(tmp_path, kind=kind), split="100")
    monkeypatch.setattr("data.latents.folder._BLOCK", 3 * math.prod(SHAPE))
    with monkeypatch.context() as patched:
        patched.setattr(LatentFolder, "latents", None)  # rows are looked for in a bad block alone
        LatentFolder(tmp_path).check_finite()
    corrupt(tmp_path / f"latents-00001.{kind}", row, value)
    message = rf"latents-00001\.{kind}: row {row} holds a NaN"
    with pytest.raises(DataError, match=message):
        LatentFolder(tmp_path).check_finite()
    (bad,) = (n for n in range(len(train)) if train.row(n) == 4 + row)
    with pytest.raises(DataError, match=message):
        train[bad]


def spoil(path, content):
    """A number cuts a file, and a text or an array takes its place.

    A table changes entries, and None removes it.
    """
    if content is None:
        path.unlink()
    elif isinstance(content, int):
        os.truncate(path, content)
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    elif isinstance(content, (str, bytes)):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        np.save(path, content, allow_pickle=True)


INDEX, LATENTS, LABELS = "index.json", "latents-00001.npy", "labels-00001.npy"
BOTH, FLOATS = "latents-00001.safetensors", np.zeros((4, *SHAPE), np.float32)
OUTSIDE = {"latents": "../x.npy", "labels": "labels-00000.npy", "samples": 4}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, {"shards": []}, " lists no shards, so the folder has no samples"),
        (INDEX, "{", " cannot be read"),
        (INDEX, {"version": 2}, " is not an index of version 1"),
        (INDEX, {"shape": [4, 4]}, r": shape is \[4, 4\]"),
        (INDEX, {"dtype": "int8"}, ": dtype is int8; it must be float32 or float16"),
        (INDEX, {"shards": [OUTSIDE]}, ": a shard is .* must be names of files in the same folder"),
        (LATENTS, None, " is missing"),
        (LATENTS, 150, " cannot be read"),
        (LATENTS, np.array([{}] * 4), " cannot be read"),
        (LATENTS, "nothing", r" cannot be read \(not a numpy array\)"),
        (
            LATENTS,
            np.zeros((4, 2, 4, 5), np.float32),
            r" holds float32 \[4, 2, 4, 5\], but the index says",
        ),
        (
            LATENTS,
            np.zeros((4, *SHAPE)),
            r" holds float64 \[4, 2, 4, 4\], but the index says float32",
        ),
        (LABELS, np.zeros(4), r" holds labels float64 \[4\]; they must be integers of shape \[4\]"),
        (LABELS, np.zeros(3, int), r" holds labels int64 \[3\]"),
        (
            LABELS,
            np.array([0, 1, 3, 0]),
            ": row 2 has label 3, but num_classes 3 allows 0 to 2; set num_classes to 4",
        ),
        (
            LABELS,
            np.array([3, -1, 0, 0]),
            ": row 1 has label -1, but .* allows 0 to 2; number the classes from 0",
        ),
        (
            LABELS,
            np.array([0, 0, 2**63 + 5, 3], np.uint64),
            ": row 2 has label 9223372036854775813, but labels must fit into int64",
        ),
        (BOTH, b"nothing", " cannot be read"),
        (BOTH, save({"latents": FLOATS}), r" cannot be read \(no tensor labels\)"),
        (
            BOTH,
            save({"latents": FLOATS.astype(float), "labels": np.zeros(4, int)}),
            r" holds F64 \[4, 2, 4, 4\]",
        ),
        (BOTH, save({"latents": FLOATS, "labels": np.array([0, 3, 0, 0])}), ": row 1 has label 3"),
    ],
)
def test_broken_folders_are_named(tmp_path, name, content, message):
    path = folder(tmp_path / "latents", kind="safetensors" if name == BOTH else "npy")
    spoil(path / name, content)
    with pytest.raises(DataError, match=f"{name}{message}"):
        built(path)


def test_unsigned_labels_that_fit_are_taken(tmp_path):
    path, (_, labels) = folder(tmp_path), samples(10)
    for number, begin in enumerate(range(0, 10, 4)):
        np.save(path / f"labels-{number:05d}.npy", labels[begin : begin + 4].astype(np.uint64))
    train, _ = built(path)
    assert LatentFolder(path).labels.dtype == np.int64
    assert train[3]["labels"] == labels[train.row(3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"shape": (1, 4, 4)},
            "has latents of 2 4 4, but latent_shape is 1 4 4; set latent_shape to 2 4 4",
        ),
        ({"split": "0,1"}, "leaves none of the 10 samples to train on"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"split": "a"}, 'split is "a"'),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        built(folder(tmp_path), **settings)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(DataError, match="none, which is not a folder"):
        built(tmp_path / "none")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes").touch()
    with pytest.raises(DataError, match=r"new has no index\.json"):
        built(tmp_path / "new")
    with pytest.raises(DataError, match="data_path is empty"):
        LatentDataConfig(data_path=())


def _orders_and_errors(rank, world_size, path):
    train, _ = built(path)
    order = [train.row(i) for i in range(20)]
    torch.distributed.barrier()
    if rank == 0:
        (path / "latents-00001.npy").unlink()
    torch.distributed.barrier()
    try:
        built(path)
    except DataError as error:
        return order, str(error)
    return order, ""


def test_ranks_have_one_order_and_fail_together(tmp_path):
    (order, error), (other_order, other_error) = run_ranks(_orders_and_errors, 2, folder(tmp_path))
    assert order == other_order
    assert "latents-00001.npy is missing" in error
    assert "latents-00001.npy is missing" in other_error


def test_writing_refuses_what_could_not_be_trained_on(tmp_path):
    latents, labels = samples(5)
    latents[3, 0, 0, 0] = 1e6
    with pytest.raises(DataError, match="sample 3 holds a NaN or an infinity in float16"):
        write_latents(tmp_path / "a", [(latents, labels)], dtype="float16")
    assert not (tmp_path / "a").exists()
    with pytest.raises(DataError, match="no samples"):
        write_latents(tmp_path / "b", [])
    folder(tmp_path / "c")
    with pytest.raises(DataError, match="already holds latents"):
        folder(tmp_path / "c")
    assert len(LatentFolder(tmp_path / "c")) == 10


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, DataError])
def test_a_writing_that_ends_early_leaves_what_was_there(tmp_path, kind, ending):
    def batches():
        yield samples(6)
        raise ending

    with pytest.raises(ending):
        write_latents(tmp_path / "a" / "b", batches(), samples_per_shard=4, kind=kind)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ending):
        write_latents(tmp_path, batches(), samples_per_shard=4, kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("owner", "call", "file"),
    [
        (np, "save", "labels-00001"),
        (os, "fsync", "latents-00001"),
        (Path, "replace", "latents-00001"),
    ],
)
def test_a_disk_that_fills_up_is_named_and_nothing_stays(tmp_path, monkeypatch, owner, call, file):
    done = getattr(owner, call)

    def full(target, *arguments):
        if file in (
            os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target.name
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done(target, *arguments)

    monkeypatch.setattr(owner, call, full)
    message = (
        r"cannot write to .*/a \(No space left on device: "
        r"[\d,]+ bytes are free in .*\); free space or give"
    )
    with pytest.raises(DataError, match=message):
        folder(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_one_writing_of_a_folder_at_a_time_and_a_killed_one_leaves_no_draft(tmp_path):
    def another():
        with pytest.raises(DataError, match=r"is in use by .*or name another folder"):
            write_latents(tmp_path / "a", [samples(6)])
        yield samples(6)

    assert write_latents(tmp_path / "a", another()) == 6
    child = os.fork()
    if child == 0:
        np.save = lambda path, array: os._exit(
            not path.write_bytes(b"half")
        )  # as by SIGKILL: no handler runs
        try:
            write_latents(tmp_path / "b", [samples(6)])
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert len(list((tmp_path / "b").glob(".*"))) == 2, "a lock and a draft"
    assert folder(tmp_path / "b").name == "b"
    assert list((tmp_path / "b").glob(".*")) == []
