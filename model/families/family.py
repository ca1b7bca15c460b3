"""Registry entry of a family: its configuration, Hugging Face tables, and a tiny model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from model.config import DecoderConfig
from model.hf.family import Family


class ModelFamily(NamedTuple):
    """A family of language models; each family's file in this folder has one as its ``FAMILY``."""

    config: type[DecoderConfig]
    """Class of the configuration, which builds the layers."""
    tiny: Mapping[str, Any]
    """Settings of a small model that uses every feature of the family, for tests."""
    hugging_face: tuple[Family, ...]
    """Models of the transformers library that equal this family with certain settings; an export
    uses the first one that can express the model."""
