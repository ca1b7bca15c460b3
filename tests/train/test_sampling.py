from dataclasses import replace

import numpy as np
import pytest
import torch

from data.latents.dataset import LatentDataConfig
from model.diffusion import Diffusion, DiffusionConfig
from model.dit_config import DiTConfig
from parallel.context.config import FullContextConfig
from parallel.mesh import MeshConfig, distributed_mesh
from runtime.ranks import run_ranks
from runtime.tensors import generator_of
from train.checkpoint.api import CheckpointConfig
from train.config.common import LoopConfig
from train.config.diffusion import validate
from train.config.entries import DiTRunConfig
from train.config.flags import ConfigError
from train.sampling import SamplingConfig, by_class, picture_writer, write_grid
from train.tasks.diffusion import DiffusionTask

MODEL = DiTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    patch_size=2,
    latent_shape=(2, 6, 6),  # 9 patches: two ranks have to pad them
    num_classes=5,
    learn_sigma=True,
)
LABELS = [0, 1, 2, 3, 4, 0, 1]


def run_of(joined=0, **mesh):
    context = FullContextConfig(
        context_parallel_method="ring" if mesh.get("context_parallel_size") else "none"
    )
    config = DiTRunConfig(model=MODEL, mesh=MeshConfig(device="cpu", **mesh), context=context)
    if not joined:
        return config
    return replace(
        config, data=LatentDataConfig(pack_samples=True), train=LoopConfig(micro_batch_size=joined)
    )


def drawn_on(rank, world_size, config, sampling):
    """The samples that ranks draw with weights that are no noughts."""
    with distributed_mesh(config.mesh) as mesh:
        task = DiffusionTask(replace(config, sampling=sampling), mesh)
        task.initial_weight = lambda name, shape, part: (
            0.2 * torch.randn(shape, generator=generator_of(7, name))[part]
        )
        sampler = task.sampler(task.build_parts(), 11)
        return sampler.draw(LABELS, batch_size=3)


@pytest.fixture(scope="module")
def alone():
    return run_ranks(drawn_on, 1, run_of(), SamplingConfig(sample_method="ddpm", sample_steps=6))[0]


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (4, {"context_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2}),
        pytest.param(4, {"tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"context_parallel_size": 2, "joined": 5}, marks=pytest.mark.slow),
        pytest.param(
            4,
            {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "joined": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dp2-cp2", "pp2", "dp2-tp2", "dp2-cp2-joined", "cp2-tp2-joined"],
)
def test_every_mesh_draws_the_same(alone, ranks, mesh):
    results = run_ranks(
        drawn_on, ranks, run_of(**mesh), SamplingConfig(sample_method="ddpm", sample_steps=6)
    )
    for latents in results:
        torch.testing.assert_close(latents, alone, rtol=0, atol=2e-5 * alone.abs().max().item())


def test_samples_follow_label_number_and_guidance(alone):
    assert alone.shape == (len(LABELS), *MODEL.latent_shape)
    assert alone.isfinite().all()
    assert (alone[0] - alone[5]).abs().max() > 0.1  # of one class, from different noise
    other = run_ranks(
        drawn_on, 1, run_of(), SamplingConfig(sample_method="ddpm", sample_steps=6, guidance=1.0)
    )[0]
    assert (alone - other).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_grid_has_a_row_for_each_class(tmp_path):
    from PIL import Image

    latents = torch.linspace(-1, 1, 6).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    write_grid(tmp_path / "a" / "grid.png", latents, columns=3)
    page = np.asarray(Image.open(tmp_path / "a" / "grid.png"))
    assert page.shape == (2 * 50 + 2, 3 * 50 + 2)  # samples of 6 x 8 pixels, 2 between them
    for number, value in enumerate([0, 51, 102, 153, 204, 255]):
        row, column = divmod(number, 3)
        assert (
            page[row * 50 + 2 : row * 50 + 50, column * 50 + 2 : column * 50 + 50] == value
        ).all()
    assert (page[:2] == 255).all()
    for shape, mode in (((3, 60, 50), "RGB"), ((4, 8, 8), "RGB"), ((2, 3, 8, 8), "L")):
        write_grid(tmp_path / "grid.png", torch.zeros(2, *shape), columns=2)
        assert Image.open(tmp_path / "grid.png").mode == mode


def test_nothing_is_drawn_without_a_folder_or_samples():
    none = replace(
        run_of(),
        sampling=SamplingConfig(samples_per_class=0),
        checkpoint=CheckpointConfig(save="folder"),
    )
    assert picture_writer(None, run_of()) is None
    assert picture_writer(None, none) is None
    assert by_class([3, 5], 2) == [3, 3, 5, 5]


@pytest.mark.parametrize(
    ("settings", "objective", "message"),
    [
        ({"sample_method": "ddim"}, "rectified_flow", "sample_method is ddim"),
        ({"sample_method": "euler"}, "ddpm", "sample_method is euler"),
        ({"sample_steps": 1001}, "v_prediction", "sample_steps is 1001"),
        ({"guidance_channels": 3}, "ddpm", "guidance_channels is 3"),
    ],
)
def test_what_the_objective_cannot_draw_is_refused_at_the_start(settings, objective, message):
    sampling = SamplingConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        sampling.check(Diffusion(DiffusionConfig(objective=objective)))
    config = replace(
        run_of(),
        model=replace(MODEL, learn_sigma=False),
        diffusion=DiffusionConfig(objective=objective),
        sampling=sampling,
    )
    with pytest.raises(ConfigError, match=message):
        validate(config, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"samples_per_class": -1},
        {"sample_classes": 0},
        {"guidance": float("nan")},
        {"guidance_channels": 0},
    ],
)
def test_numbers_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingConfig(**settings)


def test_a_picture_of_a_run_that_is_not_finite_is_a_note(tmp_path, capsys):
    def broken(labels, at_once):
        latents = torch.zeros(len(labels), 1, 8, 8)
        latents[1, 0, 3, 3] = torch.nan
        return latents

    sampling, checkpoint = (
        SamplingConfig(samples_per_class=2, sample_classes=3),
        CheckpointConfig(save=str(tmp_path)),
    )
    config = replace(run_of(), sampling=sampling, checkpoint=checkpoint)
    picture_writer(broken, config)(7)
    assert (
        "iter_0000007.png is not written, because 1 of 6 samples have values that are not"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "samples").exists()
    (tmp_path / "samples").write_text("")
    with pytest.raises(ConfigError, match=r"pictures go to .*samples is a file; give a folder"):
        picture_writer(broken, config)
