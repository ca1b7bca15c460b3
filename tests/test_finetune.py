"""`--finetune --load` of an imported model.

Fresh counters, the same losses on every mesh, changed rope noted.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.tokenizer import load_tokenizer
from model.hf import load_hf, save_hf
from model.registry import architecture_of, build_model
from runtime.errors import UserError
from tests.model.models import model_config
from tests.pretraining import differences, pretrain
from tools.convert_hf import export_model, import_model
from train.checkpoint.api import CheckpointConfig
from train.config.language import load_config, parse_args
from train.resume.start import find_start

BOUND = 2e-6
STEPS = ("--train-iters", "3", "--seq-length", "128", "--micro-batch-size", "2")
LONGER = {"max_position_embeddings": 128}
"""Settings that an export of a run of these steps has, and the import had not."""
ALONE = ("--context-parallel-method", "none")


@pytest.fixture(scope="module")
def imported(default_data, tmp_path_factory):
    """A Qwen3 with random weights in bfloat16, imported twice."""
    folder = tmp_path_factory.mktemp("imported")
    config = model_config(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=24,
        qk_layernorm=True,
        vocab_size=load_tokenizer(f"{default_data}.model").vocab_size,
        rotary_base=5000.0,
        init_method_std=0.1,
    )
    model = build_model(config)
    model.init_weights(7)
    save_hf(
        folder / "theirs",
        config,
        model.to(torch.bfloat16).state_dict(),
        {"max_position_embeddings": 64},
    )
    for name in ("one", "two"):
        import_model(folder / "theirs", folder / name)
    return [folder / "one", folder / "two"]


def finetuned(ranks, data, save, run, *flags):
    return pretrain(
        ranks, data, save, "--config", str(run / "config.toml"), "--load", str(run), *STEPS, *flags
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture(scope="module")
def alone(default_data, imported, trained):
    return finetuned(1, default_data, trained, imported[0], "--finetune", *ALONE)


def exported(run, theirs, out):
    """Weights of a model that was imported, and of a run's export.

    The run has the same settings else.
    """
    export_model(run, out, None, None, 10**9)
    before, after = load_hf(theirs), load_hf(out)
    assert replace(before[0], **LONGER) == after[0]
    assert before[2] | LONGER == after[2]
    return before[1], after[1]


def test_what_was_finetuned_is_exported_as_what_was_imported(imported, alone, trained, tmp_path):
    """Its type and the entries of its config.json.

    Its checkpoint has float32 and a folder of its own.

    A run that goes on has its own folder as load, and no longer says where its weights came from.
    """
    assert not load_config(trained / "config.toml").checkpoint.finetune  # it would begin again
    before, after = exported(trained, imported[0].parent / "theirs", tmp_path / "out")
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert not torch.equal(before["embedding.weight"], after["embedding.weight"])
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    config_text = (run / "config.toml").read_text()
    assert str(imported[0]) in config_text
    (run / "config.toml").write_text(config_text.replace(str(imported[0]), str(run)))
    exported(run, imported[0].parent / "theirs", tmp_path / "again")


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("--tensor-model-parallel-size 4", marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2 --load hf:{}", marks=pytest.mark.slow),
        pytest.param("--pipeline-model-parallel-size 2 --load hf:{}", marks=pytest.mark.slow),
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
    ],
)
def test_another_mesh_has_the_same_losses(mesh, default_data, imported, alone, tmp_path):
    flags = mesh.format(imported[0].parent / "theirs").split()
    got = finetuned(4, default_data, tmp_path / "run", imported[1], "--finetune", *flags)
    assert differences(got, alone) <= BOUND
    assert (got[0]["iteration"], got[0]["consumed_samples"]) == (1, 4)


def test_a_hugging_face_folder_does_what_its_import_does(
    default_data, imported, alone, tmp_path, capsys
):
    """The same losses to the bit.

    The run is exported as theirs, and its config.toml does not begin there again.
    """
    theirs, save = imported[0].parent / "theirs", tmp_path / "run"
    got = finetuned(
        1, default_data, save, imported[0], "--finetune", "--load", f"hf:{theirs}", *ALONE
    )
    assert differences(got, alone) == 0
    assert f"weights from {theirs}; everything else starts from scratch" in capsys.readouterr().out
    assert load_config(save / "config.toml").checkpoint == CheckpointConfig(save=str(save))
    exported(save, theirs, tmp_path / "out")


def test_a_hugging_face_folder_that_is_not_this_model_is_refused(imported, tmp_path):
    def begun(folder, *flags):
        config = parse_args(
            ["--config", str(imported[0] / "config.toml"), "--load", f"hf:{folder}", *flags]
        )
        model = build_model(config.model)
        optimizer = torch.optim.SGD(model.parameters())
        find_start(config, architecture_of(config.model), {}).load([model], optimizer)

    theirs = imported[0].parent / "theirs"
    begun(theirs, "--finetune")
    pickled, broken = (
        Path(shutil.copytree(theirs, tmp_path / name)) for name in ("pickled", "broken")
    )
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors")
    for folder, flags, message in (
        (theirs, (), "a folder with only weights, but finetune is not set; give --finetune"),
        (
            theirs,
            ("--finetune", "--ckpt-step", "1"),
            "a folder with only weights, but ckpt_step is 1",
        ),
        (
            theirs,
            ("--finetune", "--num-layers", "3"),
            "a different architecture: num_layers is 2 in the checkpoint and 3 in this run",
        ),
        (
            tmp_path / "none",
            ("--finetune",),
            "none/config.json does not exist; give the folder of a Hugging Face",
        ),
        (pickled, ("--finetune",), "pytorch_model.bin is a pickle, which can run code"),
        (
            broken,
            ("--finetune",),
            "layers.1.mlp.up_proj.weight: 1 of [0-9]+ values are not finite",
        ),
    ):
        with pytest.raises(UserError, match=message):
            begun(folder, *flags)


def test_a_run_going_on_from_iteration_0_has_them_too(default_data, imported, alone, tmp_path):
    assert (
        differences(finetuned(1, default_data, tmp_path / "run", imported[1], *ALONE), alone) == 0
    )


def test_dynamic_rope_goes_by_the_length_of_each_run(default_data, imported, tmp_path):
    """A run's config.toml keeps no length that was not given.

    The export has the one that it was trained at.
    """
    dynamic = (
        "dynamic",
        "--rope-scaling-factor",
        "2",
        "--rope-scaling-original-max-position-embeddings",
        "64",
    )
    run, save = imported[0], tmp_path / "run"
    finetuned(
        1,
        default_data,
        save,
        run,
        "--finetune",
        "--rope-scaling-type",
        *dynamic,
        *ALONE,
        "--train-iters",
        "1",
    )
    written = load_config(save / "config.toml")
    assert (written.model.rope_scaling_type, written.model.rope_scaling_seq_length) == (
        "dynamic",
        None,
    )
    export_model(save, tmp_path / "out", None, None, 10**9)
    longer = written.model.rotary_base * 3 ** (24 / 22)  # 2 * 128 / 64 - 1
    assert load_hf(tmp_path / "out")[0].rotary_base == pytest.approx(longer)


def test_other_weights_and_another_rope_have_other_losses(
    default_data, imported, alone, tmp_path, capsys
):
    """Negative control, and notes on what changed and on what is beyond the model's reach."""
    (tmp_path / "afresh").mkdir()
    afresh = finetuned(
        1, default_data, tmp_path / "new", imported[0], "--load", str(tmp_path / "afresh"), *ALONE
    )
    assert differences(afresh, alone) > 1e-3
    assert "note: seq_length 128 is 2 times the 64 positions" in capsys.readouterr().out
    scaling = ("--rope-scaling-type", "linear", "--rope-scaling-factor", "2")
    scaled = finetuned(
        1, default_data, tmp_path / "scaled", imported[0], "--finetune", *scaling, *ALONE
    )
    assert differences(scaled, alone) > 100 * BOUND
    assert "note: rope_scaling_type was None and is linear" in capsys.readouterr().out
