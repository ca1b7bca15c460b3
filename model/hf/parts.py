"""Entries of config.json that belong together in the LLaMA's kin: rope, and the kinds of layers
with their windows.
"""

from collections.abc import Mapping
from typing import Any

from model.config import DecoderConfig
from model.hf.family import Contents
from model.hf.folder import CONFIG, entry, unsupported
from model.parts.rope import PREFIX as SCALING
from model.parts.rope import SETTINGS, dynamic_base
from model.parts.settings import RotaryConfig
from runtime.errors import UserError

WHOLE, SLIDING = "full_attention", "sliding_attention"
TRAINED = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", TRAINED)
WINDOWS = ("sliding_window", "layer_types")
LISTED = 10**5
"""Most layers whose kinds are listed."""


def _table(hf: Contents, key: str) -> Mapping[str, Any]:
    """Return a table of config.json, empty where there is none."""
    found = hf.get(key)
    if not isinstance(found, dict | None):
        raise unsupported(key, found, "; only a table is")
    return found or {}


def rope_from_hf(
    hf: Contents,
    settings: dict[str, Any],
    share: float | None = None,
    others: tuple[str, ...] = (),
    theta: float = 10000.0,
) -> dict[str, Any]:
    """Return our settings of rope: transformers 4 has a table rope_scaling beside rope_theta, 5
    rope_parameters.

    Args:
        share: of a head's channels that turns by default, in a model which may have another one;
            None is all.
        others: keys of the table that change nothing.
        theta: the base where a file does not say it.
    """
    tables = {key: _table(hf, key) for key in ("rope_scaling", "rope_parameters")}
    key = "rope_scaling" if tables["rope_scaling"] else "rope_parameters"
    rope = tables[key]
    base = entry(rope, "rope_theta", float, entry(hf, "rope_theta", float, theta))
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    plain = kind == "default" or (kind == "linear" and rope.get("factor") == 1)
    parts = [entry(one, "partial_rotary_factor", float, None) for one in (rope, hf)]
    if (share is None and any(part not in (None, 1) for part in parts)) or not (
        plain or kind in list(SETTINGS)
    ):
        raise unsupported(key, rope, f"; only default, {', '.join(SETTINGS)} of all channels are")
    known = SETTINGS.get(kind, ())
    strange = rope.keys() - {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        TRAINED,
        *known,
        *others,
    }
    if strange:
        only = f"{', '.join(known) or 'rope_theta'} {'are' if known else 'is'}"
        raise unsupported(
            key, {name: rope[name] for name in sorted(strange)}, f" by {kind}; only {only}"
        )
    turned = (
        {}
        if share is None
        else {"rotary_percent": next((part for part in parts if part is not None), share)}
    )
    if plain:
        return {"rotary_base": base} | turned
    found: dict[str, Any] = {f"{SCALING}factor": entry(rope, "factor", float)}
    if TRAINED in known:
        longest = settings["max_position_embeddings"]
        said = entry(hf if TRAINED in hf else rope, TRAINED, int, longest)
        found[SCALING + TRAINED] = longest if kind == "dynamic" else said
    for name in known:
        if name == "truncate":
            found[SCALING + name] = entry(rope, name, bool, True)
        elif name not in ("factor", TRAINED):
            found[SCALING + name] = entry(rope, name, float, *([] if kind == "llama3" else [None]))
    return {"rotary_base": base, "rope_scaling_type": kind, **found, **turned}


