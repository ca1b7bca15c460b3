"""Hugging Face and other published formats <-> ours; a family in a file each."""

from model.hf.api import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "load_hf", "save_hf", "to_hf"]
