"""What the server imports, once, that all ranks here are forked from; a process has one, whoever asks first."""

import gc

import matplotlib.pyplot
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import pretrain_dit  # noqa: F401
import pretrain_gpt  # noqa: F401
from data.text.megatron import megatron_core

matplotlib.use("Agg")
megatron_core()
# A rank's collector would otherwise touch, and so copy, every page of what is shared here.
gc.collect()
gc.freeze()
