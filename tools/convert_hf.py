"""Hugging Face models to runs and back, tensor by tensor: python -m tools.convert_hf import SRC
RUN; export RUN DST.

A model of any size needs memory for a few of its tensors. A run made so begins at iteration 0:

  pretrain_gpt.py --config RUN/config.toml --finetune --load RUN --save OTHER --data-path ...
  python -m tools.sample --load RUN
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data.fingerprint import digest
from data.text.config import DataConfig
from data.text.record import CHAT
from data.tokenizer import load_tokenizer
from model.hf import config_to_hf
from model.hf.adapter import read_adapter, write_adapter
from model.hf.api import open_hf, their_weights
from model.hf.chat import EOS, GENERATION, carry_tokenizer, write_chat
from model.hf.configs import read_config
from model.hf.dit import load_dit, save_dit
from model.hf.entries import CONFIG, read_json
from model.hf.folder import TOKENIZERS, carry, new_folder
from model.hf.tensors import Read, write_model
from model.parts.lora import merge
from model.parts.settings import LengthConfig
from model.registry import architecture_of, num_parameters
from parallel.context.config import ContextConfig
from runtime.errors import UserError, with_article
from tools.common.arguments import one_line_errors, parser_for, run_command
from train.callbacks.health import RunProgress
from train.checkpoint.api import save_checkpoint, stored_weights
from train.checkpoint.manifest import Manifest, checkpoint_folder, read_manifest
from train.checkpoint.search import checkpoint_of, find_checkpoint
from train.config.derive import IMPORTED, config_as_trained, default_method, with_vocabulary
from train.config.diffusion import load_config as load_dit_config
from train.config.entries import Config, DiTRunConfig
from train.config.flags import config_file, write_toml
from train.config.language import load_config
from train.resume.settings import AVERAGED
from train.run import HF_FOLDER

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def import_model(source: Path, run: Path, adapter: Path | None = None) -> str:
    """Make a run of a Hugging Face folder, and say what it is.

    ``run`` gets config.toml, a checkpoint of iteration 0 with the dtypes as stored, and the folder
    ``hf`` with what the model came with. Code of the model's repository is neither run nor copied.
    ``adapter`` is a folder of PEFT's adapters (LoRA), which the run has beside the weights, as one
    of ``--lora-rank`` has.

    Raises UserError: ``run`` exists, or the folder is not a whole model that we have; nothing is
    written then.
    """
    model, weights, read_base = open_hf(source, print)
    read, beside = read_base, ""
    if adapter is not None:
        model, adapters, read_adapters = read_adapter(adapter, model, print)
        weights, beside = weights | adapters, f" with {len(adapters) // 2} adapters of {adapter}"
        read = lambda name: (read_adapters if name in adapters else read_base)(name)  # noqa: E731
    with new_folder(run) as draft:
        kept = draft / HF_FOLDER
        kept.mkdir()
        carry(source, kept, CONFIG)
        context = ContextConfig(context_parallel_method=default_method(model))
        config, files, note = Config(model=model, context=context), {}, ""
        if (
            name := next((name for name in TOKENIZERS if (kept / name).exists()), None)
        ) is not None:
            tokenizer = load_tokenizer(kept / name)
            config = with_vocabulary(config, tokenizer.vocab_size)
            size = config.model.vocabulary
            if (lacking := tokenizer.missing(size, size)) is not None:
                note = f"\nnote: {tokenizer.vocab_size - size} entries are the tokenizer's alone: {lacking}"
            config = replace(
                config, data=DataConfig(tokenizer_model=str((run / HF_FOLDER / name).absolute()))
            )
            files = {"tokenizer_model": digest(kept / name)}
        (draft / "config.toml").write_text(write_toml(config), encoding="utf-8")
        extra = {"progress": asdict(RunProgress()), "contents": files, IMPORTED: str(source)}
        save_checkpoint(
            draft,
            0,
            weights,
            None,
            architecture=architecture_of(config.model),
            extra=extra,
            read=read,
        )
    dtypes = ", ".join(
        sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})
    )
    return (
        f"imported {source}{beside} into {run}: {num_parameters(model):,} parameters of {dtypes}, "
        + (
            f"tokenizer {run / HF_FOLDER / name}{note}"
            if name
            else "without a tokenizer: give --tokenizer-model"
        )
    )


def export_model(
    run: Path,
    target: Path,
    step: int | None,
    dtype: str | None,
    most_bytes: int,
    *,
    adapter: bool = False,
) -> str:
    """Write a run's weights as a Hugging Face folder, with what an imported model came with, and
    say what it is.

    A model with rope is said to be meant for sequences as long as before, or as those that it was
    trained on if longer, which the line says then. Adapters (LoRA) are merged into the weights;
    with ``adapter`` they alone are written, as PEFT's files.

    The dtype is by default that of the imported config.json, and of a run without one that of its
    checkpoint; an import that was not trained keeps each tensor's, and so do adapters alone.

    Raises UserError: ``target`` exists, the run has no whole checkpoint, or transformers cannot
    express the model; nothing is written then.
    """
    named, folder = config_file(run), checkpoint_of(run, step)
    manifest = read_manifest(folder)
    if manifest.architecture.get("model_type") == "dit":
        return export_dit(run, folder, manifest, target)
    config, extra = load_config(named), manifest.extra
    if config.model.vocab_size is None:
        config = with_vocabulary(
            config, load_tokenizer(str(config.data.tokenizer_model)).vocab_size
        )
    config = config_as_trained(config, extra)
    model, load = config.model, config.checkpoint.load
    kept = [
        run / HF_FOLDER,
        *([Path(load) / HF_FOLDER] if load else []),
    ]  # of an import, or of what began with one
    came_with = next((folder for folder in kept if (folder / CONFIG).is_file()), None)
    contents = {} if came_with is None else read_json(came_with / CONFIG)
    ours, read_ours = stored_weights(folder, architecture_of(model))
    said = (
        None
        if adapter or IMPORTED in extra
        else contents.get("dtype") or contents.get("torch_dtype")
    )
    wanted = DTYPES.get(str(dtype or said))
    if model.lora_rank is not None and not adapter:
        ours, read_ours = merge(ours, read_ours, model.lora_scale)
        model = model.merged()
    ours = {name: weight.to(wanted or weight.dtype) for name, weight in ours.items()}
    read_cast: Read = lambda name: read_ours(name).to(ours[name].dtype)  # noqa: E731
    if adapter:
        told = ""
        with new_folder(target) as draft:
            count = write_adapter(
                draft, ours, read_cast, model, extra.get(IMPORTED) or _base_of(config, contents)
            )
            if CHAT in extra:
                if came_with is not None:
                    carry(came_with, draft)
                told = _write_chat(draft, extra[CHAT], config, extra, dict(contents))
                told += f"; transformers generates by the base's {GENERATION} unless it is given this folder's"
        return f"exported {count} adapters of {folder} to {target}, as PEFT reads them{told}"
    longer = ""
    if IMPORTED not in extra and model.rope is not None and isinstance(model, LengthConfig):
        before, trained_on = (
            model.max_position_embeddings or model.rope.scaled_length,
            _length_trained_on(run, config),
        )
        model = replace(model, max_position_embeddings=max(before, trained_on))
        if trained_on > before > 0:
            longer = f"; max_position_embeddings is {trained_on:,}, the length trained on, and was {before:,}"
    theirs, read = their_weights(ours, read_cast, model)
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in theirs.values()})
    settings = config_to_hf(model, contents) | {"torch_dtype": dtypes[0]}
    chat = extra.get(CHAT)
    with new_folder(target) as draft:
        if came_with is not None:
            carry(came_with, draft)
        tokenizer = any((draft / name).exists() for name in TOKENIZERS)
        if chat is not None:
            longer += _write_chat(draft, chat, config, extra, settings)
        files = write_model(draft, theirs, settings, read, most_bytes)
    kind, many = with_article(settings["model_type"]), f"{len(files)} file{'s' * (len(files) > 1)}"
    taken = (
        f", with the {'tokenizer and ' * tokenizer}settings of {came_with}"
        if came_with is not None
        else ""
    )
    return f"exported {folder} to {target}: {kind} of {', '.join(dtypes)} in {many}{taken}{longer}"


def _write_chat(
    draft: Path,
    chat: dict[str, Any],
    config: Config,
    extra: dict[str, Any],
    settings: dict[str, Any],
) -> str:
    """Write what a model of conversations needs beside its weights, and return a line's part that
    says so.

    The tokenizer is the one of training, where the model came with another one or with none.
    """
    tokenizer, told = Path(str(config.data.tokenizer_model)), ""
    if tokenizer.suffix == ".json" and tokenizer.is_file():
        trained = extra.get("contents", {}).get("tokenizer_model")
        there = draft / tokenizer.name
        if trained == digest(tokenizer) and not (there.is_file() and digest(there) == trained):
            carry_tokenizer(tokenizer.parent, draft)
            told = f"; the tokenizer of {tokenizer.parent}"
    ends = write_chat(draft, chat, settings)
    if len(ends) > 0:
        settings[EOS] = ends[0] if len(ends) == 1 else ends
    if chat["chat_template"] is None:
        told += "; without a chat template, since its conversations were prepared with several"
    else:
        told += "; the chat template of its conversations"
    if not chat["ends"]:
        return (
            f"{told}, whose turns end with no token of their own, so that generation may not stop"
        )
    return f"{told}, whose turns end with {', '.join(map(str, chat['ends']))}"


def _length_trained_on(run: Path, config: Config) -> int:
    """Return the longest sequence of a run, and of those before it whose weights it began with."""
    longest, seen = config.train.seq_length, {run}
    while (
        (load := config.checkpoint.load)
        and (run := Path(load)) not in seen
        and (run / "config.toml").is_file()
    ):
        folder = find_checkpoint(run)
        if folder is None or IMPORTED in read_manifest(folder).extra:
            break
        seen.add(run)
        config = load_config(run / "config.toml")
        longest = max(longest, config.train.seq_length)
    return longest


def _base_of(config: Config, contents: dict[str, Any]) -> str | None:
    """Name the Hugging Face model that a run's adapters belong to; None if the run does not know."""
    if (folder := config.checkpoint.hugging_face) is not None:
        return str(folder)
    imported = checkpoint_folder(config.checkpoint.load, 0) if config.checkpoint.load else None
    read = read_manifest(imported).extra.get(IMPORTED) if imported and imported.is_dir() else None
    return read or contents.get("_name_or_path")


