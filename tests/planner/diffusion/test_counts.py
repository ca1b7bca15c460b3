"""Tokens, weights, FLOPs and traffic of diffusers' models, counted from their config.json."""

import json
from collections import Counter

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from planner.diffusion.clip import (
    CLASSES,
    MODELS,
    Clip,
    ClipError,
    load_transformer,
    transformer_of,
)
from planner.diffusion.run import clip_flops, traces_of, whole_traces
from planner.diffusion.symbols import Training
from planner.diffusion.transformer import Grid, ModelError
from tests.planner.diffusion.models import (
    BLOCKS,
    CONFIGS,
    WAN,
    built,
    described,
    inputs,
    predicted_of,
)

pytest.importorskip("diffusers", reason="compares with diffusers' models")

PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_dot",
    "aten.convolution",
)
VIEWS = (
    "aten.view aten.t. aten.transpose aten.detach aten.unsqueeze aten.squeeze aten.split "
    "aten.slice aten.select aten.expand aten.as_strided aten._unsafe_view aten.alias aten.permute "
    "aten.unbind aten.empty"
).split()


@pytest.mark.parametrize(
    ("name", "clip", "tokens", "attended"),
    [
        ("wan2.1_14b", Clip(frames=81, height=720, width=1280), 75_600, 75_600),
        ("wan2.1_14b", Clip(frames=81, height=480, width=832), 32_760, 32_760),
        ("wan2.1_14b", Clip(frames=93, height=480, width=832), 37_440, 37_440),
        ("wan2.2_ti2v_5b", Clip(frames=121, height=704, width=1280), 27_280, 27_280),
        ("hunyuan_video", Clip(frames=129, height=720, width=1280), 118_800, 119_056),
        ("hunyuan_video_1.5", Clip(frames=121, height=480, width=832), 48_360, 50_345),
        ("flux_dev", Clip(frames=1, height=1024, width=1024), 4_096, 4_608),
        (
            "wan2.1_14b",
            Clip(frames=121, height=704, width=1280, vae=Grid(4, 16, 16)),
            27_280,
            27_280,
        ),
    ],
)
def test_a_clip_makes_tokens(name, clip, tokens, attended):
    model, _ = load_transformer(name)
    assert clip.image_tokens(model) == tokens
    assert clip.attended_tokens(model) == attended


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("wan2.1_14b", {"frames": 80}, "frames is 80, but .* use 77 or 81"),
        ("wan2.1_14b", {"height": 470}, "height is 470, .* multiple of 16; use 464 or 480"),
        ("wan2.2_ti2v_5b", {"width": 848}, "width is 848, .* multiple of 32; use 832 or 864"),
        ("flux_dev", {"frames": 5}, "frames is 5, but FluxTransformer2DModel makes pictures"),
        ("wan2.1_14b", {"frames": 0}, "frames is 0; it must be 1 or more"),
        ("wan2.1_14b", {"text": 0}, "text is 0; it must be 1 token or more"),
        ("wan2.1_i2v_14b", {"text": 256}, "text is 256, but diffusers takes exactly 512"),
    ],
)
def test_sizes_that_give_no_whole_tokens_are_refused_with_the_nearest(name, sizes, message):
    model, _ = load_transformer(name)
    clip = Clip(**{"frames": 1, "height": 480, "width": 832, **sizes})
    with pytest.raises(ClipError, match=message):
        clip.local_tokens(model, clip.attended_tokens(model))


@pytest.mark.parametrize("file", sorted(MODELS.glob("*.json")), ids=lambda file: file.stem)
def test_weights_are_those_of_the_class(file):
    import diffusers

    model, _ = load_transformer(file.stem)
    entries = json.loads(file.read_text())
    assert set(entries) == {"_class_name", *model.defaults}
    with torch.device("meta"):
        kind = getattr(diffusers, entries.pop("_class_name"))
        parameters = sum(x.numel() for x in kind(**entries).parameters())
    clip = Clip(frames=1, height=480, width=832)
    assert whole_traces(model, clip, Training()).parameters == parameters


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_those_of_the_class(name):
    import inspect

    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    defaults = {key: value.default for key, value in parameters.items() if key != "self"}
    assert CLASSES[name].defaults == defaults


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_and_weights_equal_those_of_a_tiny_model(name):
    model, clip = described(name)
    real = built(name)
    training = Training(element_size=4)
    traces = whole_traces(model, clip, training)
    assert traces.parameters == sum(x.numel() for x in real.parameters())

    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        prediction = predicted_of(real, inputs(name))
    forward, backward = clip_flops(model, clip, training)
    assert counter.get_total_flops() == forward

    with counter, sdpa_kernel(SDPBackend.MATH):
        prediction.sum().backward()
    computed = counter.get_total_flops()
    if name == "hunyuan 1.5":  # nothing reads the text tokens of its last block
        assert 0.95 * backward < computed < backward
    else:
        assert computed == backward


