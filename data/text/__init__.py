"""Documents to .bin and .idx, and to samples."""
