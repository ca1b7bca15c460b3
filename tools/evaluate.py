"""Loss and perplexity by position, on documents that are longer than a length.

    python -m tools.evaluate runs/long --data-path runs/data/books --seq-length 65536 torchrun
    --standalone --nproc-per-node 4 -m tools.evaluate runs/long --text book.txt --seq-length 65536

The beginning of each document is one sequence, which the context-parallel ranks share: by default
all processes. The numbers are those of one process, whatever the mesh. --last-tokens N adds the
loss of its last N predictions, which see the most context.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, Batch
from data.text.corpus import Corpus, input_files
from data.text.documents import document_ends
from data.text.indexed import check_indexed
from model.registry import architecture_of
from parallel.context import ContextParallel
from parallel.mesh import Mesh, distributed_mesh
from parallel.tensor.vocabulary import chunked_cross_entropy_sum
from planner.choice import READER
from runtime.errors import DataError
from runtime.processes import launched_world_size
from runtime.together import is_first, raise_together
from tools.common.arguments import parser_for, positive
from tools.common.report import markdown, write_results
from tools.common.runs import Run, add_begin, add_mesh, mesh_of, open_run
from train.callbacks import say
from train.checkpoint.api import load_model
from train.checkpoint.manifest import CheckpointError
from train.config.derive import fitted
from train.config.entries import Config
from train.config.finalize import complete
from train.config.flags import ConfigError
from train.config.sizes import validate_sizes
from train.objectives.language import NextToken
from train.run import check_writable, run_entry
from train.tasks.language import LanguageTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST_BUCKET = 64
CHUNK = 1024
"""Tokens whose logits exist at once, where the run does not say."""


@dataclass(frozen=True)
class Bucket:
    """Loss of predictions from positions ``begin`` to ``end - 1`` of the documents."""

    begin: int
    end: int
    tokens: int
    loss: float
    """Mean, in nats per token."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 99))


