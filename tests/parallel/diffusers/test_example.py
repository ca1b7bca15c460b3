"""The script of docs/tasks/video.md on a tiny Wan: clips cached, trained on, resumed, exported."""

import io
import os
import runpy
import sys
from contextlib import redirect_stdout

import pytest
import torch
from safetensors.torch import load_file

from parallel.diffusers import FAMILIES, flow_matching, noise_like
from runtime.ranks import run_ranks
from tests.clips import flags, write_models, write_video
from tests.parallel.diffusers.video_models import WAN
from tests.starts import ROOT, ended
from tools.prepare_clips import main as prepare_clips

pytest.importorskip("diffusers", reason="shards the models of diffusers")
for package in ("accelerate", "av", "peft", "transformers"):
    pytest.importorskip(package, reason="the extra dev has it")

SCRIPT = "docs.examples.finetune_clip"
LORA = "pytorch_lora_weights.safetensors"
BOUND = 2e-6
STEPS = 20


def tiny_wan():
    """Return a Wan of two heads with random weights, the zero-initialised ones included."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**WAN, "num_attention_heads": 2})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Wan and three clips, cached by the tool."""
    root = tmp_path_factory.mktemp("example")
    write_models(root)
    tiny_wan().save_pretrained(root / "wan")
    (root / "videos").mkdir()
    for index, caption in enumerate(["a cat runs", "a dog sleeps in the sun", "the sun"]):
        write_video(root / "videos" / f"{index}.mp4", 9 + index, width=64 + 16 * index)
        (root / "videos" / f"{index}.txt").write_text(caption)
    assert prepare_clips(flags(root / "videos", root, root / "clips")) == 0
    return root


def run_script(folder, output, *words):
    """Run the script in this process; return the losses that it prints, by step."""
    sys.argv = [SCRIPT, f"{folder}/wan", f"{folder}/clips", f"{folder}/{output}", *words]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_module(SCRIPT)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
    return {int(line.split()[1][:-1]): float(line.split()[-1]) for line in lines}


def trained(rank, world_size, folder, runs):
    """The losses of each run of the script."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # as torchrun sets it
    return [run_script(folder, *run) for run in runs]


def differences(expected, actual):
    """The largest difference of each tensor of two steps' adapters."""
    first, second = load_file(expected / LORA), load_file(actual / LORA)
    assert first.keys() == second.keys()
    return {name: float((x - second[name]).abs().max()) for name, x in first.items()}


@pytest.fixture(scope="module")
def losses(folder):
    """Losses of 20 steps on 2 groups of 2 ranks, of 10, of those resumed, and of one process."""
    pairs = ["--context", "2"]
    resume = ["--resume", f"{folder}/stopped/step-10"]
    runs = [
        ["ranks", *pairs, "--steps", str(STEPS)],
        ["stopped", *pairs, "--steps", "10"],
        ["resumed", *pairs, "--steps", str(STEPS), *resume],
    ]
    whole, stopped, resumed = run_ranks(trained, 4, str(folder), runs)[0]
    alone = [["alone", "--clips-per-group", "2", "--steps", str(STEPS)]]
    ((one_process,),) = run_ranks(trained, 1, str(folder), alone)
    return {"ranks": whole, "stopped": stopped, "resumed": resumed, "alone": one_process}


def test_two_groups_of_two_ranks_train_as_one_process(folder, losses):
    assert list(losses["alone"]) == list(range(1, STEPS + 1))
    assert losses["ranks"] == pytest.approx(losses["alone"], abs=BOUND)
    last = f"step-{STEPS}"
    errors = differences(folder / "alone" / last, folder / "ranks" / last)
    assert max(errors.values()) < BOUND
    first = load_file(folder / "stopped" / "step-10" / LORA)
    moved = differences(folder / "stopped" / "step-10", folder / "ranks" / last)
    assert min(moved.values()) > 100 * BOUND, "every tensor is trained"
    assert len(first) == 32


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(folder, losses):
    both = losses["stopped"] | losses["resumed"]
    assert both == pytest.approx(losses["ranks"], abs=BOUND)
    assert len(losses["resumed"]) == 10
    last = f"step-{STEPS}"
    errors = differences(folder / "ranks" / last, folder / "resumed" / last)
    assert max(errors.values()) < BOUND


def test_the_lora_changes_a_plain_model_as_it_was_trained(folder, losses):
    from diffusers import WanTransformer3DModel

    adapter = folder / "ranks" / f"step-{STEPS}"
    clip = load_file(folder / "clips" / "clip-00001.safetensors")
    latents, text = clip["latents"][None], clip["text"][None]
    time = torch.tensor([0.7])
    noisy, target = flow_matching(latents, noise_like(latents, [0], seed=3), time)

    def predict(model):
        with torch.no_grad():
            return model.eval()(noisy, 1000 * time, text, return_dict=False)[0]

    base = WanTransformer3DModel.from_pretrained(folder / "wan")
    before = predict(base)
    for name, b in load_file(adapter / LORA).items():
        if "lora_B" in name:
            a = load_file(adapter / LORA)[name.replace("lora_B", "lora_A")]
            layer = base.get_submodule(name.removesuffix(".lora_B.weight"))
            layer.weight.data += 8 / 16 * b @ a  # alpha over rank
    merged = predict(base)

    plain = WanTransformer3DModel.from_pretrained(folder / "wan")
    plain.load_lora_adapter(adapter, prefix=None, use_safetensors=True)
    torch.testing.assert_close(predict(plain), merged, rtol=0, atol=1e-5)
    assert (merged - before).abs().max() > 1e-3
    assert (merged - target).square().mean() < (before - target).square().mean()


def test_the_script_is_short_and_the_page_names_every_class():
    lines = (ROOT / "docs/examples/finetune_clip.py").read_text().splitlines()
    assert len(lines) <= 60
    page = (ROOT / "docs/tasks/video.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_pages_command_trains_in_bfloat16(folder):
    words = [f"{folder}/wan", f"{folder}/clips", f"{folder}/bf16", "--context", "2", "--steps", "2"]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = ended([*launch, "-m", SCRIPT, *words], cwd=ROOT, ACCELERATE_MIXED_PRECISION="bf16")
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    weights = load_file(folder / "bf16" / "step-2" / LORA)
    assert {x.dtype for x in weights.values()} == {torch.float32}
