r"""Which arrangement of a run is fastest on a cluster: predicted, and with --profile measured.

python -m tools.plan --config configs/llama2_7b.toml --cluster configs/clusters/a100_pod.toml --context-parallel-size 32
python -m tools.plan --config configs/llama2_7b.toml --cluster configs/clusters/h100_pod.toml --world-size 64 --all
python -m tools.plan --config configs/llama3_8b.toml --cluster configs/clusters/h100_pod.toml --world-size 8 --longest
python -m tools.plan --config configs/llama3_8b.toml --cluster configs/clusters/h100_pod.toml --fewest \
    --seq-length 1048576
python -m tools.plan --config configs/llama3_8b.toml --cluster configs/clusters/h100_pod.toml --fits --bf16 \
    --context-parallel-size 8
torchrun --nproc-per-node 4 -m tools.plan --config configs/llama_tiny.toml --context-parallel-size 4 --profile

Takes every flag of pretrain_gpt.py, or of pretrain_dit.py, besides these. Without --cluster the device at hand decides;
without --world-size the processes started, or as many as the sizes of the mesh multiply to.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tokenizer import load_tokenizer
from parallel.mesh import SIZES
from planner.choice import with_layout
from planner.cluster import Cluster, default_cluster, endless, load_cluster
from planner.documents import heaviest_documents, typical_documents
from planner.dry_run import verdict
from planner.extremes import busiest, changes, fewest, longest, of_length
from planner.levers import settings
from planner.ranking import (
    Candidate,
    Ranking,
    combine_prediction_and_profile,
    described,
    memory_of,
    mesh_of,
    method_of,
    nothing_left,
)
from planner.recorder import CAUSES
from planner.search import arrangements, rank, validated
from runtime.errors import at_least
from runtime.files import write_text
from runtime.processes import launched_world_size
from runtime.progress import amount, counted, duration
from tools.common.arguments import parser_for, refuse_folder
from tools.common.report import aligned, markdown
from tools.fit import parsed
from train.config.derive import with_joined_ranks, with_vocabulary
from train.config.entries import Config
from train.config.flags import ConfigError, write_toml
from train.config.language import validate
from train.run import exit_status

BAR = 40
NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")
DEFAULT_TOP = 10


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the planner's own flags."""
    parser = parser_for("python -m tools.plan", __doc__)
    add, varied = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--world-size", type=int, metavar="N", help="processes to plan for")
    every = "vary tp, pp, cp, dp, sharding, recompute, chunks and offload too"
    varied("--all", action="store_true", help=every)
    varied("--longest", action="store_true", help="as --all, for the longest sequence that fits")
    fewest = "as --all, on the fewest processes that hold it: 1, 2, 4, ..., whole nodes"
    varied("--fewest", action="store_true", help=fewest)
    fits = "a process's memory by component as it is configured, and what to change"
    varied("--fits", action="store_true", help=fits)
    add("--top", type=int, metavar="N", help=f"rows to show (default: {DEFAULT_TOP})")
    lengths = "with --reset-attention-mask: tokens of documents to draw from (default: those of --data-path)"
    add("--document-lengths", type=int, nargs="+", default=(), metavar="N", help=lengths)
    add("--profile", action="store_true", help="run the best candidates on the processes at hand")
    add("--profile-top", type=int, default=8, metavar="N", help="how many to run (default: %(default)s)")
    add("--profile-iters", type=int, default=3, metavar="N", help="iterations of each, and one before")
    add("--write", type=Path, metavar="FILE", help="write the winner as TOML for pretrain_gpt.py")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON instead of the table")
    shown.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


