"""Configurations: dataclasses that are converted to and from TOML files and command-line flags."""
