"""Advice on softmax attention's kernel on a GPU: which runs, which is faster, how to get it."""

from kernels.backends import SOFTMAX
from kernels.backends.cudnn import FAST_CUDNN, prefers_cudnn
from kernels.backends.flash_attention import ABSENT, FlashAttention
from kernels.gpu import Gpu, version_of


def native_version(here: Gpu) -> FlashAttention | None:
    """Return the version of FlashAttention that was written for this GPU."""
    versions = (backend for backend in SOFTMAX.values() if isinstance(backend, FlashAttention))
    return next((version for version in versions if version.native == here.capability[0]), None)


def describe_kernel(kernel: str, here: Gpu) -> str:
    """Name a backend of a GPU and its cuDNN in a few words."""
    brings = (
        f", where torch brings {version_of(here.bundled)}"
        if here.bundled not in (0, here.cudnn)
        else ""
    )
    loaded = f"cuDNN {version_of(here.cudnn)} loaded{brings}" if here.cudnn else "no cuDNN loaded"
    title = SOFTMAX[kernel].title if kernel in SOFTMAX else ""
    named = kernel if title.lower() in ("", kernel) else f"{kernel} ({title})"
    return f"{named}, {loaded}"


def warning(
    kernel: str, here: Gpu, requested: str = "auto", *, documents: bool = False, head_dim: int = 128
) -> str | None:
    """Warn of a kernel that is slower than another on this GPU, or of a shadowed cuDNN.

    The message has the factor and the fix.

    Args:
        kernel: the backend that runs; ``requested`` is the one that was asked for.
        documents, head_dim: packed documents, and channels of a head.
    """
    native = native_version(here)
    if native is None or kernel not in ("aten", "cudnn"):
        return None
    if head_dim > 128 and here.family == "blackwell":  # which FlashAttention 2 alone takes there
        return None
    shadowed = 0 < here.cudnn < here.bundled
    newer = _newer_cudnn(here, shadowed)

    if kernel == "cudnn":
        right = prefers_cudnn(here)
        wrong = (
            ""
            if right
            else f"; before {version_of(FAST_CUDNN)} lengths that 128 does not divide can come out wrong"
        )
        return None if right and not shadowed else newer + wrong

    reason = native.problem()
    install = f"install {native.title} ({native.install})" + (
        "" if reason in (None, ABSENT) else f": {reason}"
    )
    fix = f"packed documents pass cuDNN over: {install}" if documents else f"{newer}, or {install}"
    if requested == "aten":
        fix = "leave --attention-backend out"
    elif reason is None:
        fix = newer
    slow, cudnn, fast = (
        SOFTMAX[name].shares[here.family] for name in ("aten", "cudnn", native.name)
    )
    published = (
        " (published, on H100: 606 s a step in place of 373 s)" if here.family == "hopper" else ""
    )
    return (
        f"attention runs by FlashAttention 2, at about {slow} of this GPU's peak, where cuDNN reaches {cudnn} and "
        f"{native.title} {fast}, and takes at least {min(cudnn, fast) / slow:.1f} times as long{published}. {fix}"
    )


def _newer_cudnn(here: Gpu, shadowed: bool) -> str:
    loaded = f"cuDNN {version_of(here.cudnn)} is loaded" if here.cudnn else "no cuDNN is loaded"
    if shadowed:
        return (
            f"{loaded} in the place of torch's own {version_of(here.bundled)}: take its folder out of "
            "LD_LIBRARY_PATH, or put nvidia/cudnn/lib of torch's environment before it"
        )
    return f"{loaded}: install {version_of(FAST_CUDNN)} or newer, as torch for CUDA 13 brings"
