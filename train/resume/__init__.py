"""Start of a run: resumed from a checkpoint, finetuned from weights, or from scratch."""
