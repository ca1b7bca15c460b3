"""Linear attention over ranks: states that are passed on."""
