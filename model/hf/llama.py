"""Transformers' LLaMA, Mistral, Ministral, Qwen2 and Qwen3: our LLaMA with windows, biases of q, k, v or their norms.

All use half-split rotary pairs and weights [out, in], so only names change.
"""

from dataclasses import replace
from typing import Any

from model.config import ModelConfig
from model.hf.family import Contents, Family, Field, Names, Need, Part
from model.hf.folder import CONFIG, entry, shown
from model.rope import PREFIX as SCALING
from model.rope import SETTINGS, dynamic_base
from model.windows import Window
from runtime.errors import UserError

WHOLE, SLIDING = "full_attention", "sliding_attention"
TRAINED = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", TRAINED)


def rope_from_hf(
    hf: Contents, settings: dict[str, Any], share: float | None = None, others: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return our settings of rope: transformers 4 has a table rope_scaling beside rope_theta, 5 rope_parameters.

    Args:
        share: of a head's channels that turns by default, in a model which may have another one; None is all.
        others: keys of the table that change nothing.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(key), dict | None):
            raise UserError(f"{CONFIG}: {key} = {shown(hf[key])} is not supported; only a table is")
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(key) or {}
    base = entry(rope, "rope_theta", float, entry(hf, "rope_theta", float, 10000.0))
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    plain = kind == "default" or (kind == "linear" and rope.get("factor") == 1)
    parts = [entry(one, "partial_rotary_factor", float, None) for one in (rope, hf)]
    if (share is None and any(part not in (None, 1) for part in parts)) or not (plain or kind in list(SETTINGS)):
        raise UserError(
            f"{CONFIG}: {key} = {shown(rope)} is not supported; only default, {', '.join(SETTINGS)} of all channels are"
        )
    known = SETTINGS.get(kind, ())
    strange = rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", TRAINED, *known, *others}
    if strange:
        raise UserError(
            f"{CONFIG}: {key} = {shown({name: rope[name] for name in sorted(strange)})} is not supported by {kind}; "
            f"only {', '.join(known) or 'rope_theta'} {'are' if known else 'is'}"
        )
    turned = {} if share is None else {"rotary_percent": next((part for part in parts if part is not None), share)}
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


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return rope_theta and its table, for transformers 5 and, where it is scaled, for 4; and the longest sequence."""
    base, kind = float(config.rotary_base), config.rope_scaling_type
    longest = config.max_position_embeddings or config.scaled_length
    if config.rope_scaling_seq_length is not None:  # theirs looks at each text's length, and ours no longer does
        base, kind = dynamic_base(config, config.rotary_dim, config.rope_scaling_seq_length), None
        longest = max(config.max_position_embeddings or 0, config.rope_scaling_seq_length)
    elif kind == "dynamic":
        longest = config.rope_scaling_original_max_position_embeddings or 0  # the length that theirs scales from
    length = {"max_position_embeddings": longest} if longest else {}
    partly = config.traits.delta or config.rotary_percent != 1  # a Qwen3.5 turns a quarter where nothing is said
    turned = {"partial_rotary_factor": config.rotary_percent} if partly else {}
    if kind is None:
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base, **turned}} | length
    scaling: dict[str, Any] = {"rope_type": kind, **turned}
    for name in SETTINGS[kind] if kind != "dynamic" else ("factor",):
        resolved = kind == "llama3" and name.endswith("freq_factor")
        value = config.setting(name) if resolved else getattr(config, SCALING + name)
        if value is not None and not (name == "truncate" and value):
            scaling[name] = value
    return {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": base}} | length


def _width(hf: Contents) -> int | None:
    """Return the keys of a window, a token's own among them; None without one."""
    width: int | None = entry(hf, "sliding_window", int, None) if "sliding_window" in hf else 4096
    if width is not None and width < 2:
        raise UserError(f"{CONFIG}: sliding_window = {width} is not supported; only 2 or more is")
    return width


