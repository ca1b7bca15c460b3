"""RULER, a benchmark of long contexts: examples made, a run scored."""
