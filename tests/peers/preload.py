"""Import once the models that all ranks of the comparison use."""

import gc
from contextlib import suppress

with suppress(ImportError):
    import ringmaster  # noqa: F401
with suppress(ImportError):
    import transformers

    from tests.parallel.transformers.families import FAMILIES, OTHERS

    for family in (*FAMILIES, *OTHERS):
        getattr(transformers, f"{family}ForCausalLM")
    import tests.peers.contestants  # noqa: F401
gc.freeze()
