"""Tables that describe transformers models: keys of config.json, names of weights, conditions.

A table is used in both directions, so that import and export cannot disagree. It is strict: an
entry of config.json that is not in the table may change what the model computes, so it is an error
and is never ignored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import DecoderConfig
from model.hf.entries import CONFIG, check_value, entry, shown, unsupported
from model.hf.tensors import Read
from runtime.errors import UserError, with_article

Contents = Mapping[str, Any]
Change = Callable[[Any, str, Tensor], Tensor]
"""Function (configuration, Longmesh's name, weight in one layout) -> weight in the other layout."""
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
"""Keys that every model may have, with the values for which they change nothing."""
_WORDS = """
    architectures auto_map dtype torch_dtype transformers_version _name_or_path name_or_path
    _commit_hash attn_implementation _attn_implementation _attn_implementation_autoset
    output_attentions output_hidden_states return_dict torchscript use_bfloat16 tf_legacy_loss
    is_decoder id2label label2id num_labels problem_type finetuning_task task_specific_params
    classifier_dropout _num_labels transformers.js_config tokenizer_class prefix unsloth_version
    unsloth_fixed sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
    use_cache
"""
IGNORED = frozenset(_WORDS.split())
"""Keys that every model may have and that never change it: about files, tasks, code and
generation."""


class ConfigKey(NamedTuple):
    """A key of config.json that holds one of Longmesh's fields unchanged."""

    ours: str
    """Name of the field in Longmesh's configuration."""
    kind: type
    default: Any = REQUIRED
    """Value if config.json lacks the key."""


class KeyGroup(NamedTuple):
    """Keys of config.json that functions convert together."""

    keys: tuple[str, ...]
    read: Callable[[Contents, dict[str, Any]], dict[str, Any]]
    """Function (config.json, Longmesh's fields so far) -> more of Longmesh's fields."""
    write: Callable[[Any], dict[str, Any]]
    """Function (Longmesh's configuration) -> entries of config.json."""


class Need(NamedTuple):
    """A condition that a Longmesh setting must meet, else transformers cannot express the model."""

    ours: str
    """Name of the setting."""
    holds: Callable[[Any], bool]
    only: str
    """Allowed values, in words that follow "it must be" in the message; may refer to ``config``."""


class Fused(NamedTuple):
    """Longmesh modules that are one module in transformers, concatenated along ``dim``."""

    parts: tuple[str, ...]
    dim: int = 0
    sizes: Callable[[Any], Sequence[int]] | None = None
    """Number of channels of each part along ``dim``; by default all parts have the same number."""
    groups: Callable[[Any], int] = lambda config: 1
    """Number of groups of the fused channels; each group has a share of every part. If the heads
    are the groups, the order is q and k of head 0, q and k of head 1, and so on."""

    def part(self, weight: Tensor, number: int, config: Any) -> Tensor:
        """Return the weight of one Longmesh module: a view, unless there are groups."""
        groups = self.groups(config)
        dim = self.dim % weight.ndim
        weight = weight.unflatten(dim, (groups, -1))
        sizes: Any = weight.shape[dim + 1] // len(self.parts)
        if self.sizes is not None:
            sizes = [size // groups for size in self.sizes(config)]
        return weight.split(sizes, dim + 1)[number].flatten(dim, dim + 1)

    def joined(self, weights: Sequence[Tensor], config: Any) -> Tensor:
        """Return transformers' weight, built from Longmesh's weights [channels, ...]."""
        groups = self.groups(config)
        grouped = [weight.unflatten(0, (groups, -1)) for weight in weights]
        return torch.cat(grouped, 1).flatten(0, 1)


class Place(NamedTuple):
    """The transformers parameter that contains a Longmesh parameter."""

    name: str
    fused: Fused | None = None
    """Layout, if the transformers parameter contains several of Longmesh's; else None."""
    part: int = 0
    """Index of the Longmesh parameter among those in the transformers parameter."""


@dataclass(frozen=True, eq=False)
class Names:
    """Translation of weight names between Longmesh and transformers.

    A module that is in no table has the same name in both libraries.
    """

    top: Mapping[str, str]
    """Longmesh's name -> transformers' name, for modules outside the layers."""
    layers: str
    """Transformers' prefix of layers, before the layer number."""
    layer: Mapping[str, str]
    """Longmesh's name -> transformers' name, for modules in a layer."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Longmesh modules of a layer that are one module in transformers, keyed by its name there."""
    linear: "Names | None" = None
    """Table for the layers of a hybrid without softmax attention, if their names differ."""
    ours_of: Change = lambda config, name, weight: weight
    theirs_of: Change = ours_of

    def renamed(self, layer: Mapping[str, str], **changes: Any) -> "Names":
        """Return the table with other names for some modules in a layer, and with other changes."""
        return replace(self, layer={**self.layer, **layer}, **changes)

    def under(self, root: str) -> "Names":
        """Return the table for a model with a vision part; ``root`` is the text part's prefix."""
        top = {**self.top, "embedding": f"{root}.embed_tokens", "norm": f"{root}.norm"}
        return replace(self, top=top, layers=f"{root}.layers")

    def of(self, name: str, config: Any = None) -> str:
        """Return transformers' name of a Longmesh parameter; for a hybrid, give ``config`` too."""
        return self._place(name, config).name

    def _place(self, name: str, config: Any) -> Place:
        module, kind = name.rsplit(".", 1)  # kind is "weight" or "bias"
        if not module.startswith("layers."):
            return Place(f"{self.top.get(module, module)}.{kind}")

        _, layer, module = module.split(".", 2)
        table = self
        if self.linear is not None and not config.has_softmax(int(layer)):
            table = self.linear
        for theirs, fused in table.fused.items():
            if module in fused.parts:
                their_name = f"{self.layers}.{layer}.{theirs}.{kind}"
                return Place(their_name, fused, fused.parts.index(module))
        return Place(f"{self.layers}.{layer}.{table.layer.get(module, module)}.{kind}")

    def ours(self, theirs: Read, name: str, config: Any) -> Tensor:
        """Return one Longmesh parameter, read from transformers' parameters.

        The result is the same tensor or a view, unless the weight is fused in groups or ``ours_of``
        copies it.
        """
        place = self._place(name, config)
        weight = theirs(place.name)
        if place.fused is not None:
            weight = place.fused.part(weight, place.part, config)
        return self.ours_of(config, name, weight)

    def inside(self, names: Iterable[str], config: Any) -> dict[str, list[str]]:
        """Return the names of the Longmesh parameters in each transformers parameter, in order.

        They are keyed by the name of the transformers parameter.
        """
        ours_by_theirs: dict[str, list[str]] = {}
        for name in names:
            place = self._place(name, config)
            if place.fused is None:
                ours_by_theirs[place.name] = [name]
            elif place.part == 0:
                parts = place.fused.parts
                ours_by_theirs[place.name] = [name.replace(parts[0], part) for part in parts]
        return ours_by_theirs

    def theirs(self, ours: Read, inside: Sequence[str], config: Any) -> Tensor:
        """Return one transformers parameter, built from the Longmesh parameters ``inside``.

        The result is the same tensor as Longmesh's, unless it is fused or ``theirs_of`` copies it.
        """
        weights = [ours(name) for name in inside]
        fused = self._place(inside[0], config).fused
        weight = weights[0] if fused is None else fused.joined(weights, config)
        return self.theirs_of(config, inside[0], weight)

    def to_theirs(self, ours: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Convert a Longmesh state dict to transformers'."""
        state = {}
        for name, inside in self.inside(ours, config).items():
            state[name] = self.theirs(ours.__getitem__, inside, config)
        return state


@dataclass(frozen=True, kw_only=True)
class Family:
    """A transformers model that is equal to a Longmesh model with certain settings."""

    kind: str
    """Value of model_type in transformers' config.json."""
    title: str
    """Name of the model in messages, such as "a LLaMA"."""
    architecture: str
    """Name of the transformers class."""
    ours: type[DecoderConfig]
    """Class of Longmesh's configuration."""
    fields: Mapping[str, ConfigKey]
    """Keys of config.json that each hold one Longmesh field unchanged."""
    groups: tuple[KeyGroup, ...]
    """Other groups of keys to read, in order, after the key of tied embeddings."""
    tied: bool
    """True if the embeddings are tied by default, if config.json has no entry for this."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Longmesh fields that have one value in all of these models."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that may select a computation that Longmesh lacks, and their supported values. A missing
    key means the first value, which an export writes unless it is None."""
    rates: tuple[str, ...] = ()
    """Keys of dropout rates, which a trained model does not use; an export writes 0."""
    ids: tuple[str, ...] = ("bos_token_id", "eos_token_id")
    """Keys of token ids for which transformers has its own defaults; an export writes null to
    override them."""
    ignored: frozenset[str] = frozenset()
    """Keys of this model that change nothing."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Overriding key -> overridden key, for keys that replace another one if they are present."""
    needs: tuple[Need, ...] = ()
    names: Names
    derived: str = r"(?!)"
    """Pattern of tensor names in old checkpoints that are not weights; an import ignores them."""
    prefix: str = ""
    """Prefix of all names except lm_head's; some files omit it."""
    stored: tuple[Names, ...] = ()
    """Other tables of names, which files may use instead of ``names``."""
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Transformers modules that files may store in pieces: module -> its pieces, in order."""
    nested: str = ""
    """Key in the ``outer`` model's config.json whose table has this model's entries."""
    outer: str = ""
    """The model_type of a larger model that contains this one."""
    instead_of: str = ""
    """The model_type of files that transformers reads as this model if they have ``marker``."""
    marker: str = ""
    """Key that distinguishes this model's files from those of ``instead_of``."""
    skipped: str = r"(?!)"
    """Pattern of weight names of other parts, which an import skips with a note."""

    @property
    def embedding(self) -> str:
        """Transformers' name of the embedding weight, to which lm_head.weight may be tied."""
        return self.names.of("embedding.weight")

    @property
    def known(self) -> set[str]:
        """Keys that are read, or known to change nothing."""
        keys = {*self.fields, *self.only, *self.aliases, *self.rates, *self.ignored}
        return keys | self._grouped | {*IGNORED, *ONLY, *TOKEN_IDS, "model_type", TIED}

    @property
    def _grouped(self) -> set[str]:
        return {key for group in self.groups for key in group.keys}

    def refuse(self, config: DecoderConfig) -> None:
        """Raise UserError if the transformers model cannot express this Longmesh model."""
        for name, value in self.fixed.items():
            if getattr(config, name) not in (value, None):
                raise self._unlike(config, name, f"{value}")
        for need in self.needs:
            if not need.holds(config):
                raise self._unlike(config, need.ours, need.only.format(config=config))

    def _unlike(self, config: DecoderConfig, name: str, only: str) -> UserError:
        return UserError(
            f"{name} is {getattr(config, name)}, but for {self.title} it must be {only}"
        )

    def check(self, hf: Contents) -> None:
        """Check the entries of a config.json.

        Raises:
            UserError: an entry may change what is computed, or has a wrong type.
        """
        known_keys = self.known
        for key, value in hf.items():
            supported = self.only.get(key, ONLY.get(key))
            if supported is not None:
                check_value(CONFIG, key, value, supported)
            elif key not in known_keys:
                rest = (
                    f": {with_article(self.kind)} is not known to have it, and it may change what "
                    "is computed; remove it from the file if the model is the same without it"
                )
                raise unsupported(shown(key)[1:-1], value, rest)

        for key in TOKEN_IDS:
            is_list = key == "eos_token_id" and isinstance(hf.get(key), list)
            entry(hf, key, list if is_list else int, None)
        longest = entry(hf, "max_position_embeddings", int, None)
        if longest is not None and longest < 1:
            raise UserError(
                f"{CONFIG}: max_position_embeddings is below 1; give the maximum length"
            )
        for key in self.rates:
            rate = entry(hf, key, float, None) or 0
            if not 0 <= rate < 1:
                raise UserError(
                    f"{CONFIG}: {key} is {shown(hf[key])}; it must be 0 or more and below 1"
                )

    def read(self, hf: Contents) -> DecoderConfig:
        """Build Longmesh's configuration from the contents of a config.json.

        Raises:
            KeyError: a key is missing.
            UserError: an entry is not supported.
        """
        contents = dict(hf)
        for key, name in self.aliases.items():
            if key in hf:
                contents[name] = entry(hf, key, int)

        settings: dict[str, Any] = dict(self.fixed)
        for key, (ours, kind, default) in self.fields.items():
            defaults = [] if default is REQUIRED else [default]
            settings[ours] = entry(contents, key, kind, *defaults)
        tied = entry(contents, TIED, bool, self.tied)
        settings["untie_embeddings_and_output_weights"] = not tied
        for group in self.groups:
            settings |= group.read(contents, settings)

        try:
            return self.ours(**settings)
        except UserError as error:
            # The message names the Longmesh field; put the key of config.json in its place.
            name, _, problem = str(error).partition(" ")
            for key, config_key in self.fields.items():
                if config_key.ours == name:
                    name = key
                    break
            raise UserError(f"{name} {problem}") from None

    def write(self, config: DecoderConfig, contents: Contents) -> dict[str, Any]:
        """Return the contents of a config.json for transformers.

        In order of precedence these are the entries that Longmesh's fields determine, the known
        entries of ``contents``, and defaults for which transformers would choose other values.
        """
        determined: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.kind,
        }
        for key, (ours, kind, _) in self.fields.items():
            value = config.resolved(ours)[ours]
            if value is not None:
                determined[key] = kind(value)
        determined[TIED] = not config.untie_embeddings_and_output_weights
        for group in self.groups:
            determined |= group.write(config)

        defaults: dict[str, Any] = dict.fromkeys(self.ids) | dict.fromkeys(self.rates, 0.0)
        for key, config_key in self.fields.items():
            if config_key.default not in (REQUIRED, None):
                defaults[key] = config_key.default
        for key, values in self.only.items():
            if values[0] is not None:
                defaults[key] = values[0]

        copied = {}
        copied_keys = self.known - self._grouped - self.aliases.keys()
        for key, value in contents.items():
            if key in copied_keys and (value is not None or key not in defaults):
                copied[key] = value
        return defaults | copied | determined
