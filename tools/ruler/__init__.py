"""RULER, the benchmark of long contexts by Hsieh et al. 2024, arXiv:2404.06654: its examples."""
