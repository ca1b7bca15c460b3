"""Ring Attention (Liu, Zaharia, Abbeel 2023): contiguous blocks, KV passed around a ring."""

from parallel.context.methods.base import RingMethod


class Ring(RingMethod):
    """Contiguous blocks; under a causal mask the last rank has twice the average work."""

    name = "ring"
    layout_name = "contiguous"