def prepare(argv: list[str]) -> tuple[argparse.Namespace, Any, int, Cluster]:
    """Return the planner's flags, the configuration to vary, the number of processes and the cluster.

    Raises UserError: flags that do not fit, or too few processes to profile on.
    """
    args, rest = build_parser().parse_known_args(argv)
    refuse_folder("--write", args.write)
    config: Any = parsed(rest)
    file = config.context.cluster
    cluster = default_cluster(config.mesh.device_type) if file is None else load_cluster(file)
    started = launched_world_size() if "WORLD_SIZE" in os.environ else None
    world_size = args.world_size or started or math.prod(config.mesh.sizes)
    at_least(args, 1, "world_size", "top", "profile_top", "profile_iters")
    if args.fewest and (args.world_size or args.profile):
        named = "world_size" if args.world_size else "profile"
        raise ConfigError(f"fewest finds the number of processes, and {named} names it; leave one of them out")
    for name in ("write", "profile", "markdown", "top"):
        if args.fits and getattr(args, name):
            raise ConfigError(f"--{name} is given, and --fits is of one configuration and ranks none; leave it out")
    args.top = args.top or DEFAULT_TOP
    if args.profile and (found := launched_world_size()) != world_size:
        needed = counted(world_size, "process")
        raise ConfigError(
            f"profile needs {needed}, as planned for, and finds {found}; use torchrun with {needed} in all, or leave "
            "--profile out to predict alone"
        )
    if not isinstance(config, Config):
        for name in ("longest", "profile"):
            if getattr(args, name):
                raise ConfigError(f"{name} is for language models; leave it out, or change latent_shape")
        return args, config, world_size, cluster
    if args.profile:
        method = replace(config.context, context_parallel_method="auto", cluster=None)
        validate(replace(config, context=method), world_size)
    if config.model.vocab_size is None:
        if config.data.tokenizer_model is None:
            raise ConfigError(
                "vocab_size is not set, and no tokenizer_model either; name the model with --config FILE, as "
                "configs/llama3_8b.toml, or give --vocab-size N"
            )
        config = with_vocabulary(config, load_tokenizer(config.data.tokenizer_model).vocab_size)
    return args, config, world_size, cluster


def fit(args: argparse.Namespace, config: Any, world_size: int, cluster: Cluster) -> None:
    """Print the memory of the busiest process by component and, where it is too much, what to change first."""
    import pretrain_dit
    import pretrain_gpt

    config = with_joined_ranks(config, world_size)
    named = config.context.cluster
    device = config.mesh.device if named is None else cluster.device
    config = replace(config, mesh=replace(config.mesh, device=device), context=replace(config.context, cluster=None))
    lengths = tuple(args.document_lengths)
    text = isinstance(config, Config)
    known = text and not lengths and config.data.data_path and config.data.tokenizer_model
    documents = heaviest_documents(config) if known else typical_documents(config, lengths)
    if config.context.context_parallel_method == "auto":
        config = _chosen(config, world_size, cluster, lengths)
    build: Any = pretrain_dit.resolve
    if isinstance(config, Config):
        config, build = with_layout(config, cluster), pretrain_gpt.resolve
    one = busiest(validated(config, world_size), build, world_size, cluster, documents)
    parts = {name: one.memory[name] for name in CAUSES if one.memory.get(name)}
    fitting, said = verdict([one], cluster)
    needed, seconds = ([], None) if fitting else changes(config, world_size, cluster, documents, lengths)
    if args.json:
        told = {"cluster": asdict(cluster), "memory_bytes_by_part": parts, "memory_bytes": one.bytes}
        told |= {"host_bytes": one.host, "fits": fitting, "changes": [*map(asdict, needed)], "seconds_then": seconds}
        told |= {"method": method_of(config), "mesh": mesh_of(config), "memory_by": memory_of(config)}
        print(json.dumps({**told, "processes": world_size, "sequence_length": config.sequence_length}))
        return
    print(f"{_asked(world_size, cluster, config)}: {described(config)}")
    if documents:
        most = max(end - start for start, end in pairwise(documents))
        which = "of the run's first micro-batches, the heaviest" if known else "a micro-batch drawn at random"
        print(f"{which}: {counted(len(documents) - 1, 'document')}, the longest of {most} tokens")
    print(bars(parts, one.host, cluster))
    print(said)
    if fitting:
        return
    if seconds is None:
        fewer = "use more (--fewest says how many) or shorter sequences"
        print(f"no arrangement of these processes fits by the search; {fewer}")
    else:
        print(f"change, in the order of docs/tasks/long_context.md, for {duration(seconds)} a step:")
        for change in needed:
            print(f"  {change.flag}  (about {amount(change.bytes)})")


