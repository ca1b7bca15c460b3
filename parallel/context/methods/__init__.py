"""Context-parallel methods as data: one file each, and one for all rings."""
