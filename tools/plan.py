r"""Plan a run: its time, its memory and its fastest arrangement on a cluster, predicted and with
--profile measured.

python -m tools.plan qwen3_8b --seq-length 1048576 --world-size 8 --cluster h100
python -m tools.plan --config llama2_7b --cluster configs/clusters/a100_pod.toml --context-parallel-size 32
python -m tools.plan --config llama2_7b --cluster configs/clusters/h100_pod.toml --world-size 64 --all
python -m tools.plan --config llama3_8b --cluster configs/clusters/h100_pod.toml --world-size 8 --longest
python -m tools.plan --config llama3_8b --cluster configs/clusters/h100_pod.toml --fewest \
    --seq-length 1048576
python -m tools.plan --config llama3_8b --cluster configs/clusters/h100_pod.toml --fits --bf16 \
    --context-parallel-size 8
torchrun --nproc-per-node 4 -m tools.plan --config llama_tiny --context-parallel-size 4 --profile

A name first is that of a model of configs/models: what it takes, as --all ranks it, with the
command that starts it. Takes every flag of pretrain_gpt.py, or of pretrain_dit.py, besides these.
Without --cluster, a file or a name such as h100, the device at hand decides, and for a named model
without a GPU h100; without --world-size the processes started, or as many as the sizes of the mesh
multiply to, for a named model one node.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tokenizer import load_tokenizer
from planner.choice import combine_prediction_and_profile, with_layout
from planner.cluster import Cluster, default_cluster, endless, load_cluster
from planner.dry_run import rehearsed, verdict
from planner.extremes import changes, fewest, longest, of_length
from planner.levers import described, memory_of, mesh_of, method_of, settings
from planner.recorder import CAUSES
from planner.search import arrangements, nothing_left, rank
from planner.workload import heaviest_documents, typical_documents
from runtime.errors import at_least
from runtime.files import write_text
from runtime.processes import launched_world_size
from runtime.progress import amount, counted, duration
from tools.common.arguments import parser_for, refuse_folder, run_command
from tools.common.plan_text import Row, alike, answer, asked, bars, discarded, notes, table, tightly
from tools.fit import parsed
from tools.prepare_data import DEFAULT_VOCAB_SIZE
from train.config.derive import with_joined_ranks, with_vocabulary
from train.config.entries import Config
from train.config.flags import MODELS, ConfigError, model_file, write_toml
from train.config.language import validate
from train.config.sizes import validate_sizes
from train.run import exit_status
from train.tasks.registry import task_of

DEFAULT_TOP = 10
ASSUMED = "h100"
"""The cluster of a named model where neither a flag nor a GPU says another."""
TOKENS = 8192
"""Least tokens of a GPU in a step of a named model, whose batch no flag says."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the planner's own flags."""
    parser = parser_for("python -m tools.plan", __doc__)
    add, varied = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--world-size", type=int, metavar="N", help="processes to plan for")
    every = "vary tp, pp, cp, dp, sharding, recompute, chunks and offload too"
    varied("--all", action="store_true", help=every)
    varied(
        "--longest",
        action="store_true",
        help="as --all, for the longest sequence that fits, by all of the memory",
    )
    fewest = "as --all, on the fewest processes that hold it: 1, 2, 4, ..., whole nodes"
    varied("--fewest", action="store_true", help=fewest)
    fits = "a process's memory by component as it is configured, and what to change"
    varied("--fits", action="store_true", help=fits)
    add("--top", type=int, metavar="N", help=f"rows to show (default: {DEFAULT_TOP})")
    lengths = "with --reset-attention-mask: tokens of documents to draw from (default: those of --data-path)"
    add("--document-lengths", type=int, nargs="+", default=(), metavar="N", help=lengths)
    add("--profile", action="store_true", help="run the best candidates on the processes at hand")
    add(
        "--profile-top",
        type=int,
        default=8,
        metavar="N",
        help="how many to run (default: %(default)s)",
    )
    add(
        "--profile-iters",
        type=int,
        default=3,
        metavar="N",
        help="iterations of each, and one before",
    )
    add("--write", type=Path, metavar="FILE", help="write the winner as TOML for pretrain_gpt.py")
    add("--json", action="store_true", help="print JSON instead of the table")
    return parser


