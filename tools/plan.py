r"""Plan a run: predict its time, memory and fastest arrangement on a cluster; --profile measures.

python -m tools.plan qwen3_8b --seq-length 1048576 --world-size 8 --cluster h100
python -m tools.plan --config llama2_7b --cluster configs/clusters/a100_pod.toml \
    --context-parallel-size 32
python -m tools.plan --config llama2_7b --cluster configs/clusters/h100_pod.toml \
    --world-size 64 --all
python -m tools.plan --config llama3_8b --cluster configs/clusters/h100_pod.toml \
    --world-size 8 --longest
python -m tools.plan --config llama3_8b --cluster configs/clusters/h100_pod.toml --fewest \
    --seq-length 1048576
python -m tools.plan --config llama3_8b --cluster configs/clusters/h100_pod.toml --fits --bf16 \
    --context-parallel-size 8
torchrun --nproc-per-node 4 -m tools.plan --config llama_tiny --context-parallel-size 4 --profile

If the first argument is not a flag, it names a model of configs/models: plans are ranked as with
--all, and the answer includes the command that starts the fastest one. All flags of
pretrain_gpt.py, or of pretrain_dit.py, are accepted too.

--cluster is a file or a name such as h100; by default this machine's device decides, or h100 for a
named model on a machine without a GPU. Without --world-size the plan is for the processes that were
started; if none were, for one node with a named model, else for the product of the mesh's sizes.
"""

import argparse
import math
import os
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tokenizer import load_tokenizer
from planner.choice import combine_prediction_and_profile
from planner.cluster import Cluster, default_cluster, load_cluster
from planner.extremes import fewest, limit_of_longest, longest, of_length
from planner.levers import settings
from planner.limits import nothing_left
from planner.page.measured import read_profiled_run
from planner.search import Ranking, arrangements, rank
from runtime.errors import at_least
from runtime.files import write_text
from runtime.processes import launched_world_size
from runtime.progress import counted
from tools.common.arguments import parser_for, refuse_folder, refuse_unwritable, run_command
from tools.common.plan_memory import print_memory
from tools.common.plan_text import PlanRow
from tools.common.plans.page import plan_page
from tools.common.plans.printed import print_plans
from tools.common.plans.ranked import Plans
from tools.fit import parsed
from tools.prepare_data import DEFAULT_VOCAB_SIZE
from train.config.derive import with_vocabulary
from train.config.entries import Config
from train.config.flags import ConfigError, model_file, write_toml
from train.config.language import validate
from train.run import exit_status

DEFAULT_TOP = 10
DEFAULT_CLUSTER = "h100"
"""Default cluster of a named model, used if neither a flag nor a GPU decides."""
MIN_TOKENS = 8192
"""Number of tokens per GPU and step that a named model's batch has, unless a flag sets it.

It is approximate: a batch has whole sequences, and at least one.
"""


def build_parser() -> argparse.ArgumentParser:
    """Define the planner's own flags; ``prepare`` parses those of the run."""
    parser = parser_for("python -m tools.plan", __doc__)
    add = parser.add_argument
    add("--world-size", type=int, metavar="N", help="number of processes to plan for")

    goal = parser.add_mutually_exclusive_group().add_argument
    goal(
        "--all",
        action="store_true",
        help="vary tp, pp, cp, dp, sharding, recompute, chunks and offload too",
    )
    goal(
        "--longest",
        action="store_true",
        help="as --all, for the longest sequence that fits if all of the memory is used",
    )
    goal(
        "--fewest",
        action="store_true",
        help="as --all, on the fewest processes that suffice: 1, 2, 4, ... or whole nodes",
    )
    goal(
        "--fits",
        action="store_true",
        help="print a process's memory by component as configured, and what to change",
    )

    add("--top", type=int, metavar="N", help=f"number of rows to show (default: {DEFAULT_TOP})")
    add(
        "--document-lengths",
        type=int,
        nargs="+",
        default=(),
        metavar="N",
        help=(
            "with --reset-attention-mask: document lengths in tokens to draw from "
            "(default: the lengths in --data-path)"
        ),
    )
    add("--profile", action="store_true", help="run the best candidates on these processes")
    add(
        "--profile-top",
        type=int,
        default=8,
        metavar="N",
        help="number of candidates to run (default: %(default)s)",
    )
    add(
        "--profile-iters",
        type=int,
        default=3,
        metavar="N",
        help=(
            "number of iterations to time for each candidate, after a warm-up (default: "
            "%(default)s)"
        ),
    )
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the fastest plan as TOML for pretrain_gpt.py",
    )
    add("--json", action="store_true", help="print JSON instead of the table")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page with pictures of the plans; plans for twice the length and GPUs too",
    )
    add(
        "--measured",
        type=Path,
        metavar="RUN",
        help="with --html: show the profile in a run's folder beside the prediction of that run",
    )
    return parser


