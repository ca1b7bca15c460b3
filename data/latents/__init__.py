"""Training samples of diffusion models."""
