"""A family of Hugging Face's models as one table: keys of config.json, names of weights, refusals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import RESOLVED, ModelConfig
from model.hf.folder import CONFIG, Read, check_value, entry, shown
from runtime.errors import UserError

Contents = Mapping[str, Any]
Change = Callable[[Any, str, Tensor], Tensor]
"""A configuration, our name and a weight in one layout -> in the other."""
REQUIRED: Any = object()
TIED = "tie_word_embeddings"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
}
"""Keys of every family that change nothing with these values."""
_WORDS = """
    architectures auto_map dtype torch_dtype transformers_version _name_or_path name_or_path _commit_hash
    attn_implementation _attn_implementation _attn_implementation_autoset output_attentions output_hidden_states
    return_dict torchscript use_bfloat16 tf_legacy_loss is_decoder
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    _num_labels transformers.js_config tokenizer_class prefix unsloth_version unsloth_fixed
    sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p use_cache
"""
IGNORED = frozenset(_WORDS.split())
"""Keys of every family that change nothing: of files, tasks, code and the generation of texts."""


class Field(NamedTuple):
    """The field of ours that a key of config.json holds, its type, and the value where the key is missing."""

    ours: str
    kind: type
    default: Any = REQUIRED


class Part(NamedTuple):
    """Keys that hold fields of ours together, or otherwise than as they are."""

    keys: tuple[str, ...]
    read: Callable[[Contents, dict[str, Any]], dict[str, Any]]
    """config.json and the fields that were read so far -> more fields."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Entries of config.json."""


class Need(NamedTuple):
    """A setting of ours that a family cannot be without."""

    ours: str
    holds: Callable[[ModelConfig], bool]
    only: str
    """The values that it has, for the message; may name ``config``."""


def unchanged(config: Any, name: str, weight: Tensor) -> Tensor:
    """Return the weight."""
    return weight


