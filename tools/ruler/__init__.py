"""Examples of RULER, the long-context benchmark of Hsieh et al. 2024, arXiv:2404.06654."""
