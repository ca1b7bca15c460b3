"""Linear attention over ranks: each passes its state on to the next."""
