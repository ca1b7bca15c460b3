"""The entry of a family in the registry: configuration, Hugging Face tables, a tiny model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from model.config import DecoderConfig
from model.hf.family import Family


class ModelFamily(NamedTuple):
    """A family of language models; each file of this folder has one as its ``FAMILY``."""

    config: type[DecoderConfig]
    """The configuration, which builds the layers."""
    tiny: Mapping[str, Any]
    """Settings of a small model that uses every feature of the family, for tests."""
    hugging_face: tuple[Family, ...]
    """Models of transformers that are this family with some settings; the first that can express a
    model writes it."""