def _chosen(config: Any, world_size: int, cluster: Cluster, lengths: tuple[int, ...]) -> Any:
    """Return the configuration with the method that ``auto`` takes: the fastest, if any fits of those that do."""
    found = rank([config], world_size, cluster, lengths)
    candidates = found.candidates or rank([config], world_size, endless(cluster), lengths).candidates
    if not candidates:
        raise ConfigError(nothing_left(found, cluster))
    return candidates[0].config


def plan(argv: list[str]) -> None:
    """Rank the candidates, profile them if asked, print and write."""
    args, config, world_size, cluster = prepare(argv)
    if args.fits:
        fit(args, config, world_size, cluster)
        return
    if args.longest:
        config = of_length(config, longest(config, world_size, cluster))
    if args.fewest:
        world_size = fewest(config, cluster)
    lengths = tuple(args.document_lengths)
    every = args.all or args.longest or args.fewest
    varied, note = list(arrangements(config, world_size)) if every else [config], ""
    found = rank(varied, world_size, cluster, lengths, settings if every else None)
    if (found.over_memory or found.over_host_memory) and not found.candidates and not every:
        least = min(found.over_memory or found.over_host_memory) / 1e9
        where = "" if found.over_memory else " of host memory"
        note = f"as configured it takes {least:.1f} GB{where}; what decides memory is varied (--fits says for what)"
        found = rank(varied, world_size, cluster, lengths, settings)
    if not found.candidates:
        raise ConfigError(nothing_left(found, cluster))
    others = [math.prod(one.config.mesh.sizes) for one in found.candidates]
    rows = [Row(one, world_size // size) for one, size in zip(found.candidates, others, strict=True)]
    if args.profile:
        from tools.common.training import measure

        best = rows[: args.profile_top]
        seconds = measure([row.candidate.config for row in best], args.profile_iters, quiet=args.json)
        both = combine_prediction_and_profile([row.candidate.prediction.time for row in best], seconds)
        measured = [replace(row, measured=time) for row, time in zip(best, seconds, strict=True)]
        rows = [row for _, row in sorted(zip(both, measured, strict=True), key=itemgetter(0))] + rows[len(best) :]
    if os.environ.get("RANK", "0") != "0":  # profiling has ended the process group
        return
    if args.json:
        told: dict[str, Any] = {"cluster": asdict(cluster), "rows": [row.entry() for row in rows[: args.top]]}
        told |= {"refused": dict(found.refused), "too_large": len(found.over_memory)}
        print(json.dumps({**told, "host_short": len(found.over_host_memory)}))
    else:
        print(_asked(world_size, cluster, config))
        print(f"{discarded(found, cluster, args.top)}\n{note}".rstrip())
        print(table(rows[: args.top], args.markdown))
        first = rows[0].candidate.prediction
        print(bars(first.memory, first.host, cluster, "a process of the first row"))
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.write, write_toml(rows[0].candidate.config))
        if not args.json:
            print(f"written: {args.write}")


@dataclass(frozen=True)
class Row:
    """A candidate, with its seconds per iteration if it was profiled."""

    candidate: Candidate
    dp: int
    measured: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens, or patches, of all processes in a second, as predicted."""
        config = self.candidate.config
        tokens = config.train.batch_size(self.dp) * config.sequence_length
        return float(tokens / self.candidate.prediction.time)

    def entry(self) -> dict[str, Any]:
        """Return the row as --json writes it."""
        config, found = self.candidate.config, self.candidate.prediction
        return {
            "context": asdict(config.context),
            "mesh": {name: getattr(config.mesh, name) for name in SIZES},
            "recompute": asdict(config.recompute),
            "sharding": config.data_parallel.strategy,
            "seq_length": config.sequence_length,
            "predicted_seconds": found.time,
            "predicted_seconds_by_part": found.seconds,
            "predicted_tokens_per_second": self.tokens_per_second,
            "measured_seconds": self.measured,
            "memory_bytes": found.bytes,
            "memory_bytes_by_part": found.memory,
            "host_bytes": found.host,
            "attention_bytes_inside_nodes": found.links.inside,
            "attention_bytes_between_nodes": found.links.between,
        }


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: method_of(row.candidate.config),
    "mesh": lambda row: mesh_of(row.candidate.config),
    "memory by": lambda row: memory_of(row.candidate.config),
    "predicted": lambda row: duration(row.candidate.prediction.time),
    "measured": lambda row: "" if row.measured is None else duration(row.measured),
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "inside nodes GB": lambda row: f"{row.candidate.prediction.links.inside / 1e9:.3f}",
    "between GB": lambda row: f"{row.candidate.prediction.links.between / 1e9:.3f}",
    "memory GB": lambda row: f"{row.candidate.prediction.bytes / 1e9:.1f}",
    "host GB": lambda row: f"{host / 1e9:.1f}" if (host := row.candidate.prediction.host) else "",
}
"""Cells of the table; the first three are words, which stand to the left."""


def table(rows: Sequence[Row], as_markdown: bool = False) -> str:
    """Format the rows in aligned columns, or as Markdown; measured times and host memory have one if there are any."""
    used = {head: cells for head, column in COLUMNS.items() if any(cells := [*map(column, rows)])}
    lines = [[str(number), *cells] for number, cells in enumerate(zip(*used.values(), strict=True), 1)]
    if as_markdown:
        return "\n".join(markdown(["", *used], lines)).replace("|  |", "| |")
    return "\n".join(aligned([["", *used], *lines], range(1, 4)))


def bars(parts: Mapping[str, float], host: float, cluster: Cluster, of: str = "a process") -> str:
    """Draw the memory of a process by cause, as shares of what it has, and what that leaves the allocator.

    Beside it stands what it moves to host memory, as a share of what is there for it.
    """
    total, most, there = sum(parts.values()), 1e9 * cluster.memory_gb, 1e9 * cluster.host_memory_gb
    shown = {name: (count, most) for name, count in {**parts, "together": total}.items() if count}
    if total <= most:
        shown["left for fragmentation"] = most - total, most
    if host:
        shown["on the host, pinned"] = host, there or math.inf
    beside = f", and {cluster.host_memory_gb:g} GB of the host's" if host and there else ""
    lines, width = [f"memory of {of}, which has {cluster.memory_gb:g} GB{beside}:"], max(map(len, shown))
    for name, (count, room) in shown.items():
        filled = min(BAR, round(BAR * count / room))
        over = "+" if count > room else ""
        lines.append(f"  {name:{width}}  {'#' * filled:.<{BAR}}{over:1} {amount(count):>9}")
    return "\n".join(lines)


def discarded(found: Ranking, cluster: Cluster, top: int) -> str:
    """Say how many candidates there are, how many were discarded, and why."""
    shown = f", of which the best {top} are shown (--top)" if top < len(found.candidates) else ""
    sums = f"{found.refused.total()} refused, {len(found.over_memory)} too large"
    sums += f", {len(found.over_host_memory)} too large for host memory" if found.over_host_memory else ""
    lines = [f"{counted(len(found.candidates), 'candidate')}{shown}; {sums}"]
    lines += [f"  refused {count}{example}" for example, count in grouped(found.refused)]
    if found.over_memory:
        least = min(found.over_memory) / 1e9
        lines.append(
            f"  too large {len(found.over_memory)}: {cluster.memory_gb:g} GB, and these take {least:.1f} or more"
        )
    return "\n".join(lines)


def grouped(refused: Counter[str]) -> list[tuple[str, int]]:
    """Return of reasons that differ in numbers alone the first as an example, and their count; most common first."""
    groups: dict[str, tuple[str, int]] = {}
    for reason, count in refused.items():
        example, before = groups.get(words := NUMBER.sub("", reason), (f": {reason}", 0))
        groups[words] = (f", such as{example.removeprefix(', such as')}" if before else example), before + count
    return sorted(groups.values(), key=lambda group: -group[1])


def _asked(world_size: int, cluster: Cluster, config: Any) -> str:
    return f"{counted(world_size, 'process')} on {cluster.name}, sequences of {config.sequence_length} tokens"


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    return exit_status(plan, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