def prepare(argv: list[str]) -> tuple[argparse.Namespace, Any, int, Cluster]:
    """Return the planner's flags, the configuration to vary, the number of processes and the
    cluster.

    Raises UserError: flags that do not fit, or too few processes to profile on.
    """
    model = str(model_file(argv[0])) if argv and not argv[0].startswith("-") else None
    args, rest = build_parser().parse_known_args(argv[1:] if model else argv)
    args.model = model
    refuse_folder("--write", args.write)
    config: Any = parsed([*(("--config", model) if model else ()), *rest])
    file = config.context.cluster or (
        ASSUMED if model and config.mesh.device_type == "cpu" else None
    )
    cluster = default_cluster(config.mesh.device_type) if file is None else load_cluster(file)
    started = launched_world_size() if "WORLD_SIZE" in os.environ else None
    sizes = cluster.gpus_per_node if model else math.prod(config.mesh.sizes)
    world_size = args.world_size or started or sizes
    if model and config.train.global_batch_size is None:
        batch = 1 if args.longest else max(1, world_size * TOKENS // config.sequence_length)
        config = config.updated(global_batch_size=batch)

    at_least(args, 1, "world_size", "top", "profile_top", "profile_iters")
    _check_flags(args, rest, config.reads_text)
    args.top = args.top or DEFAULT_TOP
    if args.profile:
        _check_profile(config, world_size)
    if config.reads_text and config.model.vocab_size is None:
        if config.data.tokenizer_model is None:
            raise ConfigError(
                "vocab_size is not set, and no tokenizer_model either; name a model first, as in tools.plan llama3_8b, "
                "name the model with --config FILE, or give --vocab-size N"
            )
        config = with_vocabulary(config, vocabulary(config.data.tokenizer_model, model))
    return args, config, world_size, cluster


def _check_flags(args: argparse.Namespace, rest: list[str], is_language: bool) -> None:
    """Raise ConfigError for flags that contradict each other."""
    if args.fewest and (args.world_size or args.profile):
        named = "world_size" if args.world_size else "profile"
        raise ConfigError(
            f"fewest finds the number of processes, and {named} names it; leave one of them out"
        )
    for name in ("write", "profile", "top"):
        if args.fits and getattr(args, name):
            raise ConfigError(
                f"--{name} is given, and --fits is of one configuration and ranks none; leave it out"
            )
    for name in ("longest", "profile"):
        if getattr(args, name) and not is_language:
            raise ConfigError(
                f"{name} is for language models; leave it out, or change latent_shape"
            )
    if args.longest and any(
        word.partition("=")[0].replace("_", "-") == "--seq-length" for word in rest
    ):
        raise ConfigError(
            "--longest searches for the sequence length; do not pass --seq-length too"
        )


def _check_profile(config: Config, world_size: int) -> None:
    """Raise UserError unless as many processes were started as are planned for, and the run suits
    them.
    """
    if (started := launched_world_size()) != world_size:
        needed = counted(world_size, "process")
        raise ConfigError(
            f"profile needs {needed}, as planned for, and finds {started}; use torchrun with {needed} in all, or leave "
            "--profile out to predict alone"
        )
    validate(config.updated(context_parallel_method="auto", cluster=None), world_size)


def vocabulary(tokenizer: str, model: str | None) -> int:
    """Return a tokenizer's entries: where a named model's own is not there yet, as many as
    prepare_data gives it.
    """
    own: Any = parsed(["--config", model]) if model else None
    if own and tokenizer == own.data.tokenizer_model and not Path(tokenizer).exists():
        said = f"a vocabulary of {DEFAULT_VOCAB_SIZE} is assumed, the default of tools.prepare_data"
        print(
            f"note: {tokenizer} is not there; {said} (--vocab-size says another)", file=sys.stderr
        )
        return DEFAULT_VOCAB_SIZE
    return load_tokenizer(tokenizer).vocab_size


def fit(args: argparse.Namespace, config: Any, world_size: int, cluster: Cluster) -> None:
    """Print the memory of the busiest process by component and, where it is too much, what to
    change first.
    """
    config = with_joined_ranks(config, world_size)
    named = config.context.cluster
    device = config.mesh.device if named is None else cluster.device
    config = config.updated(device=device, cluster=None)
    lengths = tuple(args.document_lengths)
    known = (
        config.reads_text and not lengths and config.data.data_path and config.data.tokenizer_model
    )
    documents = heaviest_documents(config) if known else typical_documents(config, lengths)
    if config.context.context_parallel_method == "auto":
        found = rank(
            [config], world_size, cluster, lengths
        )  # the fastest, of those that fit if any does
        candidates = (
            found.candidates or rank([config], world_size, endless(cluster), lengths).candidates
        )
        if not candidates:
            raise ConfigError(nothing_left(found, cluster))
        config = candidates[0].config
    config = with_layout(config, cluster)
    validate_sizes(config, world_size)
    one = max(
        rehearsed(config, task_of(config), world_size, cluster, documents),
        key=lambda one: one.bytes,
    )
    parts = {name: one.memory[name] for name in CAUSES if one.memory.get(name)}
    fitting, said = verdict([one], cluster)
    needed, seconds = (
        ([], None) if fitting else changes(config, world_size, cluster, documents, lengths)
    )
    if args.json:
        told = {
            "cluster": cluster.entries(),
            "memory_bytes_by_part": parts,
            "memory_bytes": one.bytes,
        }
        told |= {
            "host_bytes": one.host,
            "fits": fitting,
            "changes": [*map(asdict, needed)],
            "seconds_then": seconds,
        }
        told |= {
            "method": method_of(config),
            "mesh": mesh_of(config),
            "memory_by": memory_of(config),
        }
        print(
            json.dumps({**told, "processes": world_size, "sequence_length": config.sequence_length})
        )
        return
    print(f"{asked(world_size, cluster, config)}: {described(config)}")
    if documents:
        most = max(end - start for start, end in pairwise(documents))
        which = (
            "of the run's first micro-batches, the heaviest"
            if known
            else "a micro-batch drawn at random"
        )
        print(f"{which}: {counted(len(documents) - 1, 'document')}, the longest of {most} tokens")
    print(bars(parts, one.host, cluster))
    print(said)
    if fitting:
        return
    if seconds is None:
        fewer = "use more (--fewest says how many) or shorter sequences"
        print(f"no arrangement of these processes fits by the search; {fewer}")
    else:
        print(
            f"change, in the order of docs/tasks/long_context.md, for {duration(seconds)} a step:"
        )
        for change in needed:
            print(f"  {change.flag}  (about {amount(change.bytes)})")


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
    every = bool(args.all or args.longest or args.fewest or args.model)
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
    rows = [
        Row(one, world_size // size) for one, size in zip(found.candidates, others, strict=True)
    ]
    if args.profile:
        from tools.common.training import measure

        best = rows[: args.profile_top]
        seconds = measure(
            [row.candidate.config for row in best], args.profile_iters, quiet=args.json
        )
        both = combine_prediction_and_profile(
            [row.candidate.prediction.time for row in best], seconds
        )
        measured = [replace(row, measured=time) for row, time in zip(best, seconds, strict=True)]
        rows = [
            row for _, row in sorted(zip(both, measured, strict=True), key=itemgetter(0))
        ] + rows[len(best) :]
    if os.environ.get("RANK", "0") != "0":  # profiling has ended the process group
        return
    if args.json:
        told: dict[str, Any] = {
            "cluster": cluster.entries(),
            "rows": [row.entry() for row in rows[: args.top]],
        }
        told |= {"refused": dict(found.refused), "too_large": len(found.over_memory)}
        print(json.dumps({**told, "host_short": len(found.over_host_memory)}))
    elif args.model:
        file = Path(args.model)
        name = file.stem if file.resolve().parent == MODELS else args.model
        print(answer(rows, parsed(["--config", args.model]), world_size, cluster, name))
    else:
        print(asked(world_size, cluster, config))
        print(f"{discarded(found, cluster, args.top)}\n{note}".rstrip())
        print("\n".join([table(rows[: args.top]), *alike(rows[: args.top]), *notes(config)]))
        first = rows[0].candidate.prediction
        print(
            bars(
                first.memory,
                first.host,
                cluster,
                f"a process of the first row{tightly(first.bytes, cluster)}",
            )
        )
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.write, write_toml(rows[0].candidate.config))
        if not args.json:
            print(f"written: {args.write}")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    return exit_status(plan, argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
