"""Entries of config.json that are converted together: rope, and layers with windows.

Each ``*_from_hf`` takes the entries of config.json and Longmesh's settings so far, and returns more
settings; each ``*_to_hf`` is its inverse.
"""

from collections.abc import Mapping
from typing import Any

from model.config import DecoderConfig
from model.hf.entries import CONFIG, entry, unsupported
from model.hf.family import Contents
from model.parts.rope import PREFIX as SCALING
from model.parts.rope import SETTINGS, dynamic_base
from model.parts.settings import RotaryConfig
from runtime.errors import UserError

WHOLE = "full_attention"
SLIDING = "sliding_attention"
TRAINED = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", TRAINED)
WINDOWS = ("sliding_window", "layer_types")
LISTED = 10**5
"""Maximum number of layers whose kinds are listed; an untrusted file may claim any number of
layers."""


def _table(hf: Contents, key: str) -> Mapping[str, Any]:
    """Return a table of config.json; empty if it is missing."""
    table = hf.get(key)
    if not isinstance(table, dict | None):
        raise unsupported(key, table, "; only a table is")
    return table or {}


def rope_from_hf(
    hf: Contents,
    settings: dict[str, Any],
    share: float | None = None,
    others: tuple[str, ...] = (),
    theta: float = 10000.0,
) -> dict[str, Any]:
    """Return Longmesh's rope settings.

    transformers 4 writes a table rope_scaling beside rope_theta; transformers 5 writes a table
    rope_parameters.

    Args:
        share: default fraction of a head's channels that rotate, for a model that may rotate only
            some; None rotates all.
        others: further keys of the rope table, which change nothing.
        theta: base of the rotation if a file has none.
    """
    key = "rope_scaling"
    rope = _table(hf, key)
    rope_parameters = _table(hf, "rope_parameters")
    if not rope:
        key = "rope_parameters"
        rope = rope_parameters

    base = entry(rope, "rope_theta", float, entry(hf, "rope_theta", float, theta))
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    is_plain = kind == "default" or (kind == "linear" and rope.get("factor") == 1)
    shares = [entry(table, "partial_rotary_factor", float, None) for table in (rope, hf)]
    rotates_all = all(number in (None, 1) for number in shares)
    # Not `in SETTINGS`: JSON lists are unhashable.
    is_known = is_plain or kind in list(SETTINGS)
    if not is_known or (share is None and not rotates_all):
        raise unsupported(
            key,
            rope,
            f"; the type must be default, {', '.join(SETTINGS)}, and partial_rotary_factor 1 "
            "unless the model rotates only a share of the channels",
        )
    _check_rope_keys(key, rope, kind, others)

    converted: dict[str, Any] = {"rotary_base": base}
    if not is_plain:
        converted |= _scaling_from_hf(hf, rope, kind, settings["max_position_embeddings"])
    if share is not None:
        stated_shares = [number for number in shares if number is not None]
        converted["rotary_percent"] = stated_shares[0] if stated_shares else share
    return converted


def _check_rope_keys(key: str, rope: Contents, kind: str, others: tuple[str, ...]) -> None:
    """Raise UserError for keys of a rope table that its rope type does not have."""
    names = SETTINGS.get(kind, ())
    allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", TRAINED, *names, *others}
    unknown = {name: rope[name] for name in sorted(rope.keys() - allowed)}
    if unknown:
        only = f"{', '.join(names)} are" if names else "rope_theta is"
        raise unsupported(key, unknown, f" by {kind}; only {only}")


def _scaling_from_hf(hf: Contents, rope: Contents, kind: str, max_length: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_scaling_type": kind,
        f"{SCALING}factor": entry(rope, "factor", float),
    }
    for name in SETTINGS[kind]:
        if name == "factor":
            continue
        if name == TRAINED:
            trained_length = entry(hf if TRAINED in hf else rope, TRAINED, int, max_length)
            # In transformers the dynamic type scales beyond max_position_embeddings, whatever
            # original length the file has.
            scaling[SCALING + name] = max_length if kind == "dynamic" else trained_length
        elif name == "truncate":
            scaling[SCALING + name] = entry(rope, name, bool, True)
        elif kind == "llama3":
            scaling[SCALING + name] = entry(rope, name, float)
        else:
            scaling[SCALING + name] = entry(rope, name, float, None)
    return scaling


