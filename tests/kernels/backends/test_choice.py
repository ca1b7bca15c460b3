"""Attention kernels of a GPU, on a CPU: which one is taken and why, and what a run is warned of."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels import gpu
from kernels.attention import automatic_backend
from kernels.backends import SOFTMAX
from kernels.backends.advice import warning
from kernels.backends.cudnn import prefers_cudnn
from kernels.backends.flash_attention import ABSENT, FlashAttention
from kernels.gpu import Gpu, family_of, version_of
from planner.cluster import CLUSTERS, load_cluster
from runtime.machine import cudnn_number
from tests.kernels.gpus import A100, B200, H100, OLD, SHADOWED


@pytest.mark.parametrize(
    ("device_gpu", "is_packed", "usable", "kernel_name"),
    [
        (Gpu(), False, True, "aten"),
        (A100, False, True, "aten"),
        (H100, False, True, "cudnn"),
        (H100, True, True, "flash_attn_3"),
        (H100, True, False, "aten"),
        (Gpu((9, 0), 91500), False, False, "aten"),  # wrong at some lengths
        (Gpu((9, 0), 91501), False, False, "cudnn"),
        (OLD, False, True, "flash_attn_3"),
        (B200, False, True, "cudnn"),
        (Gpu((10, 3), 92000), False, True, "cudnn"),
        (B200, True, True, "flash_attn_4"),
        (Gpu((12, 0), 92000), False, True, "aten"),  # consumers' Blackwell
    ],
)
def test_the_fastest_right_kernel_is_taken(device_gpu, is_packed, usable, kernel_name, monkeypatch):
    checked = []
    monkeypatch.setattr(
        FlashAttention,
        "problem",
        lambda backend: checked.append(backend) or (None if usable else ABSENT),
    )
    assert automatic_backend("cuda", device_gpu, is_packed).name == kernel_name
    assert len(checked) <= 1, "the others' packages, which take seconds to import, are left alone"
    assert not prefers_cudnn(device_gpu) or kernel_name == "cudnn" or is_packed


CUDNN = "nvidia-cudnn-cu13"


def test_versions_of_cudnn():
    assert (cudnn_number("9.20.0.48"), cudnn_number("9.15.1")) == (92000, 91501)
    assert [version_of(x) for x in (92000, 91501, 91002)] == ["9.20.0", "9.15.1", "9.10.2"]


@pytest.mark.parametrize(
    ("required", "installed", "expected_version"),
    [
        ([f"{CUDNN}==9.20.0.48; platform_system == 'Linux'", "numpy"], {CUDNN: "9.20.0.48"}, 92000),
        ([f"{CUDNN}==9.10.2.21"], {CUDNN: "9.25.0.15"}, 92500),  # upgraded by hand
        ([f"{CUDNN}==9.20.0.48"], {}, 0),
        (None, {}, 0),
    ],
)
def test_the_cudnn_that_came_with_torch(required, installed, expected_version, monkeypatch):
    def version(name):
        if name not in installed:
            raise gpu.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(gpu.metadata, "requires", lambda _: required)
    monkeypatch.setattr(gpu.metadata, "version", version)
    assert gpu.bundled_cudnn() == expected_version


def test_a_gpu_is_detected_though_torch_refuses_its_cudnn(monkeypatch):
    """An older cuDNN than torch was built with.

    torch's own question for the version raises, its kernels do not.
    """

    def refused():
        raise RuntimeError("cuDNN version incompatibility")

    assert gpu.gpu.__wrapped__() == Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H20")
    monkeypatch.setattr(gpu, "bundled_cudnn", lambda: 92000)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert gpu.gpu.__wrapped__() == H100._replace(name="NVIDIA H20")
    monkeypatch.setattr(torch.backends.cudnn, "version", refused)
    monkeypatch.setattr(
        torch._C, "_cudnn", SimpleNamespace(getRuntimeVersion=lambda: (9, 10, 2)), raising=False
    )
    assert gpu.gpu.__wrapped__() == SHADOWED._replace(name="NVIDIA H20")


CARDS = {
    path.stem: re.search(r"(?:^|_)(g?[hb]\d+)", path.stem)
    for path in sorted(CLUSTERS.glob("*.toml"))
}


@pytest.mark.parametrize(
    ("file", "card"),
    [(file, published[1].upper()) for file, published in CARDS.items() if published],
)
def test_shares_are_those_that_the_planner_has(file, card):
    cluster, major = load_cluster(CLUSTERS / f"{file}.toml"), 9 if card.startswith("H") else 10
    family = Gpu((major, 0), name=f"NVIDIA {card}").family
    assert family_of(cluster.name) == family
    stated = {
        backend.rate_name or name: backend.shares[family]
        for name, backend in SOFTMAX.items()
        if family in backend.shares
    }
    assert cluster.kernel_fractions == stated
    unstated = replace(cluster, kernel_fractions={})
    for name in SOFTMAX:
        assert unstated.running(name) == replace(cluster.running(name), kernel_fractions={})


FASTER = (
    "at about 0.31 of this GPU's peak, but cuDNN reaches 0.53 and FlashAttention 3 0.66, so it "
    "takes at least 1.7"
)


@pytest.mark.parametrize(
    ("kernel", "device_gpu", "more", "words"),
    [
        ("cudnn", H100, {}, ()),
        ("cudnn", Gpu((9, 0), 92500, 92000), {}, ()),
        ("flash_attn_3", OLD, {}, ()),
        ("aten", B200, {"head_dim": 256}, ()),  # which nothing else takes
        (
            "aten",
            OLD,
            {},
            (FASTER, "606 s", "9.10.2 is loaded: install 9.15.1 or newer", "or install Flash"),
        ),
        (
            "aten",
            SHADOWED,
            {},
            (FASTER, "instead of torch's own 9.20.0: remove its folder from LD_LIB"),
        ),
        ("aten", H100, {"requested": "aten"}, (FASTER, "leave --attention-backend out")),
        (
            "aten",
            H100,
            {"is_packed": True, "why_not": "its import fails (X)"},
            (FASTER, "its import fails (X)"),
        ),
        (
            "aten",
            B200,
            {"is_packed": True},
            ("about 0.15 of", "4 0.6, so it takes at least 4.0 times as long. p"),
        ),
        (
            "aten",
            OLD._replace(name="NVIDIA H20"),
            {},
            (
                "about 0.6 of",
                "takes at least 1.3 times as long. c",
            ),
        ),
        (
            "cudnn",
            SHADOWED,
            {"requested": "cudnn"},
            ("torch's own 9.20.0", "can be wrong for lengths that 128 does not divide"),
        ),
    ],
)
def test_a_slower_kernel_is_warned_of_with_the_factor_and_the_fix(
    kernel, device_gpu, more, words, monkeypatch
):
    reason = more.get("why_not", ABSENT)
    monkeypatch.setattr(FlashAttention, "problem", lambda backend: reason)
    message = warning(
        kernel, device_gpu, **{name: value for name, value in more.items() if name != "why_not"}
    )
    assert (message is None) == (not words), message
    assert all(word in (message or "") for word in words), message
    assert "\n" not in (message or "")
    assert "None" not in (message or "")
