"""Convert Hugging Face models to runs and back, tensor by tensor.

  python -m tools.convert_hf import SRC RUN
  python -m tools.convert_hf export RUN DST

A model of any size needs memory for only a few tensors. An imported run begins at iteration 0:

  pretrain_gpt.py --config RUN/config.toml --finetune --load RUN --save OTHER --data-path ...
  python -m tools.sample --load RUN
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.fingerprint import digest
from data.text.config import DataConfig
from data.text.record import CHAT
from data.tokenizer import load_tokenizer
from model.hf import config_to_hf
from model.hf.adapter import read_adapter, write_adapter
from model.hf.api import open_hf, their_weights
from model.hf.chat import EOS, GENERATION, carry_tokenizer, write_chat
from model.hf.configs import read_config
from model.hf.entries import CONFIG, read_json
from model.hf.folder import TOKENIZERS, carry, new_folder
from model.hf.serving import vllm_note
from model.hf.tensors import Read, write_model
from model.parts.lora import merge
from model.parts.settings import LengthConfig
from model.registry import architecture_of, num_parameters
from parallel.context.config import ContextConfig
from runtime.errors import UserError, with_article
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.convert_dit import export_dit, import_dit
from train.callbacks.health import RunProgress
from train.checkpoint.api import save_checkpoint, stored_weights
from train.checkpoint.manifest import checkpoint_folder, read_manifest
from train.checkpoint.search import checkpoint_of, find_checkpoint
from train.config.derive import IMPORTED, config_as_trained, default_method, with_vocabulary
from train.config.entries import Config
from train.config.flags import config_file, write_toml
from train.config.language import load_config
from train.run import HF_FOLDER

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def import_model(source: Path, run: Path, adapter: Path | None = None) -> str:
    """Create a run from a Hugging Face folder; return a description.

    ``run`` gets config.toml, a checkpoint of iteration 0 with the dtypes as stored, and the folder
    ``hf`` with the other files of the model. Code of the model's repository is neither run nor
    copied. ``adapter`` is a folder of PEFT's adapters (LoRA), which are stored next to the weights
    as in a run with ``--lora-rank``.

    Raises UserError, and writes nothing, if ``run`` exists, or if the folder is not a whole model
    of a supported family.
    """
    model, weights, read = open_hf(source, print)
    with_adapters = ""
    if adapter is not None:
        model, adapters, read_adapters = read_adapter(adapter, model, print)
        weights = weights | adapters
        with_adapters = f" with {len(adapters) // 2} adapters of {adapter}"
        read = _either(adapters, read_adapters, read)

    with new_folder(run) as draft:
        hf_folder = draft / HF_FOLDER
        hf_folder.mkdir()
        carry(source, hf_folder, CONFIG)
        context = ContextConfig(context_parallel_method=default_method(model))
        config = Config(model=model, context=context)
        contents = {}
        tokenizer_text = "without a tokenizer: give --tokenizer-model"
        tokenizer_files = [name for name in TOKENIZERS if (hf_folder / name).exists()]
        if tokenizer_files:
            name = tokenizer_files[0]
            path = run / HF_FOLDER / name
            config, note = _with_tokenizer(config, hf_folder / name, path)
            contents = {"tokenizer_model": digest(hf_folder / name)}
            tokenizer_text = f"tokenizer {path}{note}"

        (draft / "config.toml").write_text(write_toml(config), encoding="utf-8")
        extra = {"progress": asdict(RunProgress()), "contents": contents, IMPORTED: str(source)}
        shape = architecture_of(config.model)
        save_checkpoint(draft, 0, weights, None, architecture=shape, extra=extra, read=read)

    return (
        f"imported {source}{with_adapters} into {run}: {num_parameters(model):,} parameters of "
        f"{', '.join(_dtypes(weights))}, {tokenizer_text}"
    )


def _either(adapters: Mapping[str, Tensor], read_adapters: Read, read_base: Read) -> Read:
    """Return a function that reads a tensor from the adapters or, if not there, the base model."""

    def read(name: str) -> Tensor:
        if name in adapters:
            return read_adapters(name)
        return read_base(name)

    return read


def _with_tokenizer(config: Config, file: Path, path: Path) -> tuple[Config, str]:
    """Return the configuration with a tokenizer, and a note on tokens that the model lacks.

    Args:
        file: the tokenizer in the draft of the run.
        path: its path once the run is in place.
    """
    tokenizer = load_tokenizer(file)
    config = with_vocabulary(config, tokenizer.vocab_size)
    size = config.model.vocabulary
    note = ""
    lacking = tokenizer.missing(size, size)
    if lacking is not None:
        extra_entries = tokenizer.vocab_size - size
        note = f"\nnote: the model lacks {extra_entries} entries of the tokenizer: {lacking}"

    data = DataConfig(tokenizer_model=str(path.absolute()))
    return replace(config, data=data), note


def _dtypes(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the dtypes of weights."""
    return sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})


