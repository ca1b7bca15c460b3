"""Small diffusion transformers of images and of video, for the tests of these."""

import torch

from model.dit import DiT
from model.dit_config import DiTConfig

IMAGE = DiTConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, latent_shape=(3, 8, 8), num_classes=5, learn_sigma=True
)
VIDEO = DiTConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, latent_shape=(3, 6, 4, 8), patch_size_t=2, num_classes=5
)


def random_dit(config):
    """Build a DiT of weights far from zero, so that zeros hide no error."""
    model, generator = DiT(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15, generator=generator)
    return model
