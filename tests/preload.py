"""Import once, in the server that ranks are forked from, what each rank would import."""

import gc
from contextlib import suppress

import pytest  # noqa: F401
import sentencepiece  # noqa: F401
import tomli_w  # noqa: F401

import parallel.pipeline.schedule  # noqa: F401
import tests.parallel.split
import tests.pretraining  # noqa: F401
from train.callbacks import metrics

with suppress(ImportError):
    import sklearn.datasets  # noqa: F401  # the digits, for most tests of diffusion transformers

# A curve takes a rank as long as a tiny run's iterations; tests/train/callbacks/test_metrics.py
# draws it.
metrics.plot_loss = lambda records, path: path.touch()
gc.collect()
gc.freeze()
