"""Ranks of these tests are forked from a server that has imported transformers, its trainer, trl
and peft.
"""

from runtime.ranks import preload

preload("tests.parallel.transformers.preload")
