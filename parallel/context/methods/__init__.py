"""Context-parallel methods as data, one file each."""