class LossByPosition(NextToken):
    """Next-token prediction whose losses are summed by position, on this rank and of its tokens,
    over all calls.
    """

    def __init__(
        self, cp: ContextParallel, device: torch.device, chunk: int, bounds: Sequence[int]
    ) -> None:
        """Set up for sequences and buckets [bounds[n], bounds[n + 1]) of their positions."""
        super().__init__(cp, device, chunk)
        self._chunk = chunk
        # A rank's positions ascend, so that each bucket is a run of its tokens.
        self._cuts = torch.searchsorted(cp.positions, torch.tensor(bounds)).tolist()
        self.sums = torch.zeros(len(bounds) - 1, dtype=torch.float64, device=device)

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of this rank's token losses, float32, and add those of each bucket to
        ``sums``.
        """
        labels = local["labels"]

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            total = torch.zeros((), device=labels.device)
            for number, (begin, end) in enumerate(pairwise(self._cuts)):
                if begin < end:
                    tokens = slice(begin, end)
                    loss = chunked_cross_entropy_sum(
                        hidden[:, tokens], weight, labels[:, tokens], self._chunk, IGNORE_INDEX
                    )
                    self.sums[number] += loss
                    total = total + loss
            return total

        return model(local["tokens"], self._positions, head)


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = parser_for("python -m tools.evaluate", __doc__)
    add, source = (
        parser.add_argument,
        parser.add_mutually_exclusive_group(required=True).add_argument,
    )
    add("run", type=Path, metavar="RUN", help="folder of the run")
    source("--data-path", metavar="PREFIX", help="a .bin/.idx pair")
    source(
        "--text",
        nargs="+",
        metavar="FILE",
        help="text files, rows or folders, as tools.prepare_data",
    )
    add("--seq-length", type=positive, required=True, metavar="N", help="tokens of each document")
    add(
        "--documents",
        type=positive,
        default=32,
        metavar="N",
        help="the first N long enough (default: %(default)s)",
    )
    add("--last-tokens", type=positive, metavar="N", help="a row for the last N of each, too")
    add_begin(parser, "--text")
    add("--save", type=Path, metavar="DIR", help="where to write (default: RUN/evaluation)")
    add_mesh(parser)
    args = parser.parse_args(argv)
    if (args.last_tokens or 0) > args.seq_length:
        most = f"--last-tokens is {args.last_tokens} and --seq-length {args.seq_length}; give at most that"
        raise ConfigError(most)
    run = open_run(args.run, args.ckpt_step)
    processes = launched_world_size()
    asked = mesh_of(args)
    config = fitted(
        run.config, processes, asked.pop("context_parallel_method"), args.seq_length, **asked
    )
    validate_sizes(config, processes)
    folder = args.save or args.run / "evaluation"
    with distributed_mesh(config.mesh) as mesh:
        with raise_together():
            if is_first():
                check_writable(folder, "save")
            rows = list(islice(documents(args, run), args.documents))
            if not rows:
                raise DataError(
                    f"{args.data_path or ' '.join(args.text)} has no document of more than {args.seq_length} tokens; "
                    "give longer ones, or a smaller --seq-length"
                )
        config = complete(config, run.tokenizer.vocab_size, READER)
        bounds, first = buckets(args.seq_length), args.seq_length - (args.last_tokens or 0)
        cuts = sorted({*bounds, first})
        sums = losses(run, config, mesh, rows, cuts)
        found = [bucket(*at, cuts, sums, len(rows)) for at in pairwise(bounds)]
        last = bucket(first, args.seq_length, cuts, sums, len(rows)) if args.last_tokens else None
        if not all(math.isfinite(bucket.loss) for bucket in found):
            raise CheckpointError(
                f"{run.checkpoint} has losses that are not finite: its training diverged"
            )
        if is_first():
            _write(folder, run, args, len(rows), found, last)


def documents(args: argparse.Namespace, run: Run) -> Iterator[np.ndarray]:
    """Yield the first S + 1 tokens, int64, of every document that has more than S of them. Raises
    DataError.
    """
    length, tokenizer = args.seq_length, run.tokenizer
    entries = min(tokenizer.vocab_size, run.config.model.vocabulary)
    missing = partial(tokenizer.missing, entries)
    add_bos_token = run.add_bos_token(args.add_bos_token)
    if args.data_path:
        indexed = check_indexed(args.data_path, entries, missing=missing)
        indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
        lengths = indexed.document_lengths
        ends, ids = np.cumsum(lengths, dtype=np.int64), indexed.token_ids()
        for number in np.flatnonzero(lengths > length):
            whole = torch.from_numpy(
                ids[ends[number] - lengths[number] : ends[number]].astype(np.int64)
            )
            text_ends = document_ends(whole, tokenizer.eod, begins_document=True)
            cuts = (
                [] if indexed.holds_conversations else (text_ends.nonzero().flatten() + 1).tolist()
            )
            for document in whole.tensor_split(cuts):
                if len(document) > length:
                    yield document[: length + 1].numpy()
        return
    for text in Corpus(input_files(args.text, ".txt")):
        tokens = tokenizer.document(text, add_bos_token)
        if len(tokens) > length:
            if (lacking := missing(max(tokens[: length + 1]))) is not None:
                raise DataError(f"{' '.join(args.text)}: {lacking}")
            yield np.array(tokens[: length + 1])


def buckets(length: int) -> list[int]:
    """Return the bounds of buckets of [0, length), which double from ``SMALLEST_BUCKET`` on."""
    powers = [
        SMALLEST_BUCKET << n for n in range(length.bit_length()) if SMALLEST_BUCKET << n < length
    ]
    return [0, *powers, length]


def bucket(
    begin: int, end: int, cuts: Sequence[int], sums: Sequence[float], documents: int
) -> Bucket:
    """Return a bucket of so many documents, whose losses ``sums`` has for each [cuts[n], cuts[n +
    1]).
    """
    tokens = documents * (end - begin)
    loss = sum(loss for at, loss in zip(cuts[:-1], sums, strict=True) if begin <= at < end)
    return Bucket(begin, end, tokens, loss / tokens)


def losses(
    run: Run, config: Config, mesh: Mesh, rows: Sequence[np.ndarray], bounds: Sequence[int]
) -> list[float]:
    """Return the sums of the losses of all rows, each [S + 1], in each bucket of positions;
    collective.
    """
    task = LanguageTask(config, mesh)
    objective = LossByPosition(
        task.cp, mesh.device, config.recompute.loss_chunk_size or CHUNK, bounds
    )
    task.objective = objective
    parts = task.build_parts()
    load_model(run.checkpoint, parts, architecture_of(config.model))
    runner = task.build_runner(parts)
    each, ranks, rank = (
        config.train.micro_batches(mesh.dp.size()),
        mesh.dp.size(),
        mesh.dp.get_local_rank(),
    )
    started = time.monotonic()
    for begin in range(0, len(rows), each * ranks):
        # All ranks take equally many, since they gather the model together.
        mine = [begin + rank + number * ranks for number in range(each)]
        batches = []
        for number in mine:
            tokens = torch.from_numpy(rows[number % len(rows)])[None]
            labels = (
                tokens[:, 1:]
                if number < len(rows)
                else torch.full_like(tokens[:, 1:], IGNORE_INDEX)
            )
            batches.append(objective.local({"tokens": tokens[:, :-1], "labels": labels}))
        runner.forward(batches)
        done, seconds = min(begin + each * ranks, len(rows)), time.monotonic() - started
        say(f"{done} of {len(rows)} documents, {seconds:.1f} s")
    dist.all_reduce(objective.sums)
    return (objective.sums / mesh.tp.size()).tolist()  # tensor-parallel ranks have the same tokens


def _write(
    folder: Path,
    run: Run,
    args: argparse.Namespace,
    count: int,
    found: Sequence[Bucket],
    last: Bucket | None,
) -> None:
    tokens = sum(bucket.tokens for bucket in found)
    whole = Bucket(
        0, args.seq_length, tokens, sum(bucket.loss * bucket.tokens for bucket in found) / tokens
    )
    named = [*((f"{bucket.begin} to {bucket.end - 1}", bucket) for bucket in found), ("all", whole)]
    named += [] if last is None else [(f"last {last.end - last.begin}", last)]
    rows = [[name, f"{b.tokens:,}", f"{b.loss:.4f}", f"{b.perplexity:.2f}"] for name, b in named]
    title = f"{run.folder}, iteration {run.iteration}, {count} documents of more than {args.seq_length} tokens"
    result: dict[str, Any] = {
        "run": str(run.folder),
        "iteration": run.iteration,
        "data": args.data_path or args.text,
    }
    result |= {
        "seq_length": args.seq_length,
        "trained_seq_length": run.trained_length,
        "documents": count,
    }
    result |= {"loss": whole.loss, "perplexity": whole.perplexity}
    result["buckets"] = [asdict(bucket) | {"perplexity": bucket.perplexity} for bucket in found]
    result["last"] = None if last is None else asdict(last) | {"perplexity": last.perplexity}
    table = markdown(("positions", "tokens", "loss", "perplexity"), rows, "---:")
    write_results(folder, "perplexity", title, table, result, curve(found, run.trained_length))


def curve(found: Sequence[Bucket], trained: int | None) -> "Figure":
    """Draw perplexity over position, and where training ended, if that is known."""
    from matplotlib.figure import Figure

    from tools.common.report import FAINT, PALETTE, plain

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    edges = [max(1, found[0].begin), *(bucket.end for bucket in found)]
    axes.stairs([bucket.perplexity for bucket in found], edges, baseline=None, color=PALETTE[0])
    if trained is not None:
        axes.axvline(trained, color=FAINT, linestyle="--", label=f"trained on {trained} tokens")
        axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position", ylabel="perplexity")
    plain(axes)
    return figure


if __name__ == "__main__":
    run_entry(main)
