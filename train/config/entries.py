"""Configuration class of each entry script: its sections, sample order and data files.

A section is a frozen dataclass in the module that it configures; flags.py turns it into flags and
TOML keys.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data.fingerprint import digest, fingerprint
from data.latents.dataset import DIGITS, LatentDataConfig
from data.latents.folder import latents_fingerprint
from data.text.config import DataConfig, blend
from data.text.indexed import LOSS_MASK, open_indexed
from data.text.record import CHAT, chat_record
from model.config import DecoderConfig
from model.diffusion import DiffusionConfig
from model.dit_config import DiTConfig
from model.families import DEFAULT, FAMILIES
from parallel.context.config import FullContextConfig, HybridConfig
from runtime.errors import at_least
from tools.ruler.examples import RulerConfig
from train.config.common import CommonConfig, LoopConfig
from train.config.fields import Variants
from train.config.suggest import ENTRIES
from train.ema import EmaConfig
from train.sampling import SamplingConfig

EARLIER_KEYS = """
    window_size window_attn_skip_freq softmax_type linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim linear_gate rotary_base
    rotary_base_local rotary_percent rope_scaling_type rope_scaling_factor
    rope_scaling_original_max_position_embeddings rope_scaling_low_freq_factor
    rope_scaling_high_freq_factor rope_scaling_beta_fast rope_scaling_beta_slow
    rope_scaling_attention_factor rope_scaling_mscale rope_scaling_mscale_all_dim
    rope_scaling_truncate rope_scaling_seq_length position_embedding_type max_position_embeddings
    add_qkv_bias query_pre_attn_scalar qk_layernorm softmax_every linear_decay no_scale_embedding
""".split()
"""Settings of [model] that versions before 2026-11-28 wrote for every family."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The size and number of iterations, and when the run validates or stops."""

    seq_length: int = 1024
    """Number of tokens per sequence, before context parallelism shards it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "seq_length")


@dataclass(frozen=True, kw_only=True)
class Config(CommonConfig):
    """Everything that decides a run, one field per section; sections share no field names."""

    model: DecoderConfig = field(default_factory=FAMILIES[DEFAULT].config)
    data: DataConfig = field(default_factory=DataConfig)
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ruler: RulerConfig = field(default_factory=RulerConfig)

    VARIANTS = Variants(
        "model",
        "model_type",
        {name: family.config for name, family in FAMILIES.items()},
        frozenset(EARLIER_KEYS),
    )
    SAMPLE_ORDER = ("seed", "seq_length", "data_path", "split", "blend_by_length", "pack_documents")
    NOTED = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "sft")
    DECIDED = ("hybrid_softmax_layout", "delta_rule_schedule", "rope_scaling_seq_length")

    @property
    def sequence_length(self) -> int:
        return self.train.seq_length

    @property
    def packed(self) -> bool:
        return self.data.reset_attention_mask

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        windows: dict[tuple[int, int] | None, None] = {}  # a set in the order of the layers
        for layer in range(self.model.num_layers):
            if self.model.has_softmax(layer):
                windows[self.model.window(layer)] = None
        return tuple(windows)

    @property
    def rotates(self) -> bool:
        return self.model.rope is not None

    @property
    def delta(self) -> bool:
        return self.model.delta_rule

    @property
    def hybrid_layouts(self) -> bool:
        return self.model.own_softmax_layout

    @property
    def reads_text(self) -> bool:
        return True

    def with_file_names(self) -> Self:
        config = super().with_file_names()
        if not self.data.mock_data:
            config = config.updated(
                data_path=self.data.data_path or ("PREFIX",),
                tokenizer_model=self.data.tokenizer_model or "FILE",
            )
        if self.model.lora_rank:
            config = config.updated(load=self.checkpoint.load or "RUN")
        return config

    def files(self) -> list[tuple[str, str]]:
        if self.data.mock_data:
            return []
        indices = [("data_path", f"{prefix}.idx") for prefix in blend(self.data.data_path)[0]]
        return [*indices, ("tokenizer_model", str(self.data.tokenizer_model))]

    def contents(self) -> dict[str, str]:
        digests = {}
        if self.data.tokenizer_model is not None:
            digests["tokenizer_model"] = digest(Path(self.data.tokenizer_model))

        prefixes = blend(self.data.data_path)[0] if self.data.data_path else []
        if self.data.sft:
            prefixes += [prefix + LOSS_MASK for prefix in prefixes]
        for prefix in prefixes:
            index = Path(f"{prefix}.idx")
            tokens = Path(f"{prefix}.bin")
            if not (index.is_file() and tokens.is_file()):
                open_indexed(prefix)  # raises an error that names the missing file
            digests[f"data_path {prefix}"] = fingerprint(index, [tokens])
        return digests

    def recorded(self) -> dict[str, Any]:
        if not (self.data.sft and self.data.data_path):
            return {}
        chat = chat_record(blend(self.data.data_path)[0])
        return {} if chat is None else {CHAT: chat}


@dataclass(frozen=True, kw_only=True)
class DiTRunConfig(CommonConfig):
    """Everything that decides a run, one field per section; sections share no field names."""

    model: DiTConfig = field(default_factory=DiTConfig)
    context: FullContextConfig = field(default_factory=FullContextConfig)
    data: LatentDataConfig = field(default_factory=LatentDataConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    SAMPLE_ORDER = ("seed", "data_path", "split")
    OBJECTIVE = ("objective", "num_timesteps")
    NOTED = ("logit_normal_mean", "logit_normal_std", "class_dropout_prob")

    @property
    def causal(self) -> bool:
        return False

    @property
    def sequence_length(self) -> int:
        return self.model.num_patches

    @property
    def packed(self) -> bool:
        return self.data.pack_samples

    @property
    def ema_decay(self) -> float | None:
        return self.ema.ema_decay or None

    @property
    def sample_ends(self) -> tuple[int, ...] | None:
        return tuple(range(0, self.joined_length + 1, self.sequence_length))

    def files(self) -> list[tuple[str, str]]:
        return [("data_path", path) for path in self.data.data_path if path != DIGITS]

    def contents(self) -> dict[str, str]:
        folders = [path for path in self.data.data_path if path != DIGITS]
        return {f"data_path {folder}": latents_fingerprint(folder) for folder in folders}


ENTRIES |= {"pretrain_gpt.py": Config, "pretrain_dit.py": DiTRunConfig}
