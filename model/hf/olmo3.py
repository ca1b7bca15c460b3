"""Transformers' Olmo3ForCausalLM: OLMo 3."""

from dataclasses import replace
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.hf.family import TOKEN_IDS, Contents, Family, Field, Need, Part
from model.hf.folder import CONFIG, entry, shown
from model.hf.llama import FIELDS, LLAMA, ROPE, SLIDING, WHOLE, rope_from_hf, rope_to_hf, windows_from_hf, windows_to_hf
from runtime.errors import UserError

THETA = 500000.0


def kinds_from_hf(hf: Contents, settings: dict[str, Any], every: int, interval: str | None = None) -> dict[str, Any]:
    """Return our windows; without layer_types every so many-th layer has none, as the key ``interval`` may say."""
    every = every if interval is None else entry(hf, interval, int, every)
    if every < 1:
        raise UserError(f"{CONFIG}: {interval} = {every} is not supported; only 1 or more is")
    layers = range(1, min(settings["num_layers"], 10**5) + 1)
    return windows_from_hf(hf, settings, [SLIDING if layer % every else WHOLE for layer in layers])


def ropes_from_hf(
    hf: Contents, settings: dict[str, Any], bases: tuple[float, float], local: str | None = None
) -> dict[str, Any]:
    """Return our settings of two ropes: rope_parameters has a table each, and rope_scaling changes the whole layers'.

    Args:
        bases: of layers that see all, and of those with a window, where a file does not say them.
        local: key of the latter outside of the table.
    """
    tables = hf.get("rope_parameters") or {}
    if not isinstance(tables, dict) or not all(
        kind in (WHOLE, SLIDING) and isinstance(table, dict | None) for kind, table in tables.items()
    ):
        raise UserError(
            f"{CONFIG}: rope_parameters = {shown(tables)} is not supported; only a table each for {WHOLE} and "
            f"{SLIDING} is"
        )
    scaling = hf.get("rope_scaling")
    if not isinstance(scaling, dict | None):
        raise UserError(f"{CONFIG}: rope_scaling = {shown(scaling)} is not supported; only a table is")
    others = {key: value for key, value in hf.items() if key not in ROPE[:3]}
    whole = {"rope_theta": entry(hf, "rope_theta", float, bases[0]), **(tables.get(WHOLE) or {}), **(scaling or {})}
    found = rope_from_hf({**others, "rope_parameters": whole}, settings)
    if "window_size" not in settings:
        return found
    base = bases[1] if local is None else entry(hf, local, float, bases[1])
    sliding = tables.get(SLIDING) or {}
    plain = rope_from_hf({**others, "rope_parameters": {"rope_theta": base, **sliding}}, settings)
    if plain.keys() != {"rotary_base"}:
        raise UserError(
            f"{CONFIG}: rope_parameters = {shown({SLIDING: sliding})} is not supported; layers with a window have "
            "only the type default"
        )
    if local is None and "rope_theta" not in sliding and found["rotary_base"] != base:
        raise UserError(
            f"{CONFIG}: rope_theta = {found['rotary_base']:g} is not supported without one for {SLIDING} in "
            f"rope_parameters, where transformers 4 takes this base and 5 takes {base:g}; write it there"
        )
    return {**found, "rotary_base_local": plain["rotary_base"]}


def ropes_to_hf(config: ModelConfig, local: str | None = None) -> dict[str, Any]:
    """Return the entries that ``ropes_from_hf`` reads."""
    found = rope_to_hf(config)
    tables = {WHOLE: found["rope_parameters"]}
    if config.local_rope is not None:
        base = float(config.local_rope.rotary_base)
        tables[SLIDING] = {"rope_type": "default", "rope_theta": base}
        found |= {} if local is None else {local: base}
    return {**found, "rope_parameters": tables}


OLMO3 = Family(
    kind="olmo3",
    title="an OLMo 3",
    architecture="Olmo3ForCausalLM",
    ours="olmo3",
    fields={**FIELDS, "rms_norm_eps": Field("norm_epsilon", float, 1e-5)},
    tied=False,
    parts=(
        Part(("sliding_window", "layer_types"), partial(kinds_from_hf, every=4), windows_to_hf),
        Part(ROPE, partial(ropes_from_hf, bases=(THETA, THETA)), ropes_to_hf),
    ),
    only={"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    needs=(Need("init_method_std", lambda config: config.init_method_std <= 1, "1 at most"),),
    names=replace(
        LLAMA.names,
        layer={
            **LLAMA.names.layer,
            "attention_norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
    ),
)
