"""Import once, in the server that ranks are forked from, what most ranks of these tests import."""

import gc
from contextlib import suppress

with suppress(ImportError):
    from accelerate import Accelerator  # noqa: F401
    from diffusers import WanTransformer3DModel  # noqa: F401
    from peft import LoraConfig  # noqa: F401
gc.freeze()
