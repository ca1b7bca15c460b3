"""Published tables of papers, and ours beside them: one module per paper."""
