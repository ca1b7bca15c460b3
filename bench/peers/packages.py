"""Other packages: which can be measured here, and why the rest cannot."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET = 512
"""Queries and keys of a tile of ring-attention-pytorch: its own default."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) ``[B, T_local, H, D]`` -> out, causal over the whole sequence of all ranks."""


class Package(NamedTuple):
    """A package that does what ours does, and what it is measured in."""

    name: str
    module: str
    measures: tuple[str, ...]
    on_cpu: str = ""
    """Why it cannot be measured without a GPU; empty where it can."""


PACKAGES = (
    Package("ring-attention-pytorch", "ring_attention_pytorch", ("attention",)),
    Package("transformers", "transformers", ("training",)),
    Package("x-transformers", "x_transformers", ("training",)),
    Package("ring-flash-attn", "ring_flash_attn", ("attention",), "its tiles are flash-attn's kernels, for CUDA"),
    Package("yunchang", "yunchang", ("attention",), "its backward is for flash-attn's kernels, not for torch's"),
    Package(
        "torch's context_parallel",
        "torch.distributed.tensor.experimental._attention",
        ("attention",),
        "it has no rule for the CPU's kernel, aten._scaled_dot_product_flash_attention_for_cpu",
    ),
    Package("flash-linear-attention", "fla", ("attention",), "its kernels are Triton's, which compile for a GPU"),
    Package("megatron-core", "megatron.core.transformer", ("training",)),
    Package("nanoGPT", "nanogpt", ("training",), "it is a GPT and not a package; these are LLaMAs"),
    Package("litgpt", "litgpt", ("training",), "it wants huggingface-hub below 1.4, transformers 1.31 or newer"),
)


def refusal(package: Package) -> str | None:
    """Return why a package is not measured here; None if it is."""
    if package.on_cpu and not torch.cuda.is_available():
        return package.on_cpu
    try:
        import_module(package.module)
    except ImportError as error:
        return f"not installed ({error}); make peers installs what it measures"
    return "no measurement of it is written for a GPU" if package.on_cpu else None


def measurable(what: str) -> list[str]:
    """Return the names of the packages whose attention, or training, is measured here."""
    return [package.name for package in PACKAGES if what in package.measures and refusal(package) is None]


def versions() -> dict[str, str]:
    """Return the versions of the packages that can be measured."""
    return {package.name: version(package.name) for package in PACKAGES if refusal(package) is None}


def attention_of(name: str) -> Attention:
    """Return a package's attention over the ranks of the default group, each with a contiguous shard.

    ring-attention-pytorch's striped form computes as many tiles: without CUDA it masks those that it does not need.
    """
    assert name == "ring-attention-pytorch"
    from ring_attention_pytorch import ring, ring_flash_attention

    # Without this, 0.5.20 takes what its last pass received and sent for dk and dv: the gradients are wrong.
    ring_flash_attention.ring_pass = lambda *given: ring.ring_pass(*given)[0]
    return lambda q, k, v: ring_flash_attention.ring_flash_attn(q, k, v, None, True, BUCKET, True)
