"""Tasks of the entry scripts: language models and diffusion transformers, one file each."""
