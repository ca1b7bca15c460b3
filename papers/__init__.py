"""Published tables of papers, with predictions and measurements: one module per paper."""
