"""GPUs of tests, with the versions of cuDNN that are loaded and that torch brings."""

from kernels.gpu import Gpu

A100, H100, B200 = (Gpu(capability, 92000, 92000) for capability in ((8, 0), (9, 0), (10, 0)))
OLD, SHADOWED = Gpu((9, 0), 91002, 91002), Gpu((9, 0), 91002, 92000)