def import_dit(source: Path, run: Path) -> str:
    """Make a run of iteration 0 of a diffusion transformer, and say what it is; its weights are in
    memory at once.

    Raises UserError: ``run`` exists, or the folder is not a whole model; nothing is written then.
    """
    config, state = load_dit(source)
    with new_folder(run) as draft:
        (draft / "config.toml").write_text(write_toml(DiTRunConfig(model=config)), encoding="utf-8")
        extra = {"progress": asdict(RunProgress()), IMPORTED: str(source)}
        weights = {name: weight.to("meta") for name, weight in state.items()}
        save_checkpoint(
            draft,
            0,
            weights,
            None,
            architecture=architecture_of(config),
            extra=extra,
            read=state.__getitem__,
        )
    count = sum(weight.numel() for weight in state.values())
    return f"imported {source} into {run}: a diffusion transformer of {count:,} parameters"


def export_dit(run: Path, checkpoint: Path, manifest: Manifest, target: Path) -> str:
    """Write a run's averaged weights, or those as trained where there are no averages, and say what
    they are.

    Raises UserError: ``target`` exists, or the checkpoint is not of the model in the run's
    config.toml.
    """
    config = load_dit_config(run / "config.toml").model
    section = "ema" if AVERAGED in manifest.extra else "model"
    weights, read = stored_weights(checkpoint, architecture_of(config), section)
    save_dit(target, config, {name: read(name) for name in weights})
    which = "averages of the weights" if section == "ema" else "weights as trained"
    return f"exported {checkpoint} to {target}: the {which} of a diffusion transformer"


