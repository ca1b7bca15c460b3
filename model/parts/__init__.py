"""Parts of which families build their layers: attention, norms, feed-forwards, positions, adapters.

A part states, beside its weights, how each begins (``INIT``) and how tensor parallelism splits it
(``SPLIT``), in the words of ``model/parts/weights.py``. One whose parameters stay in float32 when
the rest is bfloat16 also states ``full_precision = True``.
"""
