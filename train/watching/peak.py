"""Peak matrix-product rate, which model FLOPs utilisation (MFU) is measured against."""

import time

import torch

from kernels.products import linear

# Dense bfloat16 FLOP/s by the makers' data sheets; names as in torch.cuda.get_device_name.
DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "4090": 165e12}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s that one process can reach: a GPU's bfloat16 data sheet figure, else measured now.

    Call it on all ranks at once: on a shared CPU each then measures its share.
    """
    if device.type == "cuda" and dtype is torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for model, flops in DATA_SHEET.items():
            if model in name:
                return flops
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Measure the FLOP/s of square matrix products, for about ``seconds`` after a warm-up."""
    side = 4096 if device.type == "cuda" else 768
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def products(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    products(3)
    count = max(1, int(seconds / 3 / max(products(3) / 3, 1e-6)))
    # best of three: a shared machine has slow moments, and the peak is what it can do
    return 2 * side**3 * count / min(products(count) for _ in range(3))
