import re
import warnings

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from data.latents.folder import LatentFolder
from data.latents.writing import write_latents
from tools.prepare_latents import main

SHADES = {"cat": 0, "dog": 255}


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Two classes of two images each, wider than high, of one colour.

    They have stripes at the sides that are cut off.
    """
    pytest.importorskip("datasets")
    from PIL import Image

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, shade in SHADES.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(2):
            pixels = np.full((16, 32, 3), 128, np.uint8)
            pixels[:, 8:24] = shade
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def test_pixels_of_the_middle_square(images, tmp_path, capsys):
    assert main(["--input", str(images), "--size", "8", "--output", str(tmp_path / "out")]) == 0
    folder = LatentFolder(tmp_path / "out")
    assert (folder.shape, folder.labels.tolist()) == ((3, 8, 8), [0, 0, 1, 1])
    for row, label in enumerate(folder.labels):
        np.testing.assert_allclose(folder.latents(row), 2 * label - 1)
    assert "--latent-shape 3 8 8 --num-classes 2" in capsys.readouterr().out


def test_latents_of_an_autoencoder(images, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    }
    model = diffusers.AutoencoderKL(
        **blocks, block_out_channels=[8, 8], norm_num_groups=4, scaling_factor=0.5
    )
    model.save_pretrained(tmp_path / "vae")
    arguments = [
        "--input",
        str(images),
        "--size",
        "16",
        "--vae",
        str(tmp_path / "vae"),
        "--format",
        "safetensors",
    ]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    folder = LatentFolder(tmp_path / "out")
    assert folder.shape == (4, 8, 8)
    with torch.no_grad():
        expected = model.eval().encode(torch.ones(1, 3, 16, 16)).latent_dist.mean[0] * 0.5
    np.testing.assert_allclose(folder.latents(3), expected.numpy(), atol=1e-5)

    from data.latents.dataset import Vae

    with torch.no_grad():
        decoded = model.decode(expected[None] / 0.5).sample
    shown = Vae(tmp_path / "vae", torch.device("cpu")).decode(expected[None])
    torch.testing.assert_close(shown, decoded, atol=1e-5, rtol=0)


def test_pictures_that_are_not_taken_as_they_are_and_files_that_are_none_are_told(
    images, tmp_path, capsys
):
    from PIL import Image

    deep = np.full((16, 16), 65535, np.uint16)
    Image.fromarray(deep).save(images / "cat" / "deep.png")
    Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(images / "dog" / "hidden.png")
    (images / "dog" / "photo.heic").write_bytes(b"of another kind")
    assert main(["--input", str(images), "--size", "8", "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "1 pictures have transparent parts" in captured.err
    assert "hidden.png" in captured.err
    assert "1 files are not read" in captured.err
    assert "photo.heic" in captured.err
    folder = LatentFolder(tmp_path / "out")
    assert folder.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert [folder.latents(row).min() for row in range(6)] == [-1, -1, 1, 1, 1, 1]


@pytest.mark.parametrize("others", [("cat", "test"), ("training", "cat")])
def test_folders_that_datasets_takes_as_splits_are_refused_since_others_would_be_left_out(
    images, tmp_path, capsys, others
):
    for name, other in zip(("cat", "dog"), others, strict=True):
        (images / name).rename(tmp_path / "moved")
        (images / other).mkdir()
        (tmp_path / "moved").rename(images / other / name)
    assert "take it as a split" in error(capsys, "--input", images, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stray.png", "images has images and also folders with images, such as"),
        ("others/cat/1.png", "have the same name and would be one class"),
        ("cat/train_1.png", "4 of 5 images of .* would be left out, such as .*cat/0.png"),
        ("metadata.jsonl", "metadata.jsonl replaces the folders' classes"),
        ("more.zip", "cannot be read as images .*zip"),
    ],
)
def test_images_that_would_be_another_class_or_none_are_refused(
    images, tmp_path, capsys, name, why
):
    path = images / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = (images / "cat" / "0.png").read_bytes()
    path.write_bytes(
        b'{"file_name": "cat/0.png", "words": "a cat"}\n' if name == "metadata.jsonl" else content
    )
    assert re.search(why, error(capsys, "--input", images, "--output", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_of_images_alone_is_one_class_and_hidden_files_are_none(images, tmp_path, capsys):
    content = (images / "cat" / "0.png").read_bytes()
    for name in (".DS_Store", "._0.png", ".more/0.png", "__MACOSX/0.png"):
        (images / "cat" / name).parent.mkdir(exist_ok=True)
        (images / "cat" / name).write_bytes(content)
    assert (
        main(["--input", str(images / "cat"), "--size", "8", "--output", str(tmp_path / "out")])
        == 0
    )
    assert LatentFolder(tmp_path / "out").labels.tolist() == [0, 0]
    assert capsys.readouterr().err == ""


def error(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_bad_input_gives_one_message(images, tmp_path, capsys):
    assert "is not a folder" in error(
        capsys, "--input", tmp_path / "none", "--output", tmp_path / "a" / "b"
    )
    assert "has no config.json" in error(
        capsys, "--input", images, "--vae", images, "--output", tmp_path / "a"
    )
    assert "has no index.json" in error(capsys, "--check", images)
    assert not (tmp_path / "a").exists()
    assert main(["--input", str(images)]) == 2


@pytest.mark.parametrize(
    ("spoil", "kind"), [("text", "npy"), ("cut", "safetensors"), ("empty", "npy")]
)
def test_an_image_that_cannot_be_read_is_named_and_nothing_is_left(
    images, tmp_path, capsys, spoil, kind
):
    bad = images / "dog" / "0.png"
    good = bad.read_bytes()
    pixels = good.find(b"IDAT") + 8
    bad.write_bytes({"text": b"nothing", "cut": good[:pixels], "empty": b""}[spoil])
    # In the second batch, when a shard has been written.
    flags = ["--size", 8, "--batch-size", 2, "--samples-per-shard", 1, "--format", kind]
    message = error(capsys, "--input", images, "--output", tmp_path / "a" / "out", *flags)
    assert message.startswith(f"error: {bad} cannot be read as an image (")
    assert message.endswith("); repair or remove it\n")
    assert not (tmp_path / "a").exists()


def test_an_output_that_cannot_be_written_is_named(images, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    message = error(capsys, "--input", images, "--size", 8, "--output", tmp_path / "file/under")
    assert f"cannot write to {tmp_path}/file/under (Not a directory" in message
    assert "give another folder" in message


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_check_reads_all_values(tmp_path, capsys, kind):
    latents, labels = np.zeros((5, 3, 8, 8), np.float32), np.arange(5)
    write_latents(tmp_path, [(latents, labels)], kind=kind)
    assert main(["--check", str(tmp_path)]) == 0
    assert "5 samples of 3 8 8 in 1 shards, 5 classes" in capsys.readouterr().out
    assert main(["--check", str(tmp_path), "--num-classes", "7"]) == 0
    assert "note: 2 of 7 classes have no sample" in capsys.readouterr().err
    low = "row 4 has label 4, but num_classes 4 allows 0 to 3"
    assert low in error(capsys, "--check", tmp_path, "--num-classes", 4)
    spoilt = latents.copy()
    spoilt[2, 0, 0, 0] = np.nan
    if kind == "npy":
        np.save(tmp_path / "latents-00000.npy", spoilt)
    else:
        save_file({"latents": spoilt, "labels": labels}, tmp_path / "latents-00000.safetensors")
    assert f"latents-00000.{kind}: row 2 holds a NaN" in error(capsys, "--check", tmp_path)
    write_latents(tmp_path / "below", [(latents, labels - 2)], kind=kind)
    below = "row 0 has label -2, but classes begin at 0; number the classes from 0"
    assert below in error(capsys, "--check", tmp_path / "below")
