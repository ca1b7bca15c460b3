"""Convert between published formats, such as Hugging Face's, and ours; one file per family."""

from model.hf.api import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "load_hf", "save_hf", "to_hf"]
