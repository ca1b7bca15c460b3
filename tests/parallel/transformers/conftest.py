"""Ranks of these tests are forked from a server.

It has imported transformers, its trainer, trl and peft.
"""

from runtime.ranks import preload

preload("tests.parallel.transformers.preload")
