import re
import warnings
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from shutil import copytree

import numpy as np
import pytest
import torch

from data.latents.dataset import Vae
from pretrain_dit import main as pretrain
from runtime.errors import DataError
from runtime.ranks import run_ranks
from tests.parallel.tiny import rewrite_manifest
from tools.common.arguments import UsageError
from tools.common.training import PEAK
from tools.sample_dit import config_of, fitted, main
from train.checkpoint.manifest import CheckpointError
from train.config.flags import ConfigError
from train.run import exit_status
from train.sampling import Sampler

RUN = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --latent-shape 1 8 8 --num-classes 10
    --device cpu
    --objective rectified_flow --ema-decay 0.5 --train-iters 2 --micro-batch-size 2 --lr 3e-2
    --eval-iters 1
    --lr-warmup-iters 1 --samples-per-class 2 --sample-classes 3 --sample-steps 2
""".split()
DRAWN = ["--num-samples", "2", "--steps", "3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    pretrain([*RUN, "--save", str(folder)], PEAK)
    return folder


def page(path):
    from PIL import Image

    return np.asarray(Image.open(path)).astype(int)


def drawn(run, folder, *flags):
    main(["--load", str(run), *DRAWN, "--output", str(folder), *flags])
    return page(folder / "all.png")


def test_writes_a_grid_for_each_class_and_one_of_all_in_the_place_of_older_ones(
    run, tmp_path, capsys
):
    assert page(run / "samples" / "iter_0000002.png").shape == (
        3 * 50 + 2,
        2 * 50 + 2,
    )  # at an evaluation
    grid = drawn(run, tmp_path, "--classes", "7", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all.png",
        "class_0002.png",
        "class_0007.png",
    ]
    assert grid.shape == (2 * 50 + 2, 2 * 50 + 2)
    assert (page(tmp_path / "class_0002.png")[:50] == grid[50:100]).all()
    assert "4 samples of 2 classes" in capsys.readouterr().out
    drawn(run, tmp_path, "--classes", "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.png", "class_0003.png"]
    assert "replaced 3 earlier pictures" in capsys.readouterr().out


def test_averages_are_drawn_with_unless_told_otherwise(run, tmp_path):
    averaged, trained = drawn(run, tmp_path / "a"), drawn(run, tmp_path / "b", "--no-ema")
    assert (averaged != trained).any()
    assert (averaged == drawn(run, tmp_path / "c")).all()
    assert (averaged != drawn(run, tmp_path / "d", "--seed", "5")).any()


def _drawn_on_rank(rank, world_size, run, folder):
    """The status and the words of a drawing, and of one that is not finite."""
    results = []
    for name, more in (("two", []), ("out", ["--guidance", "1e300"])):
        with redirect_stderr(StringIO()) as errors:
            status = exit_status(
                main, ["--load", str(run), *DRAWN, "--output", str(folder / name), *more]
            )
        results.append((status, errors.getvalue()))
    return results


NOT_FINITE = (
    r"iter_0000002 generates values that are not finite in \d+ of \d+ samples, so "
    r"its training diverged or guidance"
)


def test_two_processes_draw_the_same_and_one_tells_of_samples_that_are_not_finite(run, tmp_path):
    good, bad = zip(*run_ranks(_drawn_on_rank, 2, run, tmp_path), strict=True)
    assert good == ((0, ""),) * 2
    assert abs(page(tmp_path / "two" / "all.png") - drawn(run, tmp_path / "one")).max() <= 1
    statuses, errors = zip(*bad, strict=True)
    assert statuses == (1, 1)
    assert re.fullmatch(
        f"error: .*{NOT_FINITE} 1e[+]300 is too large.*\n", "".join(errors)
    )  # one rank speaks
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_packed_its_samples_is_drawn_one_by_one(tmp_path):
    """The same pictures as of a run that did not: its weights are those of the same training."""
    flags = [*RUN, "--samples-per-class", "0", "--eval-iters", "0"]
    for name, more in (("packed", ["--pack-samples"]), ("apart", [])):
        pretrain([*flags, *more, "--save", str(tmp_path / name)], PEAK)
    assert config_of(tmp_path / "packed").data.pack_samples
    packed, apart = (
        drawn(tmp_path / name, tmp_path / f"{name} drawn") for name in ("packed", "apart")
    )
    assert abs(packed - apart).max() <= 1
    assert packed.std() > 1


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (
            ["--classes", "10"],
            ConfigError,
            "--classes has 10; it must be one of the model's classes, 0 to 9",
        ),
        (
            ["--classes", "3", "1", "3"],
            ConfigError,
            "--classes has 3 twice",
        ),
        (
            ["--method", "ddim"],
            ConfigError,
            "sample_method is ddim, but objective rectified_flow supports only euler",
        ),
        (["--ckpt-step", "7"], CheckpointError, "ckpt_step is 7"),
        (["--steps", "abc"], UsageError, "'abc' is not an integer of 1 or more"),
        (["--load", "configs"], ConfigError, "name the folder that a run saved to"),
    ],
)
def test_bad_input_is_named(run, flags, kind, message):
    with pytest.raises(kind, match=message):
        main(["--load", str(run), *flags])


def test_an_output_that_can_be_no_folder_is_refused_before_drawing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Sampler, "draw", lambda *_: pytest.fail("has drawn"))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=rf"output is .*, and {tmp_path}/file is a file; give a"):
        main(["--load", str(run), *DRAWN, "--output", str(tmp_path / "file" / "deeper")])


def test_what_a_run_cannot_be_drawn_with_is_refused_before_any_work(run, tmp_path):
    copy = tmp_path / "run"
    copytree(run, copy)
    rewrite_manifest(copy / "iter_0000002", extra={})
    with pytest.raises(CheckpointError, match="has no averages of the weights; give --no-ema"):
        main(["--load", str(copy), *DRAWN])
    config = (run / "config.toml").read_text()  # in a folder without a checkpoint
    (tmp_path / "config.toml").write_text(
        config.replace("class_dropout_prob = 0.1", "class_dropout_prob = 0.0")
    )
    with pytest.raises(ConfigError, match=r"guidance is .*, but class_dropout_prob is 0\.0"):
        main(["--load", str(tmp_path)])
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        main(["--load", str(tmp_path), "--guidance", "1"])


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """An autoencoder's folder: latents of 4 channels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusers = pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("vae")
    diffusers.AutoencoderKL(
        block_out_channels=[8], norm_num_groups=4, latent_channels=4
    ).save_pretrained(folder)
    return folder