def rope_to_hf(config: RotaryConfig, share: float | None = None) -> dict[str, Any]:
    """Return rope_theta and its table, for transformers 5 and, where it is scaled, for 4; and the
    longest sequence.

    ``share`` of a head's channels turns, in a model which may have another one than all.
    """
    base, kind = float(config.rotary_base), config.rope_scaling_type
    longest = config.max_position_embeddings or config.scaled_length
    if (
        config.rope_scaling_seq_length is not None
    ):  # theirs looks at each text's length, and ours no longer does
        base, kind = dynamic_base(config, config.rotary_dim, config.rope_scaling_seq_length), None
        longest = max(config.max_position_embeddings or 0, config.rope_scaling_seq_length)
    elif kind == "dynamic":
        longest = (
            config.rope_scaling_original_max_position_embeddings or 0
        )  # the length that theirs scales from
    length = {"max_position_embeddings": longest} if longest else {}
    turned = {} if share is None else {"partial_rotary_factor": share}
    if kind is None:
        return {
            "rope_theta": base,
            "rope_parameters": {"rope_type": "default", "rope_theta": base, **turned},
        } | length
    scaling: dict[str, Any] = {"rope_type": kind, **turned}
    for name in SETTINGS[kind] if kind != "dynamic" else ("factor",):
        resolved = kind == "llama3" and name.endswith("freq_factor")
        value = config.setting(name) if resolved else getattr(config, SCALING + name)
        if value is not None and not (name == "truncate" and value):
            scaling[name] = value
    return {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": scaling | {"rope_theta": base},
    } | length


def _tables_by_kind(hf: Contents) -> Mapping[str, Any]:
    """Return the tables of rope_parameters, one for each kind of layers.

    Entries beside two whole tables are passed over: transformers 5 writes both where a model was
    made from the entries alone, and takes the tables.
    """
    entries = hf.get("rope_parameters") or {}
    if not isinstance(entries, dict):
        raise unsupported(
            "rope_parameters", entries, f"; only a table each for {WHOLE} and {SLIDING} is"
        )

    tables = {kind: table for kind, table in entries.items() if kind in (WHOLE, SLIDING)}
    beside = entries.keys() - tables.keys()
    whole = all("rope_theta" in (tables.get(kind) or {}) for kind in (WHOLE, SLIDING))
    scalings = {name for names in SETTINGS.values() for name in names}
    passed_over = whole and beside <= {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *scalings,
    }
    are_tables = all(isinstance(table, dict | None) for table in tables.values())
    if not are_tables or (beside and not passed_over):
        raise unsupported(
            "rope_parameters", entries, f"; only a table each for {WHOLE} and {SLIDING} is"
        )
    return tables


def ropes_from_hf(
    hf: Contents, settings: dict[str, Any], bases: tuple[float, float], local: str | None = None
) -> dict[str, Any]:
    """Return our settings of two ropes: rope_parameters has a table each, and rope_scaling changes
    the whole layers'.

    Args:
        bases: of layers that see all, and of those with a window, where a file does not say them.
        local: key of the latter outside of the table.
    """
    tables = _tables_by_kind(hf)
    scaling, sliding = _table(hf, "rope_scaling"), tables.get(SLIDING) or {}
    others = {key: value for key, value in hf.items() if key not in ROPE[:3]}
    whole = {
        "rope_theta": entry(hf, "rope_theta", float, bases[0]),
        **(tables.get(WHOLE) or {}),
        **scaling,
    }
    found = rope_from_hf({**others, "rope_parameters": whole}, settings)
    if "window_size" not in settings:
        return found
    base = bases[1] if local is None else entry(hf, local, float, bases[1])
    plain = rope_from_hf({**others, "rope_parameters": {"rope_theta": base, **sliding}}, settings)
    if plain.keys() != {"rotary_base"}:
        rest = "; layers with a window have only the type default"
        raise unsupported("rope_parameters", {SLIDING: sliding}, rest)
    if local is None and "rope_theta" not in sliding and found["rotary_base"] != base:
        raise UserError(
            f"{CONFIG}: rope_theta = {found['rotary_base']:g} is not supported without one for {SLIDING} in "
            f"rope_parameters, where transformers 4 takes this base and 5 takes {base:g}; write it there"
        )
    return {**found, "rotary_base_local": plain["rotary_base"]}


def ropes_to_hf(config: RotaryConfig, local: str | None = None) -> dict[str, Any]:
    """Return the entries that ``ropes_from_hf`` reads."""
    found = rope_to_hf(config)
    tables = {WHOLE: found["rope_parameters"]}
    if config.local_rope is not None:
        base = float(config.local_rope.rotary_base)
        tables[SLIDING] = {"rope_type": "default", "rope_theta": base}
        found |= {} if local is None else {local: base}
    return {**found, "rope_parameters": tables}