def prepare(argv: list[str]) -> tuple[argparse.Namespace, Any, int, Cluster]:
    """Return the planner's flags, the configuration, the number of processes and the cluster.

    Raises UserError if flags contradict each other, or if --profile lacks the planned processes.
    """
    model = None
    if argv and not argv[0].startswith("-"):
        model = str(model_file(argv[0]))
        argv = argv[1:]

    args, run_flags = build_parser().parse_known_args(argv)
    args.model = model
    _check_files(args)
    if model:
        config: Any = parsed(["--config", model, *run_flags])
    else:
        config = parsed(run_flags)

    cluster_name = config.context.cluster or None
    if cluster_name is None and model and config.mesh.device_type == "cpu":
        cluster_name = DEFAULT_CLUSTER
    if cluster_name is None:
        cluster = default_cluster(config.mesh.device_type)
    else:
        cluster = load_cluster(cluster_name)

    started = launched_world_size() if "WORLD_SIZE" in os.environ else None
    default_size = cluster.gpus_per_node if model else math.prod(config.mesh.sizes)
    world_size = args.world_size or started or default_size
    if model and config.train.global_batch_size is None:
        batch_size = 1
        if not args.longest:
            batch_size = max(1, world_size * MIN_TOKENS // config.sequence_length)
        config = config.updated(global_batch_size=batch_size)

    at_least(args, 1, "world_size", "top", "profile_top", "profile_iters")
    _check_flags(args, run_flags, config.reads_text)
    args.top = args.top or DEFAULT_TOP
    args.run = None
    if args.measured:
        run = parsed(["--config", str(args.measured / "config.toml")])
        args.run = read_profiled_run(args.measured, run)
    if args.profile:
        _check_profile(config, world_size)
    if config.reads_text and config.model.vocab_size is None:
        if config.data.tokenizer_model is None:
            raise ConfigError(
                "neither vocab_size nor tokenizer_model is set; begin with the name of a model, as "
                "in tools.plan llama3_8b, or give a model with --config FILE, or give --vocab-size "
                "N"
            )
        config = with_vocabulary(config, vocabulary(config.data.tokenizer_model, model))

    return args, config, world_size, cluster


def _check_files(args: argparse.Namespace) -> None:
    """Raise UserError for files that the plan could not be written to after the search."""
    for flag, file in (("--write", args.write), ("--html", args.html)):
        refuse_folder(flag, file)
        if file is not None:
            refuse_unwritable(flag, file)
    if args.write and args.html and os.path.realpath(args.write) == os.path.realpath(args.html):
        raise ConfigError(
            f"--write is {args.write} and --html {args.html}, which are one file, and the page "
            "would overwrite the plan; give two files"
        )


def _check_flags(args: argparse.Namespace, run_flags: list[str], is_language: bool) -> None:
    """Raise ConfigError for flags that contradict each other."""
    if args.fewest and (args.world_size or args.profile):
        flag = "--world-size" if args.world_size else "--profile"
        raise ConfigError(f"--fewest searches for the number of processes; do not pass {flag} too")

    if args.measured and not args.html:
        raise ConfigError(
            f"--measured is {args.measured}, but the profile of a run is shown on a page; give "
            "--html FILE, or leave out --measured"
        )

    for name in ("write", "profile", "top", "html"):
        if args.fits and getattr(args, name):
            raise ConfigError(
                f"--{name} is for ranked plans, but --fits looks at one configuration; "
                f"leave out --{name}"
            )

    for name in ("longest", "profile"):
        if getattr(args, name) and not is_language:
            raise ConfigError(
                f"--{name} is for language models; leave it out, or change latent_shape"
            )

    flags = [word.partition("=")[0].replace("_", "-") for word in run_flags]
    if args.longest and "--seq-length" in flags:
        raise ConfigError(
            "--longest searches for the sequence length; do not pass --seq-length too"
        )


def _check_profile(config: Config, world_size: int) -> None:
    """Raise UserError unless the planned number of processes was started and suits the run."""
    started = launched_world_size()
    if started != world_size:
        processes = counted(world_size, "process")
        raise ConfigError(
            f"--profile needs the {processes} of the plan, but {started} started; use torchrun "
            f"with {processes} in all, or leave out --profile to only predict"
        )

    validate(config.updated(context_parallel_method="auto", cluster=None), world_size)


def vocabulary(tokenizer: str, model: str | None) -> int:
    """Return the number of entries in a tokenizer's vocabulary.

    If the tokenizer that a named model's file expects does not exist yet, assume the default size
    of tools.prepare_data: a plan should need no data.
    """
    model_config: Any = parsed(["--config", model]) if model else None
    is_expected = model_config and tokenizer == model_config.data.tokenizer_model
    if not is_expected or Path(tokenizer).exists():
        return load_tokenizer(tokenizer).vocab_size

    print(
        f"note: {tokenizer} does not exist; a vocabulary of {DEFAULT_VOCAB_SIZE} is assumed, the "
        "default of tools.prepare_data (--vocab-size sets another)",
        file=sys.stderr,
    )
    return DEFAULT_VOCAB_SIZE


def _ranked(
    args: argparse.Namespace, config: Any, world_size: int, cluster: Cluster
) -> tuple[Ranking, str]:
    """Return the ranked candidates, and a note if the configuration as given does not fit."""
    lengths = tuple(args.document_lengths)
    if args.all or args.longest or args.fewest or args.model:
        varied = list(arrangements(config, world_size))
        return rank(varied, world_size, cluster, lengths, settings), ""

    ranking = rank([config], world_size, cluster, lengths, None)
    too_large = ranking.over_memory or ranking.over_host_memory
    if ranking.candidates or not too_large:
        return ranking, ""

    resource = "" if ranking.over_memory else " of host memory"
    note = (
        f"as configured, a process takes {min(too_large) / 1e9:.1f} GB{resource}, so settings that "
        "save memory are varied (--fits shows the memory by component)"
    )
    return rank([config], world_size, cluster, lengths, settings), note


def _profiled(args: argparse.Namespace, rows: list[PlanRow]) -> list[PlanRow]:
    """Run the best candidates, and order them by measurement and prediction together."""
    from tools.common.training import measure

    best = rows[: args.profile_top]
    configs = [row.candidate.config for row in best]
    seconds = measure(configs, args.profile_iters, quiet=args.json)
    predictions = [row.candidate.prediction.time for row in best]
    scores = combine_prediction_and_profile(predictions, seconds)

    measured = [replace(row, measured=time) for row, time in zip(best, seconds, strict=True)]
    in_order = sorted(zip(scores, measured, strict=True), key=itemgetter(0))
    return [row for _, row in in_order] + rows[len(best) :]


def plan(argv: list[str]) -> None:
    """Rank the candidates, profile them if requested, and print and write the plans."""
    args, config, world_size, cluster = prepare(argv)
    if args.fits:
        print_memory(args, config, world_size, cluster)
        return
    if args.longest:
        config = of_length(config, longest(config, world_size, cluster))
    if args.fewest:
        world_size = fewest(config, cluster)

    ranking, note = _ranked(args, config, world_size, cluster)
    if not ranking.candidates:
        raise ConfigError(nothing_left(ranking, cluster))

    limit = ""
    if args.longest:
        limit = limit_of_longest(config, world_size, cluster)
    if limit:
        note = f"a longer sequence lacks {limit}"

    rows = []
    for candidate in ranking.candidates:
        dp = world_size // math.prod(candidate.config.mesh.sizes)
        rows.append(PlanRow(candidate, dp))

    if args.profile:
        rows = _profiled(args, rows)
    if os.environ.get("RANK", "0") != "0":  # is_first() needs the group, but profiling ended it
        return

    base = parsed(["--config", args.model]) if args.model else None
    plans = Plans(
        args=args,
        argv=argv,
        config=config,
        base=base,
        world_size=world_size,
        cluster=cluster,
        ranking=ranking,
        rows=rows,
        note=note,
        limit=limit,
        rank_plans=_ranked,
    )
    print_plans(plans)
    if args.write:
        _write(args, args.write, write_toml(rows[0].candidate.config))
    if args.html:
        sys.stdout.flush()  # the page's searches take as long as the plans' own
        _write(args, args.html, plan_page(plans))


def _write(args: argparse.Namespace, file: Path, text: str) -> None:
    """Write a file, and say so unless the output is JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    if not args.json:
        print(f"written: {file}")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    return exit_status(plan, argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
