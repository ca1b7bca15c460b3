"""Tasks of the entries: language models and diffusion transformers, a file each."""
