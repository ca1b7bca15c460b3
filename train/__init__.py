"""Training loop of both entry scripts, with its configuration, callbacks and checkpoints."""
