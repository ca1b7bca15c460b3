"""Measure loss and perplexity by position, on documents longer than --seq-length.

    python -m tools.evaluate runs/long --data-path runs/data/books --seq-length 65536
    torchrun --standalone --nproc-per-node 4 -m tools.evaluate runs/long --text book.txt \\
        --seq-length 65536

The beginning of each document is one sequence, which the context-parallel ranks share: by default
all processes. The results are the same on any mesh. --last-tokens N adds the loss of each
sequence's last N predictions, which see the most context.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
"""Number of tokens whose logits are in memory at once, if the run sets no loss_chunk_size."""


@dataclass(frozen=True)
class Bucket:
    """Loss of predictions from positions ``begin`` to ``end - 1`` of the documents."""

    begin: int
    end: int
    tokens: int
    loss: float
    """Mean loss in nats per token."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; at most e^99, so that it does not overflow."""
        return math.exp(min(self.loss, 99))


class LossByPosition(NextToken):
    """Next-token prediction that also sums the losses of this rank's tokens by position."""

    def __init__(
        self, cp: ContextParallel, device: torch.device, chunk: int, bounds: Sequence[int]
    ) -> None:
        """Set up a sum for each bucket of positions, [bounds[n], bounds[n + 1])."""
        super().__init__(cp, device, chunk)
        self._chunk = chunk
        # A rank's positions ascend, so each bucket is a contiguous range of its tokens.
        self._cuts = torch.searchsorted(cp.positions, torch.tensor(bounds)).tolist()
        self.sums = torch.zeros(len(bounds) - 1, dtype=torch.float64, device=device)

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the float32 sum of this rank's losses, and add each bucket's share to ``sums``."""
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
    """Evaluate a run on long documents, and write its perplexity by position."""
    args = _parse(argv)
    length = args.seq_length
    run = open_run(args.run, args.ckpt_step)
    processes = launched_world_size()
    mesh_sizes = mesh_of(args)
    method = mesh_sizes.pop("context_parallel_method")
    config = fitted(run.config, processes, method, length, **mesh_sizes)
    validate_sizes(config, processes)

    folder = args.save or args.run / "evaluation"
    with distributed_mesh(config.mesh) as mesh:
        with raise_together():
            if is_first():
                check_writable(folder, "save")
            rows = list(islice(documents(args, run), args.documents))
            if not rows:
                raise DataError(
                    f"{args.data_path or ' '.join(args.text)} has no document of more than "
                    f"{length} tokens; give longer documents, or a smaller --seq-length"
                )

        config = complete(config, run.tokenizer.vocab_size, READER)
        bounds = buckets(length)
        first = length - (args.last_tokens or 0)
        cuts = sorted({*bounds, first})
        sums = losses(run, config, mesh, rows, cuts)
        results = []
        for begin, end in pairwise(bounds):
            results.append(bucket(begin, end, cuts, sums, len(rows)))
        last = None
        if args.last_tokens:
            last = bucket(first, length, cuts, sums, len(rows))
        if not all(math.isfinite(result.loss) for result in results):
            raise CheckpointError(
                f"{run.checkpoint} has losses that are not finite, so its training diverged; "
                "give an earlier --ckpt-step"
            )
        if is_first():
            _write(folder, run, args, len(rows), results, last)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_for("python -m tools.evaluate", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    source("--data-path", metavar="PREFIX", help="path prefix of a .bin/.idx pair")
    source(
        "--text",
        nargs="+",
        metavar="FILE",
        help="text files, rows or folders, as for tools.prepare_data",
    )
    add(
        "--seq-length",
        type=positive,
        required=True,
        metavar="N",
        help="number of tokens to evaluate of each document",
    )
    add(
        "--documents",
        type=positive,
        default=32,
        metavar="N",
        help="take the first N documents that are long enough (default: %(default)s)",
    )
    add(
        "--last-tokens",
        type=positive,
        metavar="N",
        help="add a row for the last N tokens of each document",
    )
    add_begin(parser, "--text")
    add("--save", type=Path, metavar="DIR", help="folder to write to (default: RUN/evaluation)")
    add_mesh(parser)
    args = parser.parse_args(argv)
    if (args.last_tokens or 0) > args.seq_length:
        raise ConfigError(
            f"--last-tokens is {args.last_tokens}, but --seq-length is {args.seq_length}; "
            "give a smaller --last-tokens"
        )

    return args


def documents(args: argparse.Namespace, run: Run) -> Iterator[np.ndarray]:
    """Yield the first S + 1 token ids (int64) of each document with more than S tokens.

    S is --seq-length.

    Raises DataError if the data cannot be read, or have tokens that the model lacks.
    """
    entries = min(run.tokenizer.vocab_size, run.config.model.vocabulary)
    missing = partial(run.tokenizer.missing, entries)
    if args.data_path:
        yield from _indexed_documents(args, run, entries, missing)
        return

    length = args.seq_length
    add_bos_token = run.add_bos_token(args.add_bos_token)
    for text in Corpus(input_files(args.text, ".txt")):
        tokens = run.tokenizer.document(text, add_bos_token)
        if len(tokens) > length:
            lacking = missing(max(tokens[: length + 1]))
            if lacking is not None:
                raise DataError(f"{' '.join(args.text)}: {lacking}")
            yield np.array(tokens[: length + 1])


def _indexed_documents(
    args: argparse.Namespace, run: Run, entries: int, missing: Callable[[int], str | None]
) -> Iterator[np.ndarray]:
    """Yield the first S + 1 token ids of each long document of a .bin/.idx pair."""
    length = args.seq_length
    tokenizer = run.tokenizer
    indexed = check_indexed(args.data_path, entries, missing=missing)
    indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
    lengths = indexed.document_lengths
    ends = np.cumsum(lengths, dtype=np.int64)
    ids = indexed.token_ids()
    for number in np.flatnonzero(lengths > length):
        end = ends[number]
        begin = end - lengths[number]
        whole = torch.from_numpy(ids[begin:end].astype(np.int64))

        cuts = []
        if not indexed.holds_conversations:  # a document of the index may hold several texts
            text_ends = document_ends(whole, tokenizer.eod, begins_document=True)
            cuts = (text_ends.nonzero().flatten() + 1).tolist()

        for document in whole.tensor_split(cuts):
            if len(document) > length:
                yield document[: length + 1].numpy()


def buckets(length: int) -> list[int]:
    """Divide the positions [0, length) into buckets; return their bounds.

    The bounds double from ``SMALLEST_BUCKET`` on.
    """
    bounds = [0]
    power = SMALLEST_BUCKET
    while power < length:
        bounds.append(power)
        power *= 2
    return [*bounds, length]


def bucket(
    begin: int, end: int, cuts: Sequence[int], sums: Sequence[float], num_documents: int
) -> Bucket:
    """Return the bucket of positions [begin, end).

    ``sums[n]`` is the loss at positions [cuts[n], cuts[n + 1]), summed over all documents.
    """
    tokens = num_documents * (end - begin)
    inside = [loss for cut, loss in zip(cuts[:-1], sums, strict=True) if begin <= cut < end]
    loss = sum(inside)
    return Bucket(begin, end, tokens, loss / tokens)


def losses(
    run: Run, config: Config, mesh: Mesh, rows: Sequence[np.ndarray], bounds: Sequence[int]
) -> list[float]:
    """Return the loss in each bucket of positions, summed over all rows; collective.

    A row is the beginning of a document [S + 1]. All data-parallel ranks take the same number of
    micro-batches, since they gather the model together: a rank without a further row repeats an
    earlier one, and ignores its labels.
    """
    task = LanguageTask(config, mesh)
    chunk = config.recompute.loss_chunk_size or CHUNK
    objective = LossByPosition(task.cp, mesh.device, chunk, bounds)
    task.objective = objective
    parts = task.build_parts()
    load_model(run.checkpoint, parts, architecture_of(config.model))
    runner = task.build_runner(parts)

    ranks = mesh.dp.size()
    rank = mesh.dp.get_local_rank()
    num_micro_batches = config.train.micro_batches(ranks)
    rows_per_step = num_micro_batches * ranks
    start_time = time.monotonic()
    for begin in range(0, len(rows), rows_per_step):
        batches = []
        for index in range(num_micro_batches):
            number = begin + rank + index * ranks
            row = torch.from_numpy(rows[number % len(rows)])[None]  # [1, S + 1]
            labels = row[:, 1:]
            if number >= len(rows):
                labels = torch.full_like(labels, IGNORE_INDEX)
            batches.append(objective.local({"tokens": row[:, :-1], "labels": labels}))

        runner.forward(batches)
        done = min(begin + rows_per_step, len(rows))
        say(f"{done} of {len(rows)} documents, {time.monotonic() - start_time:.1f} s")

    dist.all_reduce(objective.sums)
    return (objective.sums / mesh.tp.size()).tolist()  # each tp rank added the same losses


def _write(
    folder: Path,
    run: Run,
    args: argparse.Namespace,
    num_documents: int,
    results: Sequence[Bucket],
    last: Bucket | None,
) -> None:
    """Print the table; write it, the numbers and the curve of perplexity."""
    tokens = sum(result.tokens for result in results)
    loss = sum(result.loss * result.tokens for result in results) / tokens
    whole = Bucket(0, args.seq_length, tokens, loss)
    rows = []
    for result in results:
        rows.append(_row(f"{result.begin} to {result.end - 1}", result))

    rows.append(_row("all", whole))
    if last is not None:
        rows.append(_row(f"last {last.end - last.begin}", last))
    table = markdown(("positions", "tokens", "loss", "perplexity"), rows, "---:")

    title = (
        f"{run.folder}, iteration {run.iteration}, {num_documents} documents of more than "
        f"{args.seq_length} tokens"
    )
    record: dict[str, Any] = {
        "run": str(run.folder),
        "iteration": run.iteration,
        "data": args.data_path or args.text,
        "seq_length": args.seq_length,
        "trained_seq_length": run.trained_length,
        "documents": num_documents,
        "loss": whole.loss,
        "perplexity": whole.perplexity,
        "buckets": [_entry(result) for result in results],
        "last": None if last is None else _entry(last),
    }
    write_results(folder, "perplexity", title, table, record, curve(results, run.trained_length))


def _row(name: str, result: Bucket) -> list[str]:
    return [name, f"{result.tokens:,}", f"{result.loss:.4f}", f"{result.perplexity:.2f}"]


def _entry(result: Bucket) -> dict[str, Any]:
    return asdict(result) | {"perplexity": result.perplexity}


def curve(results: Sequence[Bucket], trained_length: int | None) -> "Figure":
    """Draw perplexity over position, and a line at the training length if it is known."""
    from matplotlib.figure import Figure

    from tools.common.report import FAINT, PALETTE, plain

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    edges = [max(1, results[0].begin), *(result.end for result in results)]
    axes.stairs([result.perplexity for result in results], edges, baseline=None, color=PALETTE[0])
    if trained_length is not None:
        label = f"trained on {trained_length} tokens"
        axes.axvline(trained_length, color=FAINT, linestyle="--", label=label)
        axes.legend(frameon=False)

    axes.set_xscale("log", base=2)
    axes.set(xlabel="position", ylabel="perplexity")
    plain(axes)
    return figure


if __name__ == "__main__":
    run_entry(main)
