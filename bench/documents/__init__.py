"""The documents bench: one group of all ranks against groups by the length of documents."""
