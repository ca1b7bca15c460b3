"""Open a run's folder to use its model at any length, on the mesh that a command line asks for."""

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
    """A run whose model can be built and loaded."""

    folder: Path
    checkpoint: Path
    iteration: int
    config: "Config"
    """A language model's configuration, with its vocabulary and the length of its rope."""
    tokenizer: "SentencePieceTokenizer | HuggingFaceTokenizer"
    trained_length: int | None
    """Tokens of a sequence that it was trained on; of an import those that it is meant for, if it
    says so.
    """
    imported: bool
    """True if no run has trained the model, which came from Hugging Face."""
    chat: "Mapping[str, Any] | None" = None
    """Template and ends of turns of the conversations that it was trained on."""

    def add_bos_token(self, asked: "AddBos | None" = None) -> "AddBos":
        """Return whether texts begin with the begin token: as asked for, or as the run's documents
        do.
        """
        from data.text.begins import recorded_begin
        from data.text.config import blend

        if asked is not None:
            return asked
        data = self.config.data
        prefixes = blend(data.data_path)[0] if data.data_path and not data.sft else []
        recorded = [begin for prefix in prefixes if (begin := recorded_begin(prefix)) is not None]
        if not recorded or recorded[0] == self.tokenizer.before:
            return "auto"
        return "always" if recorded[0] else "never"

    def begin(self, asked: "AddBos | None" = None) -> tuple[int, ...]:
        """Return the tokens before a text."""
        return self.tokenizer.begin(self.add_bos_token(asked))

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text: of documents, of turns, and those that an import's files
        name.
        """
        from model.hf.chat import generation_ends
        from train.run import HF_FOLDER

        turns = self.chat["ends"] if self.chat is not None else ()
        return tuple(
            dict.fromkeys([self.tokenizer.eod, *turns, *generation_ends(self.folder / HF_FOLDER)])
        )

    def template(self, file: str | None = None) -> "ChatTemplate":
        """Return the template of a file or a name, else that of the run's conversations, else the
        tokenizer's.

        Raises DataError: there is none, or it is no template.
        """
        from data.chat.template import load_template, recorded_template

        path = str(self.tokenizer.path)
        if file is not None or self.chat is None or self.chat["chat_template"] is None:
            return load_template(path, file)
        return recorded_template(
            path, f"of {self.folder}", self.chat["chat_template"], self.chat["tool_use"]
        )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, and how processes share it."""
    add = parser.add_argument_group("checkpoint and mesh").add_argument
    add(
        "--ckpt-step",
        type=int,
        metavar="N",
        help="iteration (default: the newest whole checkpoint)",
    )
    for name, what in (("tensor", "each layer's matrices"), ("pipeline", "the layers")):
        help = f"processes that share {what} (default: %(default)s)"
        add(f"--{name}-model-parallel-size", type=positive, default=1, metavar="N", help=help)
    add(
        "--context-parallel-size",
        type=positive,
        metavar="N",
        help="that share each sequence (default: all others)",
    )
    add(
        "--context-parallel-method",
        metavar="METHOD",
        help="how they do, or auto (default: the run's)",
    )


def add_begin(parser: argparse.ArgumentParser, texts: str) -> None:
    """Add whether texts begin with the tokenizer's begin token."""
    help = f"begin {texts} with the begin token (default: as the run's documents, or if the tokenizer adds it)"
    parser.add_argument("--add-bos-token", choices=("auto", "always", "never"), help=help)


def add_scoring(parser: argparse.ArgumentParser, places: str) -> None:
    """Add a run, how long the questions of it are and how many there are at ``places``, and its
    mesh.
    """
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        required=True,
        metavar="N",
        help="tokens of prompt and answer",
    )
    add("--samples", type=positive, default=20, help=f"of {places} (default: %(default)s)")
    add("--batch-size", type=positive, default=1, help="at once (default: %(default)s)")
    add("--save", type=Path, metavar="DIR", help="where to write (default: RUN/evaluation)")
    add_mesh(parser)


def open_run(folder: Path, step: int | None = None) -> Run:
    """Open a run of a language model: its newest whole checkpoint, or that of iteration ``step``.

    Raises UserError: no run or checkpoint is there, or its tokenizer is gone or another one.
    """
    from data.fingerprint import digest
    from data.text.record import CHAT
    from data.tokenizer import load_tokenizer
    from runtime.errors import DataError
    from train.checkpoint.manifest import read_manifest
    from train.checkpoint.search import checkpoint_of
    from train.config.derive import IMPORTED, config_as_trained, with_vocabulary
    from train.config.flags import ConfigError, config_file
    from train.config.language import load_config
    from train.run import HF_FOLDER

    named = config_file(folder)
    try:
        config = load_config(named)
    except ConfigError as error:
        if "that is for pretrain_dit.py" not in str(error):
            raise
        raise ConfigError(
            f"{folder} is a run of a diffusion transformer, which writes no text; python -m tools.sample_dit --load "
            f"{folder} draws its pictures"
        ) from error
    if config.data.mock_data:
        raise ConfigError(
            f"{named}: mock_data is set: its tokens were drawn, so that no tokenizer reads or writes text for it; name "
            "a run on text, trained with --data-path and --tokenizer-model (python -m tools.prepare_data writes both)"
        )
    if (path := config.data.tokenizer_model) is None:
        raise ConfigError(
            f"{named}: tokenizer_model is not set; name the run's tokenizer there, under [data]"
        )
    if not Path(path).exists() and (beside := folder / HF_FOLDER / Path(path).name).is_file():
        path = str(beside)  # of an import that was moved
        config = config.updated(tokenizer_model=path)
    tokenizer = load_tokenizer(path)
    checkpoint = checkpoint_of(folder, step)
    manifest, now = read_manifest(checkpoint), digest(Path(path))
    if (was := manifest.extra.get("contents", {}).get("tokenizer_model", now)) != now:
        raise DataError(
            f"{path} is not the tokenizer that {checkpoint} was trained with (digest {was!s:.8}, now {now:.8}); put "
            f"the old file back, or name it as tokenizer_model in {named}"
        )
    config = config_as_trained(with_vocabulary(config, tokenizer.vocab_size), manifest.extra)
    model, imported = config.model, IMPORTED in manifest.extra
    meant = (
        max(
            model.max_position_embeddings or 0,
            0 if model.rope is None else model.rope.scaled_length,
        )
        or None
    )
    length = (
        meant if imported else config.train.seq_length
    )  # an import's config.toml has a default there
    chat = manifest.extra.get(CHAT)
    return Run(folder, checkpoint, manifest.iteration, config, tokenizer, length, imported, chat)


def mesh_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the mesh that ``add_mesh``'s arguments ask for, by field; context parallelism has the
    processes left.
    """
    from runtime.processes import launched_world_size

    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    return {
        "context_parallel_size": args.context_parallel_size
        or max(1, launched_world_size() // (tp * pp)),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_method": args.context_parallel_method,
    }
