"""Settings of rope in a config.json, and ours."""

from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig
from model.hf.folder import entry, shown
from model.rope import PREFIX as SCALING
from model.rope import SETTINGS, dynamic_base
from runtime.errors import UserError


def rope_from_hf(hf: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return our settings of rope; ``longest`` is max_position_embeddings. Raises as ``config_from_hf``."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"  # transformers 4 has it beside rope_theta
    rope = hf.get(key) or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: {key} = {shown(rope)} is not supported; only a table is")
    base = entry(rope if "rope_theta" in rope else hf, "rope_theta", float, 10000.0)
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    parts = [one.get("partial_rotary_factor") for one in (rope, hf)]
    plain = kind == "default" or (kind == "linear" and rope.get("factor") == 1)
    if any(part not in (None, 1) for part in parts) or not (plain or kind in list(SETTINGS)):
        raise UserError(
            f"config.json: {key} = {shown(rope)} is not supported; only default, {', '.join(SETTINGS)} of all channels "
            "are"
        )
    if plain:
        return {"rotary_base": base}
    trained = "original_max_position_embeddings"
    strange = rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", trained, *SETTINGS[kind]}
    if strange:
        raise UserError(
            f"config.json: {key} = {shown({name: rope[name] for name in sorted(strange)})} is not supported by {kind}; "
            f"only {', '.join(SETTINGS[kind])} are"
        )
    found: dict[str, Any] = {f"{SCALING}factor": entry(rope, "factor", float)}
    if trained in SETTINGS[kind]:
        said = hf if trained in hf else rope
        found[SCALING + trained] = longest if kind == "dynamic" else entry(said, trained, int, longest)
    for name in SETTINGS[kind]:
        if name == "truncate":
            found[SCALING + name] = entry(rope, name, bool, True)
        elif name not in ("factor", trained):
            required = kind == "llama3"
            found[SCALING + name] = entry(rope, name, float) if required else entry(rope, name, float, None)
    return {"rotary_base": base, "rope_scaling_type": kind, **found}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return rope_theta and its table, for transformers 5 and, where it is scaled, for 4."""
    base, kind = float(config.rotary_base), config.rope_scaling_type
    if config.rope_scaling_seq_length is not None:  # theirs looks at each text's length, and ours no longer does
        base, kind = dynamic_base(config, config.head_dim, config.rope_scaling_seq_length), None
    if kind is None:
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in SETTINGS[kind]:
        value = (
            config.setting(name)
            if kind == "llama3" and name.endswith("freq_factor")
            else getattr(config, SCALING + name)
        )
        said = value is not None and not (name == "truncate" and value)
        if said and not (kind == "dynamic" and name != "factor"):
            scaling[name] = value
    return {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": base}}
