"""Samples of diffusion models."""
