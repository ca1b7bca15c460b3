"""Clips of videos with captions, as latents and text embeddings to fine-tune on."""
