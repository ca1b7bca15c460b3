"""Imports for the fork server, which every forked rank inherits.

A process has only one fork server, so this list must suit all commands.
"""

import gc

import matplotlib.pyplot
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import pretrain_dit  # noqa: F401
import pretrain_gpt  # noqa: F401
from data.text.megatron import megatron_core

matplotlib.use("Agg")
megatron_core()
# Otherwise a rank's garbage collector would touch, and so copy, every shared page.
gc.collect()
gc.freeze()
