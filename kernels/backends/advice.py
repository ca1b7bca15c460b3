"""Advice about softmax attention on a GPU: the kernel that runs, and how to get a faster one."""

from kernels.backends import SOFTMAX
from kernels.backends.cudnn import FAST_CUDNN, prefers_cudnn
from kernels.backends.flash_attention import ABSENT, FlashAttention
from kernels.gpu import Gpu, version_of


def native_version(gpu: Gpu) -> FlashAttention | None:
    """Return the FlashAttention version that was written for this GPU; None if there is none."""
    for backend in SOFTMAX.values():
        if isinstance(backend, FlashAttention) and backend.native == gpu.capability[0]:
            return backend
    return None


def describe_kernel(kernel: str, gpu: Gpu) -> str:
    """Describe a backend, its GPU and its cuDNN in a few words."""
    loaded = "no cuDNN loaded"
    if gpu.cudnn:
        loaded = f"cuDNN {version_of(gpu.cudnn)} loaded"
        if gpu.bundled not in (0, gpu.cudnn):
            loaded += f" instead of torch's own {version_of(gpu.bundled)}"

    title = SOFTMAX[kernel].title if kernel in SOFTMAX else ""
    if title.lower() in ("", kernel):
        return f"{kernel}, {loaded}"
    return f"{kernel} ({title}), {loaded}"


def warning(
    kernel: str, gpu: Gpu, requested: str = "auto", *, is_packed: bool = False, head_dim: int = 128
) -> str | None:
    """Return a warning if a faster kernel exists, or if the loaded cuDNN is too old.

    It states how much slower the kernel is, or what the old cuDNN causes, and the fix. None if
    nothing is wrong.

    Args:
        kernel: the backend that runs; ``requested`` is the backend named in the configuration.
        is_packed: True for packed documents.
        head_dim: number of channels of a head.
    """
    native = native_version(gpu)
    if native is None or kernel not in ("aten", "cudnn"):
        return None
    if head_dim > 128 and gpu.family == "blackwell":  # only FlashAttention 2 supports it
        return None

    shadowed = 0 < gpu.cudnn < gpu.bundled
    newer_cudnn = _newer_cudnn(gpu, shadowed)
    if kernel == "cudnn":
        if not prefers_cudnn(gpu):
            return (
                f"{newer_cudnn}; before {version_of(FAST_CUDNN)}, results can be wrong for lengths"
                " that 128 does not divide"
            )
        return newer_cudnn if shadowed else None

    problem = native.problem()
    install = f"install {native.title} ({native.install})"
    if problem not in (None, ABSENT):
        install += f": {problem}"
    if requested == "aten":
        fix = "leave --attention-backend out"
    elif problem is None:
        fix = newer_cudnn
    elif is_packed:
        fix = f"packed documents do not use cuDNN: {install}"
    else:
        fix = f"{newer_cudnn}, or {install}"

    slow = SOFTMAX["aten"].shares[gpu.family]
    cudnn = SOFTMAX["cudnn"].shares[gpu.family]
    fast = native.shares[gpu.family]
    published = ""
    if gpu.family == "hopper":
        published = " (published for an H100: 606 s per step instead of 373 s)"
    return (
        f"attention uses FlashAttention 2, at about {slow} of this GPU's peak, but cuDNN reaches"
        f" {cudnn} and {native.title} {fast}, so it takes at least"
        f" {min(cudnn, fast) / slow:.1f} times as long{published}. {fix}"
    )


def _newer_cudnn(gpu: Gpu, shadowed: bool) -> str:
    loaded = f"cuDNN {version_of(gpu.cudnn)} is loaded" if gpu.cudnn else "no cuDNN is loaded"
    if shadowed:
        return (
            f"{loaded} instead of torch's own {version_of(gpu.bundled)}: remove its folder from"
            " LD_LIBRARY_PATH, or put nvidia/cudnn/lib of torch's environment before it"
        )
    return f"{loaded}: install {version_of(FAST_CUDNN)} or newer, which torch for CUDA 13 includes"
