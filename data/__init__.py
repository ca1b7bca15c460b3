"""Text and latents, from files to the batches of each rank."""