def _width(hf: Contents) -> int | None:
    """Return the keys of a window, a token's own among them; None without one."""
    width: int | None = entry(hf, "sliding_window", int, None) if "sliding_window" in hf else 4096
    if width is not None and width < 2:
        raise unsupported("sliding_window", width, "; only 2 or more is")
    return width


def _windows(width: int | None, kinds: Any, layers: int) -> dict[str, Any]:
    """Return our windows: one of ``width`` keys in the layers whose kind says so."""
    named = kinds if isinstance(kinds, list) else []
    whole, sliding = (
        [kind in (WHOLE, "attention") for kind in named],
        [kind == SLIDING for kind in named],
    )
    if named and len(named) != layers:
        raise UserError(
            f"{CONFIG}: layer_types has {len(named)} entries, and num_hidden_layers is {layers}"
        )
    if not named or sum(whole) + sum(sliding) != layers:
        raise unsupported("layer_types", kinds, f"; only {WHOLE} or {SLIDING} per layer is")
    if not any(sliding):
        return {}
    if width is None:
        raise unsupported("layer_types", kinds, " without a sliding_window, and there is none")
    pattern = f"[{','.join(str(int(one)) for one in sliding)}]"
    return {
        "window_size": f"{width - 1},0",
        "window_attn_skip_freq": pattern if any(whole) else None,
    }


def window_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return our window, that of every layer."""
    width = _width(hf)
    return {} if width is None else {"window_size": f"{width - 1},0"}


def window_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of every layer's window as theirs counts them, a token's own among them; None
    without one.
    """
    window = config.window(0)
    return {"sliding_window": None if window is None else window[0] + 1}


def windows_from_hf(
    hf: Contents, settings: dict[str, Any], every: int = LISTED + 1, interval: str | None = None
) -> dict[str, Any]:
    """Return our windows, in the layers whose layer_types say so.

    Without layer_types every so many-th layer has none, as the key ``interval`` may say; by default
    all have one.
    """
    every = every if interval is None else entry(hf, interval, int, every)
    if every < 1:
        raise unsupported(str(interval), every, "; only 1 or more is")
    layers, kinds = settings["num_layers"], hf.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if layer % every else WHOLE for layer in range(1, min(layers, LISTED) + 1)]
    return _windows(_width(hf), kinds, layers)


def ministral_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Do as ``windows_from_hf``; a Ministral always has a width."""
    if _width(hf) is None:
        raise unsupported("sliding_window", None, " beside layer_types; only a width is")
    return windows_from_hf(hf, settings)


def windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the kind of each layer, and the window of those that have one."""
    kinds = {"layer_types": [WHOLE if window is None else SLIDING for window in config.windows]}
    left = next((window[0] for window in config.windows if window), None)
    return kinds if left is None else {"sliding_window": left + 1, **kinds}


def qwen_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return our windows, in the layers whose layer_types say so, or in those after the first
    max_window_layers.
    """
    entry(hf, "sliding_window", int, None)  # transformers checks its type where it is not used, too
    entry(hf, "head_dim", int, 1)  # left out it has a default, null is an error
    width = _width(hf) if entry(hf, "use_sliding_window", bool, False) else None
    first, layers = entry(hf, "max_window_layers", int, 28), settings["num_layers"]
    if (kinds := hf.get("layer_types")) is None:
        kinds = [
            SLIDING if width and layer >= first else WHOLE for layer in range(min(layers, LISTED))
        ]
    return _windows(width, kinds, layers)


def qwen_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the entries that ``qwen_from_hf`` reads."""
    found = windows_to_hf(config)
    if "sliding_window" not in found:
        return {"use_sliding_window": False, **found}
    # Old versions of transformers know the number of whole layers before the others alone.
    return {
        "use_sliding_window": True,
        "max_window_layers": found["layer_types"].index(SLIDING),
        **found,
    }