@dataclass(frozen=True)
class Names:
    """Names of weights; a module that is in neither table has ours."""

    top: Mapping[str, str]
    """Names of modules outside of the layers, by ours."""
    layers: str
    """The beginning of their layers' names, before the number."""
    layer: Mapping[str, str]
    """Names of modules of a layer, by ours."""
    fused: str = ""
    """A module of theirs that holds ``parts`` of ours, joined along ``dim`` of their weight."""
    parts: tuple[str, ...] = ()
    dim: int = 0
    ours_of: Change = unchanged
    theirs_of: Change = unchanged

    def of(self, name: str) -> tuple[str, int | None]:
        """Return their name of our parameter, and for a fused one which part it is."""
        module, kind = name.rsplit(".", 1)
        if not module.startswith("layers."):
            return f"{self.top.get(module, module)}.{kind}", None
        _, layer, module = module.split(".", 2)
        part = self.parts.index(module) if module in self.parts else None
        inside = self.layer.get(module, module) if part is None else self.fused
        return f"{self.layers}.{layer}.{inside}.{kind}", part

    def ours(self, theirs: Read, name: str, config: Any) -> Tensor:
        """Return one of our parameters: the same tensor as theirs or a view of it, unless ``ours_of`` copies it."""
        their_name, part = self.of(name)
        weight = theirs(their_name)
        return self.ours_of(config, name, weight if part is None else weight.chunk(len(self.parts), self.dim)[part])

    def inside(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return which of our parameters each of theirs holds, in its order."""
        return {
            theirs: [name] if part is None else [name.replace(self.parts[0], one) for one in self.parts]
            for name in names
            for theirs, part in [self.of(name)]
            if not part
        }

    def theirs(self, ours: Read, inside: Sequence[str], config: Any) -> Tensor:
        """Return one of their parameters: the same tensor as ours, unless it is fused or ``theirs_of`` copies it."""
        weights = [ours(name) for name in inside]
        return self.theirs_of(config, inside[0], weights[0] if len(weights) == 1 else torch.cat(weights))

    def to_theirs(self, ours: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Return their state dict, as ``theirs``."""
        return {name: self.theirs(ours.__getitem__, own, config) for name, own in self.inside(ours).items()}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model of Hugging Face's that is a model of ours with some settings."""

    kind: str
    """Their model_type."""
    title: str
    """Its name in messages, after "which"."""
    architecture: str
    """Their class."""
    ours: str
    """Our model_type."""
    fields: Mapping[str, Field]
    """Keys of config.json that hold a field of ours as it is."""
    parts: tuple[Part, ...]
    """The other keys that are read, in order, after that of tied embeddings."""
    tied: bool
    """True if embeddings are tied where config.json does not say so."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ours that all of its models have alike."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that may ask for what our model does not compute, with the supported values; a missing key means the first,
    which an export writes unless it is None."""
    rates: tuple[str, ...] = ()
    """Keys of dropout, which a trained model does not use; an export writes 0."""
    ignored: frozenset[str] = frozenset()
    """Keys of its own that change nothing."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that stand for another one, and win over it."""
    needs: tuple[Need, ...] = ()
    names: Names
    derived: str = r"(?!)"
    """Pattern of names in old checkpoints that are not weights."""
    prefix: str = ""
    """Beginning of all names but lm_head's, which some files omit."""

    @property
    def embedding(self) -> str:
        """Their name of the embedding's weight, which lm_head.weight may be tied to."""
        return self.names.of("embedding.weight")[0]

    @property
    def known(self) -> set[str]:
        """Keys that are read, or known to change nothing."""
        own = {*self.fields, *(key for part in self.parts for key in part.keys), *self.only, *self.aliases}
        return own | {*self.rates, *self.ignored, *IGNORED, *ONLY, *TOKEN_IDS, "model_type", TIED}

    def refuse(self, config: ModelConfig) -> None:
        """Raise UserError if it cannot express a model of ours."""
        own = [(name, getattr(config, name) in (value, None), f"{value}") for name, value in self.own.items()]
        needs = [(need.ours, need.holds(config), need.only.format(config=config)) for need in self.needs]
        for name, holds, only in own + needs:
            if not holds:
                raise UserError(f"{name} is {getattr(config, name)}, and {self.title} has only {only}")

    def check(self, hf: Contents) -> None:
        """Raise UserError for entries of a config.json that may change what is computed, or are of a wrong type."""
        for key, value in hf.items():
            if (supported := self.only.get(key, ONLY.get(key))) is not None:
                check_value(CONFIG, key, value, supported)
            elif key not in self.known:
                raise UserError(
                    f"{CONFIG}: {shown(key)[1:-1]} = {shown(value)} is not supported: a {self.kind} is not known to "
                    "have it, and it may change what is computed; take it out of the file if the model is the same "
                    "without it"
                )
        for key in TOKEN_IDS:
            entry(hf, key, list if key == "eos_token_id" and isinstance(hf.get(key), list) else int, None)
        if (longest := entry(hf, "max_position_embeddings", int, None)) is not None and longest < 1:
            raise UserError(f"{CONFIG}: max_position_embeddings is below 1; it must be the longest sequence")
        for key in self.rates:
            if not 0 <= (entry(hf, key, float, None) or 0) < 1:
                raise UserError(f"{CONFIG}: {key} is {shown(hf[key])}; it must be from 0 to below 1")

    def read(self, hf: Contents) -> ModelConfig:
        """Build a ModelConfig from a config.json's contents. Raises KeyError if missing, UserError if unsupported."""
        hf = {**hf, **{name: entry(hf, key, int) for key, name in self.aliases.items() if key in hf}}
        settings: dict[str, Any] = {"model_type": self.ours, **self.own}
        for key, (ours, kind, default) in self.fields.items():
            settings[ours] = entry(hf, key, kind, *([] if default is REQUIRED else [default]))
        settings["untie_embeddings_and_output_weights"] = not entry(hf, TIED, bool, self.tied)
        for part in self.parts:
            settings |= part.read(hf, settings)
        try:
            return ModelConfig(**settings)
        except UserError as error:
            name, _, problem = str(error).partition(" ")
            key = next((key for key, one in self.fields.items() if one.ours == name), name)
            raise UserError(f"{key} {problem}") from None

    def write(self, config: ModelConfig, kept: Contents) -> dict[str, Any]:
        """Return a config.json for transformers: entries that our fields determine, and ``kept`` ones beside them."""
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.kind}
        values = {
            key: (getattr(config, RESOLVED.get(ours, ours)), kind) for key, (ours, kind, _) in self.fields.items()
        }
        found |= {key: kind(value) for key, (value, kind) in values.items() if value is not None}
        found[TIED] = not config.untie_embeddings_and_output_weights
        for part in self.parts:
            found |= part.write(config)
        # transformers' default ids are of its own vocabularies, which this one may not have.
        unsaid = {"bos_token_id": None, "eos_token_id": None} | dict.fromkeys(self.rates, 0.0)
        unsaid |= {key: one.default for key, one in self.fields.items() if one.default not in (REQUIRED, None)}
        unsaid |= {key: values[0] for key, values in self.only.items() if values[0] is not None}
        replaced = {*self.aliases, *(key for part in self.parts for key in part.keys)}
        known = {key: value for key, value in kept.items() if key in self.known - replaced}
        return unsaid | {key: value for key, value in known.items() if value is not None or key not in unsaid} | found