def rope_to_hf(config: RotaryConfig, share: float | None = None) -> dict[str, Any]:
    """Return rope_theta, the rope table, and max_position_embeddings.

    The table is rope_parameters, for transformers 5; with a scaling there is also rope_scaling, for
    transformers 4.

    Args:
        share: fraction of a head's channels that rotate; None leaves it out, for a model that
            rotates all.
    """
    base = float(config.rotary_base)
    kind = config.rope_scaling_type
    longest = config.max_position_embeddings or config.scaled_length
    if config.rope_scaling_seq_length is not None:
        # Longmesh fixes dynamic scaling to one length, while transformers' depends on each text's
        # length. At that length it equals unscaled rope with another base, so that base is written.
        base = dynamic_base(config, config.rotary_dim, config.rope_scaling_seq_length)
        kind = None
        longest = max(config.max_position_embeddings or 0, config.rope_scaling_seq_length)
    elif kind == "dynamic":
        # transformers scales rope beyond max_position_embeddings, so write the unscaled length.
        longest = config.rope_scaling_original_max_position_embeddings or 0
    length = {"max_position_embeddings": longest} if longest else {}
    rotated = {} if share is None else {"partial_rotary_factor": share}

    if kind is None:
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base, **rotated}
        return {"rope_theta": base, "rope_parameters": parameters, **length}

    scaling: dict[str, Any] = {"rope_type": kind, **rotated}
    for name in SETTINGS[kind] if kind != "dynamic" else ("factor",):
        value = getattr(config, SCALING + name)
        if kind == "llama3" and name.endswith("freq_factor"):
            value = config.setting(name)
        is_default = value is None or (name == "truncate" and value)
        if not is_default:
            scaling[name] = value
    return {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": scaling | {"rope_theta": base},
        **length,
    }


def _tables_by_kind(hf: Contents) -> Mapping[str, Any]:
    """Return the tables of rope_parameters, one for each kind of layer.

    Entries beside two complete tables are ignored: for a model made from such entries alone,
    transformers 5 writes the entries and the tables, but reads only the tables.
    """
    parameters = hf.get("rope_parameters") or {}
    rest = f"; only two tables, for {WHOLE} and {SLIDING}, are"
    if not isinstance(parameters, dict):
        raise unsupported("rope_parameters", parameters, rest)

    tables = {kind: table for kind, table in parameters.items() if kind in (WHOLE, SLIDING)}
    if not all(isinstance(table, dict | None) for table in tables.values()):
        raise unsupported("rope_parameters", parameters, rest)

    entries = parameters.keys() - tables.keys()
    ignored = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for names in SETTINGS.values():
        ignored |= {*names}
    are_whole = all("rope_theta" in (tables.get(kind) or {}) for kind in (WHOLE, SLIDING))
    if entries and not (are_whole and entries <= ignored):
        raise unsupported("rope_parameters", parameters, rest)
    return tables


def ropes_from_hf(
    hf: Contents, settings: dict[str, Any], bases: tuple[float, float], local: str | None = None
) -> dict[str, Any]:
    """Return the settings of two ropes: one for layers without a window, one for those with one.

    rope_parameters has a table for each; rope_scaling applies to layers without a window.

    Args:
        bases: rotation bases of layers without and with a window, if a file has none.
        local: key outside the table that holds the base of layers with a window.
    """
    tables = _tables_by_kind(hf)
    scaling = _table(hf, "rope_scaling")
    sliding = tables.get(SLIDING) or {}
    others = {key: value for key, value in hf.items() if key not in ROPE[:3]}

    whole = {"rope_theta": entry(hf, "rope_theta", float, bases[0])}
    whole |= tables.get(WHOLE) or {}
    whole |= scaling
    converted = rope_from_hf({**others, "rope_parameters": whole}, settings)
    if "window_size" not in settings:
        return converted

    base = bases[1] if local is None else entry(hf, local, float, bases[1])
    sliding_rope = {"rope_theta": base, **sliding}
    local_rope = rope_from_hf({**others, "rope_parameters": sliding_rope}, settings)
    if local_rope.keys() != {"rotary_base"}:
        rest = "; layers with a window can only have the type default"
        raise unsupported("rope_parameters", {SLIDING: sliding}, rest)
    if local is None and "rope_theta" not in sliding and converted["rotary_base"] != base:
        raise UserError(
            f"{CONFIG}: rope_theta is {converted['rotary_base']:g}, but rope_parameters has none "
            f"for {SLIDING}, for which transformers 4 uses this base and transformers 5 uses "
            f"{base:g}; write the right base into rope_parameters"
        )
    return {**converted, "rotary_base_local": local_rope["rotary_base"]}


