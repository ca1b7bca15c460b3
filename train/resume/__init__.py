"""Where a run starts: resumed from a checkpoint, finetuned from weights, or from scratch."""
