"""The papers' published tables, and ours beside them: one module per paper."""