def _windows(hf: Contents, width: int | None, kinds: Any, layers: int) -> dict[str, Any]:
    """Return our windows: one of ``width`` keys in the layers whose kind says so."""
    named = kinds if isinstance(kinds, list) else []
    whole, sliding = [kind in (WHOLE, "attention") for kind in named], [kind == SLIDING for kind in named]
    if named and len(named) != layers:
        raise UserError(f"{CONFIG}: layer_types has {len(named)} entries, and num_hidden_layers is {layers}")
    if not named or sum(whole) + sum(sliding) != layers:
        raise UserError(
            f"{CONFIG}: layer_types = {shown(kinds)} is not supported; only {WHOLE} or {SLIDING} per layer is"
        )
    if not any(sliding):
        return {}
    if width is None:
        raise UserError(
            f"{CONFIG}: layer_types = {shown(kinds)} is not supported without a sliding_window, and there is none"
        )
    pattern = f"[{','.join(str(int(one)) for one in sliding)}]"
    return {"window_size": f"{width - 1},0", "window_attn_skip_freq": pattern if any(whole) else None}


def _windows_of(config: ModelConfig) -> set[Window | None]:
    return set(map(config.window, range(config.num_layers)))


def _keys(config: ModelConfig, layer: int) -> int | None:
    """Return the keys of a layer's window as theirs counts them, a token's own among them; None without one."""
    window = config.window(layer)
    return None if window is None else window[0] + 1


def _mistral_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    width = _width(hf)
    return {} if width is None else {"window_size": f"{width - 1},0"}


def windows_from_hf(hf: Contents, settings: dict[str, Any], default: list[str]) -> dict[str, Any]:
    """Return our windows, in the layers whose layer_types say so, which may be left out for a default."""
    kinds = hf.get("layer_types")
    return _windows(hf, _width(hf), default if kinds is None else kinds, settings["num_layers"])


