"""What the server imports, once, that tests/ranks.py forks its ranks from."""

import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

from data.megatron import megatron_core

megatron_core()
