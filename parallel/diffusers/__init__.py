"""Context parallelism for diffusion transformers of diffusers: a clip spans the ranks of a group.

A training step:

    cp = shard(transformer, group, method="ulysses")  # refuses what it cannot do, with the reason
    noise = cp.noise_like(latents, samples)  # equal on every rank
    prediction = transformer(noisy, time, text, return_dict=False)[0]  # whole inputs, whole output
    loss = F.mse_loss(prediction, target)  # gradients are averaged over ranks, as by DDP
"""

from parallel.diffusers.families import FAMILIES, Family, FirstImageTokens, TextMask, Tokens
from parallel.diffusers.noise import epsilon, flow_matching, noise_like, uniform, v_prediction
from parallel.diffusers.shard import Sharded, shard

__all__ = [
    "FAMILIES",
    "Family",
    "FirstImageTokens",
    "Sharded",
    "TextMask",
    "Tokens",
    "epsilon",
    "flow_matching",
    "noise_like",
    "shard",
    "uniform",
    "v_prediction",
]