def _ministral_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    if _width(hf) is None:
        raise UserError(f"{CONFIG}: sliding_window = null is not supported beside layer_types; only a width is")
    return windows_from_hf(hf, settings, [SLIDING] * min(settings["num_layers"], 10**5))


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the kind of each layer, and the window of those that have one."""
    if not any(_windows_of(config)):
        return {"layer_types": [WHOLE] * config.num_layers}
    widths = [_keys(config, layer) for layer in range(config.num_layers)]
    width = next(width for width in widths if width)
    return {"sliding_window": width, "layer_types": [WHOLE if width is None else SLIDING for width in widths]}


def _qwen_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    entry(hf, "sliding_window", int, None)  # transformers checks its type where it is not used, too
    entry(hf, "head_dim", int, 1)  # left out it has a default, null is an error
    width = _width(hf) if entry(hf, "use_sliding_window", bool, False) else None
    first, layers = entry(hf, "max_window_layers", int, 28), settings["num_layers"]
    if (kinds := hf.get("layer_types")) is None:
        kinds = [SLIDING if width and layer >= first else WHOLE for layer in range(min(layers, 10**5))]
    return _windows(hf, width, kinds, layers)


def _qwen_to_hf(config: ModelConfig) -> dict[str, Any]:
    found = windows_to_hf(config)
    if not any(_windows_of(config)):
        return {"use_sliding_window": False, **found}
    # Old versions of transformers know the number of whole layers before the others alone.
    return {"use_sliding_window": True, "max_window_layers": found["layer_types"].index(SLIDING), **found}


FIELDS = {
    "num_hidden_layers": Field("num_layers", int),
    "hidden_size": Field("hidden_size", int),
    "intermediate_size": Field("ffn_hidden_size", int),
    "num_attention_heads": Field("num_attention_heads", int),
    "num_key_value_heads": Field("num_query_groups", int, None),
    "head_dim": Field("kv_channels", int, None),
    "vocab_size": Field("vocab_size", int),
    "max_position_embeddings": Field("max_position_embeddings", int, 2048),
    "rms_norm_eps": Field("norm_epsilon", float, 1e-6),
    "initializer_range": Field("init_method_std", float, 0.02),
}
PARTS = (Part(ROPE, rope_from_hf, rope_to_hf),)
NO_BIASES = {"attention_bias": (None, False), "mlp_bias": (None, False)}
QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

LLAMA = Family(
    kind="llama",
    title="a LLaMA",
    architecture="LlamaForCausalLM",
    ours="llama",
    fields=FIELDS,
    tied=False,
    parts=PARTS,
    own={"add_qkv_bias": False, "qk_layernorm": False},
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
        "rope_interleaved": (None, False),
    },
    rates=("attention_dropout",),
    ignored=frozenset({"pretraining_tp", "max_sequence_length", "is_llama_config"}),
    needs=(
        Need("window_size", lambda config: not any(_windows_of(config)), "none"),
        Need(
            "hidden_size",
            lambda config: config.hidden_size % config.num_attention_heads == 0,
            "a multiple of num_attention_heads {config.num_attention_heads}",
        ),
        Need("init_method_std", lambda config: config.init_method_std <= 1, "1 at most"),
    ),
    names=Names(
        top={"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
        layers="model.layers",
        layer={
            "attention_norm": "input_layernorm",
            "attention.wq": "self_attn.q_proj",
            "attention.wk": "self_attn.k_proj",
            "attention.wv": "self_attn.v_proj",
            "attention.wo": "self_attn.o_proj",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "mlp_norm": "post_attention_layernorm",
            "mlp.gate": "mlp.gate_proj",
            "mlp.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj",
        },
    ),
    # Old checkpoints include the rotary frequencies, which follow from the configuration.
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
MISTRAL = replace(
    LLAMA,
    kind="mistral",
    title="a Mistral",
    architecture="MistralForCausalLM",
    fields={
        **FIELDS,
        "num_key_value_heads": Field("num_query_groups", int, 8),
        "max_position_embeddings": Field("max_position_embeddings", int, 131072),
    },
    parts=(*PARTS, Part(("sliding_window",), _mistral_from_hf, lambda config: {"sliding_window": _keys(config, 0)})),
    only={"hidden_act": ("silu", "swish"), **NO_BIASES},
    ignored=frozenset(),
    needs=(Need("window_attn_skip_freq", lambda config: len(_windows_of(config)) == 1, "none"),),
)
MINISTRAL = replace(
    MISTRAL,
    kind="ministral",
    title="a Ministral",
    architecture="MinistralForCausalLM",
    fields={**MISTRAL.fields, "head_dim": Field("kv_channels", int)},
    parts=(*PARTS, Part(("sliding_window", "layer_types"), _ministral_from_hf, windows_to_hf)),
    needs=(Need("window_size", lambda config: any(_windows_of(config)), "a width"),),
)
QWEN2 = replace(
    MISTRAL,
    kind="qwen2",
    title="a Qwen2",
    architecture="Qwen2ForCausalLM",
    fields={
        **FIELDS,
        "num_key_value_heads": Field("num_query_groups", int, 32),
        "max_position_embeddings": Field("max_position_embeddings", int, 32768),
    },
    parts=(*PARTS, Part(QWEN_WINDOWS, _qwen_from_hf, _qwen_to_hf)),
    own={"add_qkv_bias": True, "qk_layernorm": False},
    only={**MISTRAL.only, "use_mrope": (None, False)},
    needs=(),
)
QWEN3 = replace(
    QWEN2,
    kind="qwen3",
    title="a Qwen3",
    architecture="Qwen3ForCausalLM",
    fields={**QWEN2.fields, "head_dim": Field("kv_channels", int, 128)},
    own={"add_qkv_bias": False, "qk_layernorm": True},
    only={**QWEN2.only, "attention_bias": (False,)},
)
