"""A family of language models: its settings, its tables of Hugging Face's, a tiny model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from model.config import DecoderConfig
from model.hf.family import Family


class ModelFamily(NamedTuple):
    """Statement of a file of this folder, as its ``FAMILY``."""

    config: type[DecoderConfig]
    """The settings, which build the layers."""
    tiny: Mapping[str, Any]
    """Settings of a small model with everything that the family has, for tests."""
    hugging_face: tuple[Family, ...]
    """Families of transformers' that are this one with some settings; of several that can write a
    model, the first one does."""
