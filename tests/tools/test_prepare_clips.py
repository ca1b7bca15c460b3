"""Videos with captions to latents and text embeddings, as diffusers' Wan pipelines compute them."""

import json
import re
import shutil
import struct
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data.clips.videos import VideoReader
from runtime.files import sha256
from tests.clips import flags, write_models, write_video
from tools.prepare_clips import main
from tools.prepare_latents import main as prepare_latents

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
av = pytest.importorskip("av")

CAPTIONS = {"a.mp4": "a cat  runs", "b.mkv": "a dog sleeps in the sun", "sub/c.webm": "the sun"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture
def videos(tmp_path):
    """Three videos: of the clips' rate and size of pixels, of another rate, and one in VP8."""
    folder = tmp_path / "videos"
    (folder / "sub").mkdir(parents=True)
    write_video(folder / "a.mp4", 9)
    write_video(folder / "b.mkv", 18, fps=32, height=64, width=96)
    write_video(folder / "sub" / "c.webm", 12, codec="libvpx")
    for name, caption in CAPTIONS.items():
        (folder / name).with_suffix(".txt").write_text(caption + "\n")
    return folder


def error(capsys, words):
    assert main(words) == 1
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def decoded(path):
    """Every frame of a video as a picture."""
    with av.open(str(path)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


def expected_latents(models, pictures):
    """Latents by the code of WanVideoToVideoPipeline: its processor, VAE and normalisation."""
    vae = diffusers.AutoencoderKLWan.from_pretrained(models / "vae").eval()
    processor = diffusers.video_processor.VideoProcessor(vae_scale_factor=8)
    video = processor.preprocess_video(pictures, height=32, width=48, resize_mode="crop")
    with torch.no_grad():
        latents = vae.encode(video).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1)
    return ((latents - mean) * inverse_std)[0]


def expected_text(models, caption):
    """A caption's embedding, without the pipeline: the tokens' own, then zeros."""
    from transformers import AutoTokenizer, UMT5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(models / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(models / "text_encoder").eval()
    ids = torch.tensor([tokenizer(" ".join(caption.split())).input_ids[:7]])
    with torch.no_grad():
        embedding = encoder(ids).last_hidden_state[0]
    return torch.cat([embedding, embedding.new_zeros(7 - len(embedding), 16)])


def test_latents_and_text_are_those_of_the_pipelines(models, videos, tmp_path, capsys):
    output = tmp_path / "clips"
    assert main(flags(videos, models, output)) == 0
    assert "3 clips with latents of 4 x 3 x 4 x 6 and text of 7 x 16, float32" in (
        capsys.readouterr().out
    )
    index = json.loads((output / "index.json").read_text())
    assert [row["video"] for row in index["clips"]] == list(CAPTIONS)
    assert (index["fps"], index["latents"]) == (16.0, [4, 3, 4, 6])
    assert index["vae"]["config_sha256"] == sha256(models / "vae" / "config.json")
    # b.mkv has twice the rate: every second frame; its times are rounded to milliseconds.
    pictures = {name: decoded(videos / name) for name in CAPTIONS}
    pictures["b.mkv"] = pictures["b.mkv"][::2]
    for row, (name, caption) in zip(index["clips"], CAPTIONS.items(), strict=True):
        clip = load_file(output / row["file"])
        assert clip.keys() == {"latents", "text"}
        expected = expected_latents(models, pictures[name][:9])
        torch.testing.assert_close(clip["latents"], expected, rtol=0, atol=1e-6)
        expected = expected_text(models, caption)
        torch.testing.assert_close(clip["text"], expected, rtol=0, atol=1e-5)
        with safe_open(output / row["file"], framework="pt") as file:
            assert file.metadata() == {"caption": caption, "video": name}
    empty = load_file(output / "empty.safetensors")["text"]
    torch.testing.assert_close(empty, expected_text(models, ""), rtol=0, atol=1e-5)
    assert main(["--check", str(output)]) == 0


def test_captions_of_a_table_another_dtype_and_captions_that_are_cut(
    models, videos, tmp_path, capsys
):
    for path in videos.rglob("*.txt"):
        path.unlink()
    captions = CAPTIONS | {"a.mp4": "a cat runs in the sun a b c"}
    rows = [json.dumps({"file_name": name, "text": text}) for name, text in captions.items()]
    (videos / "metadata.jsonl").write_text("\n".join(rows))
    (videos / "notes.pdf").touch()
    (videos / ".DS_Store").touch()
    words = flags(videos, models, tmp_path / "clips", dtype="bfloat16")
    assert main(words) == 0
    messages = capsys.readouterr().err
    assert "1 file of" in messages
    assert "not read: notes.pdf" in messages
    assert "1 of 3 captions are cut to 7 tokens: a.mp4" in messages
    clip = load_file(tmp_path / "clips" / "clip-00000.safetensors")
    assert clip["text"].dtype == torch.bfloat16
    assert bool(clip["text"].any(1).all())


def test_short_videos_are_refused_or_left_out_by_name(models, videos, tmp_path, capsys):
    write_video(videos / "slow.mp4", 20, fps=8)
    (videos / "slow.txt").write_text("a dog")
    output = tmp_path / "clips"
    message = error(capsys, flags(videos, models, output, frames=13))
    assert "4 of 4 videos" in message
    assert "fewer than 13 different frames at 16 frames per second: a.mp4 (9), b.mkv (9)" in message
    message = error(capsys, flags(videos, models, output))
    assert "1 of 4 videos" in message
    assert "slow.mp4 (5); give fewer --frames, another --fps, or --skip-short" in message
    assert not output.exists()
    assert main([*flags(videos, models, output), "--skip-short"]) == 0
    assert "and were left out: slow.mp4 (5)" in capsys.readouterr().err
    message = error(capsys, [*flags(videos, models, tmp_path / "no", frames=13), "--skip-short"])
    assert "so no video is left" in message


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"frames": 80}, "first frame alone and the others 4 at a time; give 77 or 81"),
        ({"height": 40}, "height is 40; it must be a multiple of 16"),
        ({"width": 50}, "by a factor of 8 and the transformer by 2 more; give 48 or 64"),
        ({"width": 5}, "give 16"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest(
    models, videos, tmp_path, capsys, sizes, message
):
    assert message in error(capsys, flags(videos, models, tmp_path / "clips", **sizes))


def damaged(path):
    """Cut a file in its middle."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


SPOILT = {
    "no caption": (
        lambda videos: (videos / "a.txt").unlink(),
        "has videos without a caption: a.mp4",
    ),
    "empty": (lambda videos: (videos / "a.txt").write_text(" \n"), "empty caption: a.mp4"),
    "bytes": (lambda videos: (videos / "a.txt").write_bytes(b"\xff\xfe"), "a.txt cannot be read"),
    "two": (
        lambda videos: (videos / "metadata.jsonl").write_text(
            '{"file_name": "a.mp4", "text": "a"}'
        ),
        "a.mp4 has one caption in metadata.jsonl and one in a file",
    ),
    "row": (
        lambda videos: (videos / "metadata.jsonl").write_text('{"file_name": "a.mp4"}'),
        "metadata.jsonl:1 is no",
    ),
    "lost": (
        lambda videos: (videos / "metadata.jsonl").write_text(
            '{"file_name": "z.mp4", "text": "a"}'
        ),
        "no videos for rows of metadata.jsonl: z.mp4",
    ),
    "text": (lambda videos: (videos / "a.mp4").write_text("no video"), "a.mp4 cannot be read as"),
    "cut": (lambda videos: damaged(videos / "a.mp4"), "a.mp4 cannot be read as a video"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_bad_captions_and_videos_are_named_before_anything_is_encoded(
    models, videos, tmp_path, capsys, name
):
    spoil, pattern = SPOILT[name]
    spoil(videos)
    assert main(flags(videos, models, tmp_path / "clips")) == 1
    assert re.search(pattern, capsys.readouterr().err)
    assert not (tmp_path / "clips").exists()


def test_folders_without_videos_and_lines_without_flags_are_refused(models, tmp_path, capsys):
    output = tmp_path / "clips"
    assert "which is not a folder" in error(capsys, flags(tmp_path / "no", models, output))
    (tmp_path / "empty").mkdir()
    assert "which has no videos" in error(capsys, flags(tmp_path / "empty", models, output))
    assert main(["--videos", "videos"]) == 2
    assert "--videos needs --output" in capsys.readouterr().err


def test_packages_that_are_missing_are_named(models, videos, tmp_path, capsys, monkeypatch):
    words = flags(videos, models, tmp_path / "clips")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install diffusers transformers (make venv EXTRAS=video)" in error(capsys, words)
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install av (make venv EXTRAS=video)" in error(capsys, words)


def test_models_of_other_classes_are_refused_by_name(models, videos, tmp_path, capsys):
    output = tmp_path / "clips"
    other = tmp_path / "other"
    other.mkdir()
    assert "vae is" in error(capsys, flags(videos, models, output, vae=other))
    (other / "model_index.json").touch()
    message = error(capsys, flags(videos, models, output, vae=other))
    assert f"it is the folder of a whole pipeline: give {other}/vae" in message
    config = {"_class_name": "AutoencoderKLHunyuanVideo", "architectures": ["CLIPTextModel"]}
    (other / "config.json").write_text(json.dumps(config))
    message = error(capsys, flags(videos, models, output, vae=other))
    assert "AutoencoderKLHunyuanVideo, but only AutoencoderKLWan is supported" in message
    message = error(capsys, flags(videos, models, output, **{"text-encoder": other}))
    assert "CLIPTextModel, but only UMT5EncoderModel or T5EncoderModel is supported" in message
    message = error(capsys, flags(videos, models, output, tokenizer=other))
    assert "tokenizer" in message

    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        (other / name).write_bytes((models / "vae" / name).read_bytes())
    weights = load_file(other / "diffusion_pytorch_model.safetensors")
    del weights["quant_conv.weight"]
    save_file(weights, other / "diffusion_pytorch_model.safetensors")
    message = error(capsys, flags(videos, models, output, vae=other))
    assert "lacks 1 weights, such as quant_conv.weight" in message
    assert not output.exists()


QUARTER_TURN = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
"""The matrix of an upright telephone's film."""


def test_videos_are_turned_upright_and_their_pixels_made_square(tmp_path):
    path = tmp_path / "turned.mp4"
    write_video(path, 2, height=48, width=96, aspect=2)
    content = path.read_bytes()
    matrix = content.index(struct.pack(">i", 1 << 30), content.index(b"tkhd")) - 32
    path.write_bytes(content[:matrix] + QUARTER_TURN + content[matrix + 36 :])
    reader = VideoReader(frames=2, height=96, width=24, fps=16)
    assert reader.count(path) == 2
    (first, _) = reader.read(path)
    (picture, _) = decoded(path)
    stored = np.asarray(picture.resize((192, 48)).rotate(-90, expand=True))  # 192 high, 48 wide
    halved = stored.reshape(96, 2, 24, 2, 3).mean((1, 3))
    assert abs(halved - first).mean() < 3
    assert abs(halved - first[::-1, ::-1]).mean() > 30  # a turn the other way
    assert reader.notes() == []


def test_videos_that_are_changed_are_counted(tmp_path):
    path = tmp_path / "small.mp4"
    write_video(path, 3, trc=16)
    reader = VideoReader(frames=3, height=96, width=160, fps=16)
    assert reader.count(path) == 3
    small, hdr = reader.notes()
    assert small.startswith("1 videos are smaller than the requested size, and were enlarged")
    assert hdr.startswith("1 videos are of high dynamic range")


def test_check_reads_all_values(models, videos, tmp_path, capsys):
    output = tmp_path / "clips"
    words = flags(videos, models, output)
    assert main(words) == 0
    assert "already has data" in error(capsys, words)
    assert prepare_latents(["--check", str(output)]) == 1
    assert "tools.prepare_clips --check reads it" in capsys.readouterr().err

    path = output / "clip-00001.safetensors"
    clip = load_file(path)
    check = ["--check", str(output)]
    save_file({**clip, "latents": clip["latents"] / 0}, path)
    assert "clip-00001.safetensors: its latents hold a NaN" in error(capsys, check)
    save_file({**clip, "text": clip["text"].half()}, path)
    assert "has torch.float16 [7, 16] as text, but the index says" in error(capsys, check)
    path.unlink()
    assert "clip-00001.safetensors cannot be read" in error(capsys, check)
    (output / "index.json").write_text("{}")
    assert "is not an index of clips" in error(capsys, check)
    assert "has no index.json" in error(capsys, ["--check", str(videos)])


def test_values_that_a_dtype_cannot_hold_leave_nothing(models, videos, tmp_path, capsys):
    large = tmp_path / "large"
    shutil.copytree(models / "vae", large)
    config = json.loads((large / "config.json").read_text())
    config["latents_std"] = [1e-9] * 4
    (large / "config.json").write_text(json.dumps(config))
    output = tmp_path / "clips"
    message = error(capsys, flags(videos, models, output, vae=large, dtype="float16"))
    assert "a.mp4: its latents hold a NaN or an infinity in float16" in message
    assert not output.exists()