def ropes_to_hf(config: RotaryConfig, local: str | None = None) -> dict[str, Any]:
    """Return the config.json entries that ``ropes_from_hf`` reads."""
    entries = rope_to_hf(config)
    tables = {WHOLE: entries["rope_parameters"]}
    if config.local_rope is not None:
        base = float(config.local_rope.rotary_base)
        tables[SLIDING] = {"rope_type": "default", "rope_theta": base}
        if local is not None:
            entries[local] = base
    return {**entries, "rope_parameters": tables}


def _width(hf: Contents) -> int | None:
    """Return the number of keys in a window, including a token's own key; None without a window."""
    width: int | None = 4096  # default of transformers
    if "sliding_window" in hf:
        width = entry(hf, "sliding_window", int, None)
    if width is not None and width < 2:
        raise unsupported("sliding_window", width, "; only 2 or more is")
    return width


def _windows(width: int | None, kinds: Any, layers: int) -> dict[str, Any]:
    """Return the settings for a window of ``width`` keys in the layers of the sliding kind."""
    names = kinds if isinstance(kinds, list) else []
    whole = [name in (WHOLE, "attention") for name in names]
    sliding = [name == SLIDING for name in names]
    if names and len(names) != layers:
        raise UserError(
            f"{CONFIG}: layer_types has {len(names)} entries, but num_hidden_layers is {layers}; "
            "correct the file"
        )
    if not names or sum(whole) + sum(sliding) != layers:
        raise unsupported("layer_types", kinds, f"; only {WHOLE} or {SLIDING} per layer is")
    if not any(sliding):
        return {}
    if width is None:
        raise unsupported("layer_types", kinds, " without a sliding_window")

    pattern = None
    if any(whole):
        flags = ",".join("1" if is_sliding else "0" for is_sliding in sliding)
        pattern = f"[{flags}]"
    return {"window_size": f"{width - 1},0", "window_attn_skip_freq": pattern}


def window_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a window in every layer."""
    width = _width(hf)
    return {} if width is None else {"window_size": f"{width - 1},0"}


def window_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return every layer's window width, which counts a token's own key; None without a window."""
    window = config.window(0)
    return {"sliding_window": None if window is None else window[0] + 1}


def windows_from_hf(
    hf: Contents, settings: dict[str, Any], every: int = LISTED + 1, interval: str | None = None
) -> dict[str, Any]:
    """Return the settings of windows in the layers that layer_types lists.

    Args:
        every: without layer_types, every N-th layer has no window; by default all have one.
        interval: key of config.json that overrides ``every``.
    """
    if interval is not None:
        every = entry(hf, interval, int, every)
    if every < 1:
        raise unsupported(str(interval), every, "; only 1 or more is")
    layers = settings["num_layers"]
    kinds = hf.get("layer_types")
    if kinds is None:
        numbers = range(1, min(layers, LISTED) + 1)
        kinds = [SLIDING if number % every else WHOLE for number in numbers]
    return _windows(_width(hf), kinds, layers)


def ministral_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of windows; a Ministral's file must have a width."""
    if _width(hf) is None:
        raise unsupported("sliding_window", None, " beside layer_types; only a number is")
    return windows_from_hf(hf, settings)


def windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the kind of each layer, and the width of the window if a layer has one."""
    kinds = {"layer_types": [WHOLE if window is None else SLIDING for window in config.windows]}
    windows = list(filter(None, config.windows))
    if not windows:
        return kinds
    return {"sliding_window": windows[0][0] + 1, **kinds}


def qwen_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of windows in the layers that layer_types lists.

    Without layer_types the layers after the first max_window_layers have windows.
    """
    entry(hf, "sliding_window", int, None)  # transformers checks it even if it is unused
    entry(hf, "head_dim", int, 1)  # a missing key has a default, but null is an error
    width = _width(hf) if entry(hf, "use_sliding_window", bool, False) else None
    first = entry(hf, "max_window_layers", int, 28)
    layers = settings["num_layers"]
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = [WHOLE] * min(layers, LISTED)
        if width:
            kinds = [WHOLE if layer < first else SLIDING for layer in range(len(kinds))]
    return _windows(width, kinds, layers)


def qwen_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the config.json entries that ``qwen_from_hf`` reads."""
    entries = windows_to_hf(config)
    if "sliding_window" not in entries:
        return {"use_sliding_window": False, **entries}
    return {
        "use_sliding_window": True,
        # Old versions of transformers read this number instead of layer_types.
        "max_window_layers": entries["layer_types"].index(SLIDING),
        **entries,
    }
