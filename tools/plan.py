r"""Which arrangement of a run is fastest on a cluster: predicted, and with --profile measured.

python -m tools.plan --config configs/llama2_7b.toml --cluster configs/clusters/a100_pod.toml --context-parallel-size 32
python -m tools.plan --config configs/llama2_7b.toml --cluster configs/clusters/h100_pod.toml --world-size 64 --all
python -m tools.plan --config configs/llama3_8b.toml --cluster configs/clusters/h100_pod.toml --world-size 8 --longest
python -m tools.plan --config configs/llama3_8b.toml --cluster configs/clusters/h100_pod.toml --fewest \
    --seq-length 1048576
torchrun --nproc-per-node 4 -m tools.plan --config configs/llama_tiny.toml --context-parallel-size 4 --profile

Takes every flag of pretrain_gpt.py besides these. Without --cluster the device at hand decides; without --world-size
the processes started, or as many as the sizes of the mesh multiply to.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tokenizer import load_tokenizer
from parallel.mesh import SIZES
from planner.cluster import Cluster, default_cluster, load_cluster
from planner.complete import with_vocabulary
from planner.extremes import fewest, longest, of_length
from planner.search import Candidate, Ranking, arrangements, nothing_left, rank
from runtime.files import write_text
from runtime.processes import launched_world_size
from tools.arguments import parser_for
from train.config.language import Config, ConfigError, parse_args, to_toml, validate
from train.run import exit_status

DEFAULT_TOP = 10
BAR = 40
SHOWN_REASONS = 3


@dataclass(frozen=True)
class Row:
    """A candidate, with its seconds per iteration if it was profiled."""

    candidate: Candidate
    measured: float | None = None

    def entry(self) -> dict[str, Any]:
        """Return the row as --json writes it."""
        config, found = self.candidate.config, self.candidate.prediction
        return {
            "context": asdict(config.context),
            "mesh": {name: getattr(config.mesh, name) for name in SIZES},
            "recompute": asdict(config.recompute),
            "seq_length": config.train.seq_length,
            "predicted_seconds": found.time,
            "predicted_seconds_by_part": found.seconds,
            "measured_seconds": self.measured,
            "memory_bytes": found.bytes,
            "memory_bytes_by_part": found.memory,
            "attention_bytes_inside_nodes": found.links.inside,
            "attention_bytes_between_nodes": found.links.between,
        }


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the planner's own flags."""
    parser = parser_for("python -m tools.plan", __doc__)
    parser.add_argument("--world-size", type=int, help="processes to plan for")
    varied = parser.add_mutually_exclusive_group()
    varied.add_argument("--all", action="store_true", help="vary tp, pp, cp, dp, recompute and chunks too")
    varied.add_argument("--longest", action="store_true", help="as --all, for the longest sequence that fits")
    varied.add_argument(
        "--fewest",
        action="store_true",
        help="as --all, on the fewest processes that hold it: 1, 2, 4, ..., whole nodes",
    )
    parser.add_argument("--top", type=int, default=DEFAULT_TOP, help="rows to show (default: %(default)s)")
    parser.add_argument(
        "--document-lengths",
        type=int,
        nargs="+",
        default=(),
        metavar="N",
        help="with --reset-attention-mask: tokens of documents to draw from (default: those of --data-path)",
    )
    parser.add_argument("--profile", action="store_true", help="run the best candidates on the processes at hand")
    parser.add_argument("--profile-top", type=int, default=3, help="how many to run (default: %(default)s)")
    parser.add_argument("--profile-iters", type=int, default=3, help="iterations of each, and one before")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the winner as TOML for pretrain_gpt.py")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def milliseconds(seconds: float) -> str:
    """Format as milliseconds: four significant digits below 1,000, whole numbers above."""
    found = 1e3 * seconds
    return f"{found:.4g}" if found < 999.95 else f"{found:.0f}"


