"""Linear attention over ranks: each rank passes its state on to the next."""
