"""Import once, in the server that ranks are forked from, what most ranks of these tests would import."""

import gc
from contextlib import suppress

with suppress(ImportError):
    import peft  # noqa: F401
    import transformers
    import trl

    from tests.parallel.transformers.families import FAMILIES

    for family in FAMILIES:
        getattr(transformers, f"{family}ForCausalLM")
    transformers.Trainer  # noqa: B018  # each name is imported where it is first read
    trl.SFTTrainer  # noqa: B018
gc.collect()
gc.freeze()
