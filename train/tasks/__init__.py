"""Tasks of the entries: what language models and diffusion transformers train on, in a file each."""
