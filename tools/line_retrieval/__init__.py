"""A task of long contexts: find a line by its label."""
