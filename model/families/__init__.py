"""Families of language models, a file each, and the registry of them: a line for each."""

from model.config import DecoderConfig
from model.families.gemma3 import Gemma3Config
from model.families.gpt import GPTConfig
from model.families.linear_transformer import LinearTransformerConfig
from model.families.llama import LlamaConfig
from model.families.olmo3 import Olmo3Config
from model.families.olmo_hybrid import OlmoHybridConfig
from model.families.qwen3_5 import Qwen3_5Config
from model.families.transnormer import TransnormerConfig

_CLASSES: tuple[type[DecoderConfig], ...] = (
    LlamaConfig,
    GPTConfig,
    TransnormerConfig,
    LinearTransformerConfig,
    Gemma3Config,
    Olmo3Config,
    Qwen3_5Config,
    OlmoHybridConfig,
)
FAMILIES = {family.model_type: family for family in _CLASSES}
"""Settings by model_type."""
DEFAULT = next(iter(FAMILIES))
"""The model_type of a run that names none."""
