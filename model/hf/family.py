"""A family of Hugging Face's models as one table: keys of config.json, names of weights, refusals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import DecoderConfig
from model.hf.folder import CONFIG, Read, check_value, entry, shown, unsupported
from runtime.errors import UserError, with_article

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
    """The field of ours that a key of config.json holds, its type, and the value where the key is
    missing.
    """

    ours: str
    kind: type
    default: Any = REQUIRED


class Part(NamedTuple):
    """Keys that hold fields of ours together, or otherwise than as they are."""

    keys: tuple[str, ...]
    read: Callable[[Contents, dict[str, Any]], dict[str, Any]]
    """config.json and the fields that were read so far -> more fields."""
    write: Callable[[Any], dict[str, Any]]
    """Entries of config.json."""


class Need(NamedTuple):
    """A setting of ours that a family cannot be without."""

    ours: str
    holds: Callable[[Any], bool]
    only: str
    """The values that it has, for the message; may name ``config``."""


class Fused(NamedTuple):
    """Modules of ours that one of theirs holds, joined along ``dim`` of their weight."""

    parts: tuple[str, ...]
    dim: int = 0
    sizes: Callable[[Any], Sequence[int]] | None = None
    """Channels of each part, along ``dim``; all alike by default."""
    groups: Callable[[Any], int] = lambda config: 1
    """Groups that the joined channels are in, each with its share of every part, such as the heads.
    """

    def part(self, weight: Tensor, number: int, config: Any) -> Tensor:
        """Return one of our modules' weight: a view, unless there are groups."""
        groups, along = self.groups(config), self.dim % weight.ndim
        weight = weight.unflatten(along, (groups, -1))
        width = weight.shape[along + 1] // len(self.parts)
        sizes = width if self.sizes is None else [size // groups for size in self.sizes(config)]
        return weight.split(sizes, along + 1)[number].flatten(along, along + 1)

    def joined(self, weights: Sequence[Tensor], config: Any) -> Tensor:
        """Return theirs of our weights, which have channels first."""
        groups = self.groups(config)
        return torch.cat([weight.unflatten(0, (groups, -1)) for weight in weights], 1).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Names:
    """Names of weights; a module that is in no table has ours."""

    top: Mapping[str, str]
    """Names of modules outside of the layers, by ours."""
    layers: str
    """The beginning of their layers' names, before the number."""
    layer: Mapping[str, str]
    """Names of modules of a layer, by ours."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Modules of a layer of theirs that hold several of ours."""
    linear: "Names | None" = None
    """Names in layers without softmax attention, where these are others."""
    ours_of: Change = lambda config, name, weight: weight
    theirs_of: Change = ours_of

    def renamed(self, layer: Mapping[str, str], **changes: Any) -> "Names":
        """Return the table with other names of some of a layer's modules, and other changes."""
        return replace(self, layer={**self.layer, **layer}, **changes)

    def under(self, root: str) -> "Names":
        """Return the names in a model that has a vision part too."""
        top = {**self.top, "embedding": f"{root}.embed_tokens", "norm": f"{root}.norm"}
        return replace(self, top=top, layers=f"{root}.layers")

    def of(self, name: str, config: Any = None) -> str:
        """Return their name of our parameter; ``config`` need be known if layers are of two kinds."""
        return self._place(name, config)[0]

    def _place(self, name: str, config: Any) -> tuple[str, Fused | None, int]:
        """Return their name of our parameter and, of one that is fused, how and which part it is."""
        module, kind = name.rsplit(".", 1)
        if not module.startswith("layers."):
            return f"{self.top.get(module, module)}.{kind}", None, 0
        _, layer, module = module.split(".", 2)
        table = self if self.linear is None or config.has_softmax(int(layer)) else self.linear
        for theirs, fused in table.fused.items():
            if module in fused.parts:
                return f"{self.layers}.{layer}.{theirs}.{kind}", fused, fused.parts.index(module)
        return f"{self.layers}.{layer}.{table.layer.get(module, module)}.{kind}", None, 0

    def ours(self, theirs: Read, name: str, config: Any) -> Tensor:
        """Return one of our parameters: the same tensor as theirs or a view of it, unless
        ``ours_of`` copies it.

        One of a group's channels is a copy.
        """
        their_name, fused, part = self._place(name, config)
        weight = theirs(their_name)
        return self.ours_of(
            config, name, weight if fused is None else fused.part(weight, part, config)
        )

    def inside(self, names: Iterable[str], config: Any) -> dict[str, list[str]]:
        """Return which of our parameters each of theirs holds, in its order."""
        found: dict[str, list[str]] = {}
        for name in names:
            theirs, fused, part = self._place(name, config)
            if not part:
                parts = (fused.parts if fused else None) or ("",)
                found[theirs] = [name.replace(parts[0], one) for one in parts]
        return found

    def theirs(self, ours: Read, inside: Sequence[str], config: Any) -> Tensor:
        """Return one of their parameters: the same tensor as ours, unless it is fused or
        ``theirs_of`` copies it.
        """
        weights = [ours(name) for name in inside]
        fused = self._place(inside[0], config)[1]
        return self.theirs_of(
            config, inside[0], weights[0] if fused is None else fused.joined(weights, config)
        )

    def to_theirs(self, ours: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Return their state dict, as ``theirs``."""
        return {
            name: self.theirs(ours.__getitem__, own, config)
            for name, own in self.inside(ours, config).items()
        }


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model of Hugging Face's that is a model of ours with some settings."""

    kind: str
    """Their model_type."""
    title: str
    """Its name in messages, after "which"."""
    architecture: str
    """Their class."""
    ours: type[DecoderConfig]
    """Our settings."""
    fields: Mapping[str, Field]
    """Keys of config.json that hold a field of ours as it is."""
    parts: tuple[Part, ...]
    """The other keys that are read, in order, after that of tied embeddings."""
    tied: bool
    """True if embeddings are tied where config.json does not say so."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ours that all of its models have alike."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that may ask for what our model does not compute, with the supported values; a missing
    key means the first, which an export writes unless it is None."""
    rates: tuple[str, ...] = ()
    """Keys of dropout, which a trained model does not use; an export writes 0."""
    ids: tuple[str, ...] = ("bos_token_id", "eos_token_id")
    """Ids of tokens that transformers has defaults for, of its own vocabularies; an export writes
    null.
    """
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
    stored: tuple[Names, ...] = ()
    """Other names that files have."""
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules that files may hold in parts, by theirs."""
    nested: str = ""
    """Key of the table that holds this model's entries where it is part of another one, of
    ``whole``.
    """
    whole: str = ""
    """model_type of that other one."""
    instead_of: str = ""
    """Another family's kind, whose files are this one's to transformers if they have the key
    ``told_by``.
    """
    told_by: str = ""
    skipped: str = r"(?!)"
    """Pattern of names of parts that are no part of our model; a line says so."""

    @property
    def embedding(self) -> str:
        """Their name of the embedding's weight, which lm_head.weight may be tied to."""
        return self.names.of("embedding.weight")

    @property
    def known(self) -> set[str]:
        """Keys that are read, or known to change nothing."""
        own = {
            *self.fields,
            *(key for part in self.parts for key in part.keys),
            *self.only,
            *self.aliases,
        }
        return own | {*self.rates, *self.ignored, *IGNORED, *ONLY, *TOKEN_IDS, "model_type", TIED}

    def refuse(self, config: DecoderConfig) -> None:
        """Raise UserError if it cannot express a model of ours."""
        own = [
            (name, getattr(config, name) in (value, None), f"{value}")
            for name, value in self.own.items()
        ]
        needs = [
            (need.ours, need.holds(config), need.only.format(config=config)) for need in self.needs
        ]
        for name, holds, only in own + needs:
            if not holds:
                raise UserError(
                    f"{name} is {getattr(config, name)}, and {self.title} has only {only}"
                )

    def check(self, hf: Contents) -> None:
        """Raise UserError for entries of a config.json that may change what is computed, or are of
        a wrong type.
        """
        for key, value in hf.items():
            if (supported := self.only.get(key, ONLY.get(key))) is not None:
                check_value(CONFIG, key, value, supported)
            elif key not in self.known:
                rest = (
                    f": {with_article(self.kind)} is not known to have it, and it may change what is computed; take it "
                    "out of the file if the model is the same without it"
                )
                raise unsupported(shown(key)[1:-1], value, rest)
        for key in TOKEN_IDS:
            entry(
                hf,
                key,
                list if key == "eos_token_id" and isinstance(hf.get(key), list) else int,
                None,
            )
        if (longest := entry(hf, "max_position_embeddings", int, None)) is not None and longest < 1:
            raise UserError(
                f"{CONFIG}: max_position_embeddings is below 1; it must be the longest sequence"
            )
        for key in self.rates:
            if not 0 <= (entry(hf, key, float, None) or 0) < 1:
                raise UserError(
                    f"{CONFIG}: {key} is {shown(hf[key])}; it must be from 0 to below 1"
                )

    def read(self, hf: Contents) -> DecoderConfig:
        """Build a DecoderConfig from a config.json's contents. Raises KeyError if missing,
        UserError if unsupported.
        """
        hf = {
            **hf,
            **{name: entry(hf, key, int) for key, name in self.aliases.items() if key in hf},
        }
        settings: dict[str, Any] = dict(self.own)
        for key, (ours, kind, default) in self.fields.items():
            settings[ours] = entry(hf, key, kind, *([] if default is REQUIRED else [default]))
        settings["untie_embeddings_and_output_weights"] = not entry(hf, TIED, bool, self.tied)
        for part in self.parts:
            settings |= part.read(hf, settings)
        try:
            return self.ours(**settings)
        except UserError as error:
            name, _, problem = str(error).partition(" ")
            key = next((key for key, one in self.fields.items() if one.ours == name), name)
            raise UserError(f"{key} {problem}") from None

    def write(self, config: DecoderConfig, kept: Contents) -> dict[str, Any]:
        """Return a config.json for transformers: entries that our fields determine, and ``kept``
        ones beside them.
        """
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.kind}
        for key, (ours, kind, _) in self.fields.items():
            if (value := config.resolved(ours)[ours]) is not None:
                found[key] = kind(value)
        found[TIED] = not config.untie_embeddings_and_output_weights
        for part in self.parts:
            found |= part.write(config)
        unsaid: dict[str, Any] = dict.fromkeys(self.ids) | dict.fromkeys(self.rates, 0.0)
        unsaid |= {
            key: one.default
            for key, one in self.fields.items()
            if one.default not in (REQUIRED, None)
        }
        unsaid |= {key: values[0] for key, values in self.only.items() if values[0] is not None}
        replaced = {*self.aliases, *(key for part in self.parts for key in part.keys)}
        known = {key: value for key, value in kept.items() if key in self.known - replaced}
        return (
            unsaid
            | {key: value for key, value in known.items() if value is not None or key not in unsaid}
            | found
        )
