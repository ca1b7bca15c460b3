"""The command that serves an exported model with vLLM at its trained length."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.hf.folder import TOKENIZERS
from model.parts.rope import yarn_mscale


def vllm_note(settings: Mapping[str, Any], folder: Path) -> str:
    """Return lines with the command that serves a model; empty if its rope is not scaled.

    vLLM multiplies the length in config.json by the factor of most scalings, so the command sets
    the length. ``--hf-overrides`` replaces the whole rope table, so the command has all of its
    entries (vLLM's page "Context extension").

    Args:
        settings: contents of the exported config.json.
        folder: the exported folder. If it has no tokenizer, the command asks for one.
    """
    table = settings.get("rope_parameters") or {}
    nested = {name: entry for name, entry in table.items() if isinstance(entry, Mapping)}
    ropes = nested or {"": table}
    scaled = [rope for rope in ropes.values() if rope.get("rope_type", "default") != "default"]
    if not scaled:
        return ""

    length = int(settings["max_position_embeddings"])
    for rope in scaled:
        if rope["rope_type"] == "yarn":
            # vLLM refuses positions beyond the original length times the factor.
            length = min(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
        elif rope["rope_type"] == "dynamic":
            length = int(length * rope["factor"])  # config.json has the length before scaling

    overrides: Any = {name: _with_attention_factors(rope) for name, rope in ropes.items()}
    if not nested:
        overrides = overrides[""]
    words = ["vllm", "serve", str(folder), "--max-model-len", str(length)]
    words += ["--hf-overrides", json.dumps({"rope_parameters": overrides})]
    title = "serve it with vLLM (not tried)"
    if not any((folder / name).exists() for name in TOKENIZERS):
        words += ["--tokenizer", "FOLDER"]
        title += ", with the folder of a Hugging Face tokenizer"
    return f"\n{title}:\n  {shlex.join(words)}"


def _with_attention_factors(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope table with YaRN's factor of cos and sin as every release of vLLM reads it.

    Recent releases read transformers' ``attention_factor``. Earlier ones read ``attn_factor``, by
    which they multiply the default, 0.1 ln(factor) + 1, and ignore the others.
    """
    attention = rope.get("attention_factor")
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = yarn_mscale(rope["factor"], rope["mscale"])
        attention /= yarn_mscale(rope["factor"], rope["mscale_all_dim"])
    if attention is None:
        return {**rope}

    relative = attention / yarn_mscale(rope["factor"])
    return {**rope, "attention_factor": attention, "attn_factor": relative}