def export_model(
    run: Path,
    target: Path,
    step: int | None,
    dtype: str | None,
    max_bytes: int,
    *,
    adapter: bool = False,
) -> str:
    """Write a run's weights as a Hugging Face folder; return a description.

    The folder gets the other files of an imported model. The model's maximum length is as before,
    or the length of training if that is longer; the returned text says so. Adapters (LoRA) are
    merged into the weights; with ``adapter`` only the adapters are written, as PEFT's files.

    By default the dtype is that of the imported config.json, or of the checkpoint if there is none.
    An untrained import keeps each tensor's dtype, and so does an export of only the adapters.

    Raises UserError, and writes nothing, if ``target`` exists, the run has no whole checkpoint, or
    the transformers library cannot express the model.
    """
    toml = config_file(run)
    checkpoint = checkpoint_of(run, step)
    manifest = read_manifest(checkpoint)
    if manifest.architecture.get("model_type") == "dit":
        return export_dit(run, checkpoint, manifest, target)

    config = load_config(toml)
    extra = manifest.extra
    if config.model.vocab_size is None:
        tokenizer = load_tokenizer(str(config.data.tokenizer_model))
        config = with_vocabulary(config, tokenizer.vocab_size)

    config = config_as_trained(config, extra)
    hf_folder = _hf_folder(run, config)
    contents = {} if hf_folder is None else read_json(hf_folder / CONFIG)

    model = config.model
    weights, read = stored_weights(checkpoint, architecture_of(model))
    if dtype is None and not adapter and IMPORTED not in extra:
        dtype = contents.get("dtype") or contents.get("torch_dtype")
    if model.lora_rank is not None and not adapter:
        weights, read = merge(weights, read, model.lora_scale)
        model = model.merged()

    weights, read = _cast(weights, read, DTYPES.get(str(dtype)))

    if adapter:
        base = extra.get(IMPORTED) or _base_of(config, contents)
        chat_text = ""
        with new_folder(target) as draft:
            count = write_adapter(draft, weights, read, model, base)
            if CHAT in extra:
                if hf_folder is not None:
                    carry(hf_folder, draft)
                chat_text = _write_chat(draft, extra[CHAT], config, extra, dict(contents))
                chat_text += (
                    f"; transformers uses the base model's {GENERATION} unless it is given the one "
                    "of this folder"
                )

        return (
            f"exported {count} adapters of {checkpoint} to {target}, as PEFT reads them{chat_text}"
        )

    notes = ""
    if IMPORTED not in extra and model.rope is not None and isinstance(model, LengthConfig):
        before = model.max_position_embeddings or model.rope.scaled_length
        trained_on = _length_trained_on(run, config)
        model = replace(model, max_position_embeddings=max(before, trained_on))
        if trained_on > before > 0:
            notes = (
                f"; max_position_embeddings is {trained_on:,}, the length trained on "
                f"(before: {before:,})"
            )

    hf_weights, read_hf = their_weights(weights, read, model)
    dtypes = _dtypes(hf_weights)
    settings = config_to_hf(model, contents) | {"torch_dtype": dtypes[0]}
    with new_folder(target) as draft:
        if hf_folder is not None:
            carry(hf_folder, draft)
        has_tokenizer = any((draft / name).exists() for name in TOKENIZERS)
        if extra.get(CHAT) is not None:
            notes += _write_chat(draft, extra[CHAT], config, extra, settings)
        files = write_model(draft, hf_weights, settings, read_hf, max_bytes)

    kind = with_article(settings["model_type"])
    number = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    origin = ""
    if hf_folder is not None:
        parts = "tokenizer and settings" if has_tokenizer else "settings"
        origin = f", with the {parts} of {hf_folder}"

    notes += vllm_note(settings, target)
    return (
        f"exported {checkpoint} to {target}: {kind} of {', '.join(dtypes)} in {number}"
        f"{origin}{notes}"
    )


def _hf_folder(run: Path, config: Config) -> Path | None:
    """Return the folder of Hugging Face files in this run, or in the run that it loaded, if any."""
    for folder in (run, config.checkpoint.load):
        if folder and (Path(folder) / HF_FOLDER / CONFIG).is_file():
            return Path(folder) / HF_FOLDER
    return None


