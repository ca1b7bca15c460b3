"""Ranks of these tests are forked from a server that has imported diffusers."""

from runtime.ranks import preload

preload("tests.parallel.diffusers.preload")