@pytest.mark.parametrize(
    ("name", "clip", "flops"),
    [
        ("wan2.1_14b", Clip(frames=93, height=480, width=832), 6.18e15),
        ("wan2.1_14b", Clip(frames=81, height=720, width=1280), 1.96e16),
        ("wan2.1_14b", Clip(frames=81, height=480, width=832), 5.04e15),
        ("wan2.1_1.3b", Clip(frames=81, height=480, width=832), 8.50e14),
        ("wan2.2_ti2v_5b", Clip(frames=121, height=704, width=1280), 1.55e15),
    ],
)
def test_flops_of_a_step_are_the_published_ones(name, clip, flops):
    """The published count of Wan 2.1 14B at 37,440 tokens is 6.19e15: three forwards."""
    model, _ = load_transformer(name)
    assert sum(clip_flops(model, clip, Training())) == pytest.approx(flops, rel=2e-3)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators other than products read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith((*PRODUCTS, *VIEWS)):
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.bytes[str(func)] += sum(x.numel() * x.element_size() for x in tensors)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["wan", "hunyuan", "flux"])
def test_bytes_between_products_are_counted(name, dtype):
    model, clip = described(name)
    real = built(name, dtype)
    training = Training(dtype.itemsize, fused_norms=False, sharded=False)
    tokens = clip.local_tokens(model, clip.attended_tokens(model))
    traces = traces_of(model, training, tokens)
    lists = [getattr(real, blocks) for blocks in BLOCKS if hasattr(real, blocks)]
    first_of_lists = [traces.blocks[0], traces.blocks[-1]][: len(lists)]
    for blocks, described_block in zip(lists, first_of_lists, strict=True):
        calls = []
        handle = blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs, calls=calls: calls.append((args, kwargs)), with_kwargs=True
        )
        predicted_of(real, inputs(name, dtype))
        handle.remove()
        (args, kwargs) = calls[0]
        with Traffic() as traffic:
            blocks[0](*args, **kwargs)
        assert described_block.moved == pytest.approx(traffic.bytes.total(), rel=0.08)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "UNet2DModel"}, "_class_name is 'UNet2DModel'; the planner supports only"),
        ({"_class_name": None}, "_class_name is None"),
        ({"window_size": [-1, -1]}, r"unknown key window_size \(value \[-1, -1\]\)"),
        ({"image_dim": 1280}, "image_dim is 1280, but added_kv_proj_dim is None"),
        ({"num_layers": "two"}, "num_layers is 'two'; it must be an integer of 1 or more"),
        ({"num_layers": 0}, "num_layers is 0; it must be an integer of 1 or more"),
        ({"num_layers": True}, "num_layers is True"),
        ({"eps": "1e-6"}, "eps is '1e-6'; it must be a number above 0"),
        ({"patch_size": [1, 2]}, r"patch_size is \[1, 2\]; it must be 3 integers of 1 or more"),
        ({"cross_attn_norm": 1}, "cross_attn_norm is 1; it must be a value like True"),
        ({"image_dim": "wide"}, "image_dim is 'wide'; it must be an integer"),
    ],
)
def test_what_may_compute_something_else_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        transformer_of({**WAN, **change})


def test_other_variants_of_hunyuan_video_and_flux_are_refused():
    hunyuan = CONFIGS["hunyuan"]
    with pytest.raises(ModelError, match="image_condition_type is 'token_replace'"):
        transformer_of({**hunyuan, "image_condition_type": "token_replace"})
    with pytest.raises(ModelError, match=r"qk_norm is 'layer_norm'; .* only with 'rms_norm'"):
        transformer_of({**CONFIGS["hunyuan 1.5"], "qk_norm": "layer_norm"})
    with pytest.raises(ModelError, match="patch_size is 2"):
        transformer_of({**CONFIGS["flux"], "patch_size": 2})


def test_a_model_is_a_file_a_folder_a_pipeline_or_a_name(tmp_path):
    file = tmp_path / "pipeline" / "transformer" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**WAN, "_diffusers_version": "0.42.1"}))
    for path in (file, file.parent, tmp_path / "pipeline"):
        model, found_file = load_transformer(str(path))
        assert (model.hidden, found_file) == (96, file)
    with pytest.raises(ModelError, match=r"none: cannot be read .* configs/diffusers: flux_dev"):
        load_transformer("none")
    file.write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        load_transformer(str(file))
    file.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_transformer(str(file))
