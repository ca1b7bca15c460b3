"""Configurations: dataclasses to TOML and flags and back."""
