"""Write the adapters of a model (``model.lora``) as PEFT's files: adapter_config.json, adapter_model.safetensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from model.config import ModelConfig
from model.hf.folder import check_finite
from model.hf.llama import LLAMA
from model.hf.shards import write_weights
from model.lora import THEIRS, is_adapter
from runtime.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    folder: Path, ours: Mapping[str, Tensor], read: Callable[[str], Tensor], config: ModelConfig, base: str | None
) -> int:
    """Write into an empty folder what ``peft.PeftModel.from_pretrained`` loads, and return how many adapters these are.

    Args:
        ours: (meta) tensors of the model by our names.
        read: reads one of them.
        base: the name of the model that they belong to, as transformers finds it.

    Raises:
        UserError: the model has no adapters, or no linear layers that transformers has alike; for values that are not
            finite, when they are read.
    """
    if config.lora_rank is None:
        raise UserError("adapter is asked for, and lora_rank is not set: the run has none; leave --adapter out")
    if config.model_type != "llama":
        raise UserError(
            f"adapter is asked for, and model_type is {config.model_type}, whose linear layers are others in "
            "transformers; leave --adapter out, and the weights are written with the adapters in them"
        )
    stored = {peft_name(name): name for name in ours if is_adapter(name)}
    contents = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha or config.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": [theirs for theirs, name in THEIRS.items() if name in config.adapted_linears()],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")

    def read_theirs(name: str) -> Tensor:
        weight = read(stored[name])
        check_finite(stored[name], weight)
        return weight

    write_weights(folder / WEIGHTS, {theirs: ours[name] for theirs, name in stored.items()}, read_theirs)
    return len(stored) // 2


def peft_name(name: str) -> str:
    """Return PEFT's name of a parameter of ours: that of the linear layer, and then as ours."""
    linear, matrix, kind = name.rsplit(".", 2)
    return f"base_model.model.{LLAMA.names.of(f'{linear}.{kind}')[0].removesuffix(kind)}{matrix}.{kind}"