def test_latents_that_the_vae_cannot_decode_are_refused_before_drawing(
    run, vae, tmp_path, monkeypatch
):
    monkeypatch.setattr(Sampler, "draw", lambda *_: pytest.fail("has drawn"))
    with pytest.raises(
        DataError, match="decodes 4 channels, but latent_shape 1 8 8 has 1; give the vae"
    ):
        main(["--load", str(run), *DRAWN, "--vae", str(vae), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_vae_takes_images_of_its_channels_and_names_itself_where_its_pictures_are_not_finite(vae):
    loaded = Vae(vae, torch.device("cpu"))
    loaded.check((4, 8, 8))
    with pytest.raises(
        DataError,
        match="decodes images, but latent_shape 4 3 8 8 has frames; leave out --vae",
    ):
        loaded.check((4, 3, 8, 8))
    latents = torch.zeros(3, 4, 8, 8)
    assert loaded.decode(latents).isfinite().all()
    latents[1] = 3e38
    with pytest.raises(
        DataError, match=r"vae .* decodes 1 of 3 samples to values that are not finite"
    ):
        loaded.decode(latents)


def test_copies_of_shards_do_not_bind_the_number_of_processes(run):
    config = config_of(run)
    copies = replace(config.data_parallel, num_distributed_optimizer_instances=2)
    fitted_config = fitted(replace(config, data_parallel=copies), 3)
    assert fitted_config.data_parallel.num_distributed_optimizer_instances == 1
