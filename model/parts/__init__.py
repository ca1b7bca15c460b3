"""Modules from which families build layers: attention, norms, feed-forwards, positions, adapters.

Each module states how its weights are initialized (``INIT``) and how tensor parallelism splits them
(``SPLIT``), in the words of ``model/parts/weights.py``. A module whose parameters stay float32 when
the rest is bfloat16 also has ``full_precision = True``.
"""