def table(rows: Sequence[Row]) -> str:
    """Format the rows as Markdown; what was measured has a column if anything was."""
    profiled = any(row.measured is not None for row in rows)
    measured = ["measured ms"] * profiled
    heads = ["", "method", "mesh", "recompute", "predicted ms", *measured]
    heads += ["inside nodes GB", "between GB", "memory GB"]
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|" + " --- |" * len(heads)]
    for number, row in enumerate(rows, 1):
        config, found = row.candidate.config, row.candidate.prediction
        context = config.context
        placement = f", {context.context_parallel_placement}" if context.context_parallel_team_size > 1 else ""
        sizes = (
            f"{name.split('_')[0]} {getattr(config.mesh, name)}" for name in SIZES if getattr(config.mesh, name) > 1
        )
        cells = (
            str(number),
            context.title + placement,
            ", ".join(sizes) or "data",
            config.recompute.recompute_granularity + (", chunks" if config.recompute.ffn_chunk_size else ""),
            milliseconds(found.time),
            *["" if row.measured is None else milliseconds(row.measured)] * profiled,
            f"{found.links.inside / 1e9:.3f}",
            f"{found.links.between / 1e9:.3f}",
            f"{found.bytes / 1e9:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bars(candidate: Candidate, cluster: Cluster) -> str:
    """Draw the memory of a candidate by cause, as shares of what a process has."""
    parts = candidate.prediction.memory | {"together": candidate.prediction.bytes}
    lines = [f"memory of a process of the first, which has {cluster.memory_gb:g} GB:"]
    for name, count in parts.items():
        filled = round(BAR * count / (1e9 * cluster.memory_gb))
        lines.append(f"  {name:{max(map(len, parts))}}  {'#' * filled:.<{BAR}}  {count / 1e9:6.1f} GB")
    return "\n".join(lines)


def discarded(found: Ranking, cluster: Cluster, top: int) -> str:
    """Say how many candidates there are, how many were discarded, and why."""
    shown = f", of which the best {top} are shown (--top)" if top < len(found.candidates) else ""
    sums = f"{found.refused.total()} refused, {len(found.too_large)} too large"
    lines = [f"{len(found.candidates)} candidates{shown}; {sums}"]
    lines += [f"  refused {count}: {reason}" for reason, count in found.refused.most_common(SHOWN_REASONS)]
    if len(found.refused) > SHOWN_REASONS:
        lines.append(f"  and {len(found.refused) - SHOWN_REASONS} more reasons")
    if found.too_large:
        least = min(found.too_large) / 1e9
        lines.append(
            f"  too large {len(found.too_large)}: {cluster.memory_gb:g} GB, and these take {least:.1f} or more"
        )
    return "\n".join(lines)


def prepare(argv: list[str]) -> tuple[argparse.Namespace, Config, int, Cluster]:
    """Return the planner's flags, the configuration to vary, the number of processes and the cluster.

    Raises:
        UserError: flags that do not fit, or too few processes to profile on.
    """
    args, rest = build_parser().parse_known_args(argv)
    config = parse_args(rest)
    named = config.context.cluster
    cluster = default_cluster(config.mesh.device_type) if named is None else load_cluster(named)
    started = "WORLD_SIZE" in os.environ
    product = 1
    for name in SIZES:
        product *= getattr(config.mesh, name)
    world_size = args.world_size or (launched_world_size() if started else product)
    for name in ("world_size", "top", "profile_top", "profile_iters"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    if args.fewest and (args.world_size or args.profile):
        raise ConfigError(
            f"fewest finds the number of processes, and {'world_size' if args.world_size else 'profile'} names it; "
            "leave one of them out"
        )
    if args.profile and launched_world_size() != world_size:
        raise ConfigError(
            f"profile needs the {world_size} processes that are planned for, and {launched_world_size()} are started; "
            f"use torchrun with {world_size} processes in all, or leave --profile out to predict alone"
        )
    if args.profile:
        method = replace(config.context, context_parallel_method="auto", cluster=None)
        validate(replace(config, context=method), world_size)
    if config.model.vocab_size is None:
        if config.data.tokenizer_model is None:
            raise ConfigError("vocab_size is not set, and no tokenizer_model either; give one of them")
        config = with_vocabulary(config, load_tokenizer(config.data.tokenizer_model).vocab_size)
    return args, config, world_size, cluster


def plan(argv: list[str]) -> None:
    """Rank the candidates, profile them if asked, print and write."""
    args, config, world_size, cluster = prepare(argv)
    if args.longest:
        config = of_length(config, longest(config, world_size, cluster))
    if args.fewest:
        world_size = fewest(config, cluster)
    every = args.all or args.longest or args.fewest
    varied = list(arrangements(config, world_size)) if every else [config]
    found = rank(varied, world_size, cluster, tuple(args.document_lengths))
    if not found.candidates:
        raise ConfigError(nothing_left(found, cluster))
    rows = [Row(candidate) for candidate in found.candidates]
    if args.profile:
        from tools.profile_plan import measure

        best = found.candidates[: args.profile_top]
        seconds = measure([candidate.config for candidate in best], args.profile_iters, quiet=args.json)
        measured = [Row(candidate, time) for candidate, time in zip(best, seconds, strict=True)]
        rows = sorted(measured, key=lambda row: row.measured or 0.0) + rows[len(best) :]
    if os.environ.get("RANK", "0") != "0":  # profiling has ended the process group
        return
    if args.json:
        why = {"refused": dict(found.refused), "too_large": len(found.too_large)}
        print(json.dumps({"cluster": asdict(cluster), "rows": [row.entry() for row in rows[: args.top]], **why}))
    else:
        print(f"{cluster.name}, {world_size} processes, sequences of {config.train.seq_length} tokens")
        print(discarded(found, cluster, args.top))
        print(table(rows[: args.top]))
        print(bars(rows[0].candidate, cluster))
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.write, to_toml(rows[0].candidate.config))
        if not args.json:
            print(f"written: {args.write}")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    return exit_status(plan, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
