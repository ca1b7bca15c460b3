"""Import once what most ranks of these tests would import.

It is in the server that ranks are forked from.
"""

import gc
from contextlib import suppress

with suppress(ImportError):
    import transformers
    from trl import SFTTrainer  # noqa: F401  # which imports peft and transformers' trainer

    from tests.parallel.transformers.families import FAMILIES

    for family in FAMILIES:
        getattr(transformers, f"{family}ForCausalLM")
gc.freeze()
