"""Open a run's folder, to use its model at any length and on any mesh."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.arguments import positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from data.chat.template import ChatTemplate
    from data.tokenizer import AddBos, HuggingFaceTokenizer, SentencePieceTokenizer
    from train.config.entries import Config


@dataclass(frozen=True)
class Run:
    """A run's folder with everything that is needed to build and load its model."""

    folder: Path
    checkpoint: Path
    iteration: int
    config: "Config"
    """Configuration of the language model, with its vocabulary size and rope length filled in."""
    tokenizer: "SentencePieceTokenizer | HuggingFaceTokenizer"
    trained_length: int | None
    """Number of tokens of a training sequence.

    For an imported model it is the maximum length in its config.json, or None if there is none.
    """
    imported: bool
    """True if the model was imported from Hugging Face and no run has trained it."""
    chat: "Mapping[str, Any] | None" = None
    """Chat template and turn-end tokens of the conversations that the model was trained on."""

    def add_bos_token(self, requested: "AddBos | None" = None) -> "AddBos":
        """Return the setting that decides whether texts begin with the begin token.

        By default (None), texts begin like the documents that the run was trained on.
        """
        from data.text.begins import recorded_begin
        from data.text.config import blend

        if requested is not None:
            return requested

        data = self.config.data
        if not data.data_path or data.sft:
            return "auto"
        for prefix in blend(data.data_path)[0]:
            recorded = recorded_begin(prefix)
            if recorded is None:
                continue
            if recorded == self.tokenizer.before:
                return "auto"
            return "always" if recorded else "never"

        return "auto"

    def begin(self, requested: "AddBos | None" = None) -> tuple[int, ...]:
        """Return the token ids to put before a text: the begin token, or none."""
        return self.tokenizer.begin(self.add_bos_token(requested))

    @property
    def ends(self) -> tuple[int, ...]:
        """Token ids that end a generated text.

        They end documents or the turns of conversations, or an imported model's files list them.
        """
        from model.hf.chat import generation_ends
        from train.run import HF_FOLDER

        ends = [self.tokenizer.eod]
        if self.chat is not None:
            ends += self.chat["ends"]
        ends += generation_ends(self.folder / HF_FOLDER)
        return tuple(dict.fromkeys(ends))

    def template(self, file: str | None = None) -> "ChatTemplate":
        """Return the chat template to format conversations with.

        It is the given file or name, else that of the run's conversations, else the tokenizer's.

        Raises DataError if there is no template, or if it is invalid.
        """
        from data.chat.template import load_template, recorded_template

        path = str(self.tokenizer.path)
        if file is not None or self.chat is None or self.chat["chat_template"] is None:
            return load_template(path, file)

        return recorded_template(
            path, f"of {self.folder}", self.chat["chat_template"], self.chat["tool_use"]
        )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the checkpoint and the mesh."""
    add = parser.add_argument_group("checkpoint and mesh").add_argument
    add(
        "--ckpt-step",
        type=int,
        metavar="N",
        help="iteration to load (default: the newest whole checkpoint)",
    )
    for name, shared in (("tensor", "each layer's matrices"), ("pipeline", "the layers")):
        add(
            f"--{name}-model-parallel-size",
            type=positive,
            default=1,
            metavar="N",
            help=f"number of processes that share {shared} (default: %(default)s)",
        )

    add(
        "--context-parallel-size",
        type=positive,
        metavar="N",
        help="number of processes that share each sequence (default: all that remain)",
    )
    add(
        "--context-parallel-method",
        metavar="METHOD",
        help="context-parallel method, or auto (default: the run's)",
    )


def add_begin(parser: argparse.ArgumentParser, texts: str) -> None:
    """Add --add-bos-token; ``texts`` says in its help which texts get the begin token."""
    parser.add_argument(
        "--add-bos-token",
        choices=("auto", "always", "never"),
        help=(
            f"begin {texts} with the begin-of-sequence (BOS) token (default: as in the run's "
            "documents, else if the tokenizer adds it by itself)"
        ),
    )


def add_scoring(parser: argparse.ArgumentParser, groups: str) -> None:
    """Add the flags for scoring a run: lengths, number of samples, the mesh.

    ``groups`` says in the help of --samples for which groups the number counts, such as "each task
    and length".
    """
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        required=True,
        metavar="N",
        help="lengths to test: numbers of tokens of prompt and answer together",
    )
    add(
        "--samples",
        type=positive,
        default=20,
        help=f"number of samples for {groups} (default: %(default)s)",
    )
    add("--batch-size", type=positive, default=1, help="samples per batch (default: %(default)s)")
    add("--save", type=Path, metavar="DIR", help="folder to write to (default: RUN/evaluation)")
    add_mesh(parser)


def open_run(folder: Path, step: int | None = None) -> Run:
    """Open a run of a language model at its newest whole checkpoint, or at iteration ``step``.

    Raises UserError if there is no run or checkpoint, or its tokenizer is missing or has changed.
    """
    from data.text.record import CHAT
    from data.tokenizer import load_tokenizer
    from train.checkpoint.manifest import read_manifest
    from train.checkpoint.search import checkpoint_of
    from train.config.derive import IMPORTED, config_as_trained, with_vocabulary
    from train.config.flags import config_file
    from train.run import HF_FOLDER

    toml = config_file(folder)
    config = _load_text_config(folder, toml)
    path = str(config.data.tokenizer_model)
    moved = folder / HF_FOLDER / Path(path).name
    if not Path(path).exists() and moved.is_file():  # an imported run's folder was moved
        path = str(moved)
        config = config.updated(tokenizer_model=path)

    tokenizer = load_tokenizer(path)
    checkpoint = checkpoint_of(folder, step)
    manifest = read_manifest(checkpoint)
    _check_tokenizer(path, checkpoint, manifest.extra, toml)

    config = config_as_trained(with_vocabulary(config, tokenizer.vocab_size), manifest.extra)
    imported = IMPORTED in manifest.extra
    if imported:  # seq_length in an imported run's config.toml is only a default
        lengths = [config.model.max_position_embeddings or 0]
        if config.model.rope is not None:
            lengths.append(config.model.rope.scaled_length)
        length = max(lengths) or None
    else:
        length = config.train.seq_length

    return Run(
        folder,
        checkpoint,
        manifest.iteration,
        config,
        tokenizer,
        length,
        imported,
        manifest.extra.get(CHAT),
    )


def _load_text_config(folder: Path, toml: Path) -> "Config":
    """Load the configuration of a run that was trained on text.

    Raises ConfigError if it was trained on latents or random tokens, or has no tokenizer.
    """
    from train.config.flags import ConfigError
    from train.config.language import load_config
    from train.config.suggest import belongs_to

    try:
        config = load_config(toml)
    except ConfigError as error:
        if belongs_to("pretrain_dit.py") not in str(error):
            raise
        raise ConfigError(
            f"{folder} is a run of a diffusion transformer, which does not generate text; "
            f"to draw its pictures, use python -m tools.sample_dit --load {folder}"
        ) from error

    if config.data.mock_data:
        raise ConfigError(
            f"{toml}: mock_data is set, so the run was trained on random tokens and has no "
            "tokenizer; name a run that was trained with --data-path and --tokenizer-model "
            "(python -m tools.prepare_data writes both)"
        )

    if config.data.tokenizer_model is None:
        raise ConfigError(
            f"{toml}: tokenizer_model is not set; name the run's tokenizer there, under [data]"
        )

    return config


def _check_tokenizer(path: str, checkpoint: Path, extra: "Mapping[str, Any]", toml: Path) -> None:
    """Raise DataError if the tokenizer's file has changed since training."""
    from data.fingerprint import digest
    from runtime.errors import DataError

    current = digest(Path(path))
    trained = extra.get("contents", {}).get("tokenizer_model", current)
    if trained != current:
        raise DataError(
            f"{path} is not the tokenizer that {checkpoint} was trained with "
            f"(digest {trained!s:.8}, now {current:.8}); put the old file back, or name it as "
            f"tokenizer_model in {toml}"
        )


def mesh_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration fields that the flags of ``add_mesh`` set.

    By default, context parallelism gets all processes that the other sizes leave.
    """
    from runtime.processes import launched_world_size

    tp = args.tensor_model_parallel_size
    pp = args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    return {
        "context_parallel_size": cp or max(1, launched_world_size() // (tp * pp)),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_method": args.context_parallel_method,
    }