def size(text: str) -> int:
    """Parse a size such as 5GB."""
    match = re.fullmatch(r"(\d{1,6})\s*([KMG]I?B)?", text.upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB")
    return int(match[1]) * UNITS[match[2] or ""]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m tools.convert_hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser(
        "import", allow_abbrev=False, help="a Hugging Face folder to a run of iteration 0"
    )
    add = reading.add_argument
    add("source", type=Path, metavar="SRC", help="folder with config.json and safetensors")
    add("run", type=Path, metavar="RUN", help="folder to make")
    add("--adapter", type=Path, metavar="FOLDER", help="of PEFT's adapters (LoRA) of the model")
    writing = commands.add_parser(
        "export", allow_abbrev=False, help="a run's checkpoint to a Hugging Face folder"
    )
    add = writing.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("target", type=Path, metavar="DST", help="folder to make")
    add("--ckpt-step", type=int, metavar="N", help="iteration; by default the newest whole one")
    add("--dtype", choices=DTYPES, help="of the weights; by default the imported model's")
    add(
        "--max-shard-size",
        type=size,
        default="5GB",
        metavar="SIZE",
        help="of a file (default: 5GB)",
    )
    add("--adapter", action="store_true", help="the adapters of a LoRA run alone, as PEFT's files")
    args = parser.parse_args(argv)
    if args.command == "import":
        if read_config(args.source).get("model_type") != "dit":
            print(import_model(args.source, args.run, args.adapter))
        elif args.adapter is None:
            print(import_dit(args.source, args.run))
        else:
            raise UserError(
                f"--adapter is {args.adapter}, and {args.source} is a diffusion transformer; leave it out"
            )
    else:
        step, dtype, most = args.ckpt_step, args.dtype, args.max_shard_size
        print(export_model(args.run, args.target, step, dtype, most, adapter=args.adapter))


if __name__ == "__main__":
    run_command(main)