def _cast(
    weights: Mapping[str, Tensor], read: Read, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], Read]:
    """Return the weights cast to a dtype (None keeps their own), and a function that reads them."""
    cast = {name: weight.to(dtype or weight.dtype) for name, weight in weights.items()}

    def read_cast(name: str) -> Tensor:
        return read(name).to(cast[name].dtype)

    return cast, read_cast


def _write_chat(
    draft: Path,
    chat: dict[str, Any],
    config: Config,
    extra: dict[str, Any],
    settings: dict[str, Any],
) -> str:
    """Write the chat template and the turn-end tokens; return a description of what was written.

    Also writes the tokenizer used in training, unless the model already has it.
    """
    tokenizer = Path(str(config.data.tokenizer_model))
    text = ""
    if tokenizer.suffix == ".json" and tokenizer.is_file():
        trained = extra.get("contents", {}).get("tokenizer_model")
        present = draft / tokenizer.name
        is_present = present.is_file() and digest(present) == trained
        if trained == digest(tokenizer) and not is_present:
            carry_tokenizer(tokenizer.parent, draft)
            text = f"; the tokenizer of {tokenizer.parent}"

    ends = write_chat(draft, chat, settings)
    if len(ends) > 0:
        settings[EOS] = ends[0] if len(ends) == 1 else ends
    if chat["chat_template"] is None:
        text += "; without a chat template, since its conversations were prepared with several"
    else:
        text += "; the chat template of its conversations"
    if not chat["ends"]:
        return (
            f"{text}; the assistant's turns do not end with a token of their own, so generation "
            "may not stop"
        )

    return f"{text}; the assistant's turns end with {', '.join(map(str, chat['ends']))}"


def _length_trained_on(run: Path, config: Config) -> int:
    """Return the longest sequence length of a run and of the runs whose weights it began with."""
    longest = config.train.seq_length
    visited = {run}
    while config.checkpoint.load:
        run = Path(config.checkpoint.load)
        if run in visited or not (run / "config.toml").is_file():
            break
        checkpoint = find_checkpoint(run)
        if checkpoint is None or IMPORTED in read_manifest(checkpoint).extra:
            break
        visited.add(run)
        config = load_config(run / "config.toml")
        longest = max(longest, config.train.seq_length)

    return longest


def _base_of(config: Config, contents: dict[str, Any]) -> str | None:
    """Return the name or path of a run's base model in Hugging Face format, if it is known."""
    hf_model = config.checkpoint.hugging_face
    if hf_model is not None:
        return str(hf_model)

    source = None
    if config.checkpoint.load:
        imported = checkpoint_folder(config.checkpoint.load, 0)
        if imported.is_dir():
            source = read_manifest(imported).extra.get(IMPORTED)

    return source or contents.get("_name_or_path")


def size(text: str) -> int:
    """Parse a size such as 5GB; return it in bytes."""
    match = re.fullmatch(r"(\d{1,6})\s*([KMG]I?B)?", text.upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB")
    return int(match[1]) * UNITS[match[2] or ""]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Convert a Hugging Face folder to a run, or a run to such a folder."""
    args = _parse(argv)
    if args.command == "export":
        text = export_model(
            args.run,
            args.target,
            args.ckpt_step,
            args.dtype,
            args.max_shard_size,
            adapter=args.adapter,
        )
    elif read_config(args.source).get("model_type") != "dit":
        text = import_model(args.source, args.run, args.adapter)
    elif args.adapter is None:
        text = import_dit(args.source, args.run)
    else:
        raise UserError(
            f"--adapter is {args.adapter}, but {args.source} is a diffusion transformer; "
            "leave out --adapter"
        )

    print(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for("python -m tools.convert_hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    import_help = "convert a Hugging Face folder to a run at iteration 0"
    add = commands.add_parser("import", allow_abbrev=False, help=import_help).add_argument
    add("source", type=Path, metavar="SRC", help="folder with config.json and safetensors")
    add("run", type=Path, metavar="RUN", help="folder to create")
    add("--adapter", type=Path, metavar="FOLDER", help="folder of PEFT's adapters (LoRA)")

    export_help = "convert a run's checkpoint to a Hugging Face folder"
    add = commands.add_parser("export", allow_abbrev=False, help=export_help).add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("target", type=Path, metavar="DST", help="folder to create")
    add(
        "--ckpt-step",
        type=int,
        metavar="N",
        help="iteration to export (default: the newest whole checkpoint)",
    )
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: the imported model's)")
    add(
        "--max-shard-size",
        type=size,
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file (default: 5GB)",
    )
    add(
        "--adapter",
        action="store_true",
        help="write only the adapters of a LoRA run, as PEFT's files",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
