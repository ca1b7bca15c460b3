"""`--dry-run`: predict a run's memory, traffic and time in one process, and print its command.

Memory and traffic come from rehearsals of the ranks whose work differs, time from the cost model.
Everything that the run would check before its first step is checked, with one exception: files that
are not on this machine only cause a note, since a dry run is often made on another machine.
"""

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data.tokenizer import load_tokenizer
from planner.choice import PLANNER
from planner.cluster import Cluster, default_cluster, load_cluster
from planner.page.report import DryRun, dry_run_page
from planner.recorder import BETWEEN, CAUSES, INSIDE, Rehearsal
from planner.rehearsal import Build, fake_process_group, rehearse
from planner.search import ROOM, predicted
from planner.workload import known_documents
from runtime.errors import UserError
from runtime.files import unwritable, write_text
from runtime.progress import Progress, amount, counted, duration
from train.config.derive import rope_flags
from train.config.finalize import complete
from train.config.flags import ConfigError, spelled
from train.tasks.registry import task_of


class DoesNotFitError(UserError):
    """A run needs more memory than the cluster has."""

    status = 3


BALANCED_METHODS = ("zigzag", "striped", "ulysses")
"""Methods that give all context-parallel ranks equal work if sequences are not packed."""


def dry_run(arguments: Sequence[str], config: Any) -> list[Rehearsal]:
    """Check a run and print its memory, traffic and time; return the rehearsals of its ranks.

    Args:
        arguments: the run's flags, which the printed start commands repeat.
        config: the configuration made from these flags.

    Raises:
        UserError: the run itself would be refused. Missing files only cause a note.
        DoesNotFitError: the run needs more memory than the cluster has; raised after the output.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "dry_run needs only one process, but RANK is set; start --dry-run without torchrun"
        )
    page_file = config.dry.dry_run_html
    if page_file is not None:
        folder = Path(page_file).parent
        why = unwritable(folder, "give another --dry-run-html")
        if why:
            raise ConfigError(f"dry_run_html is {page_file}, in {folder}, {why}")
    requested = config
    task = task_of(config)
    config, cluster = _on_cluster(config)
    world_size = config.dry.world_size or math.prod(config.mesh.sizes)
    config, notes, missing_flags = with_files(config)
    with fake_process_group(0, world_size, cluster.gpus_per_node):
        task.validate(config, world_size)
        choosers = tuple(partial(choose, cluster=cluster) for choose in PLANNER.settings)
        config = complete(config, _entries(config), PLANNER._replace(settings=choosers))
    if requested.context.cluster is None:
        notes.append(
            f"note: predicted for {cluster.name}, this machine's device; "
            "--cluster FILE (such as configs/clusters/h100_pod.toml) predicts for other machines"
        )

    rehearsals = list(rehearsed(config, task, world_size, cluster))
    fits, sentence = verdict(rehearsals, cluster)
    print(
        f"dry run of {counted(world_size, 'process')} on {cluster.name}: "
        "a forward pass, a backward pass and an optimizer step ran"
    )
    lines = [*_table(rehearsals), *_step_line(rehearsals)]
    lines.append(_time_line(config, world_size, cluster))
    if fits:
        lines.append(sentence)
    print("\n".join([*lines, *notes]))
    missing_flags += " ".join(rope_flags(config)).split()  # `complete` prints a note on these
    commands = list(
        _commands([*arguments, *missing_flags], task.entry, cluster, world_size, requested)
    )
    print("\n".join(commands), flush=True)
    if page_file is not None:
        run = DryRun(config, world_size, cluster, requested.context.cluster, tuple(rehearsals))
        page = dry_run_page(run, known_documents(config), sentence, notes, commands)
        file = Path(page_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, page)
        print(f"written: {file}", flush=True)
    if not fits:
        raise DoesNotFitError(
            f"{sentence}; python -m tools.plan --fits with the same flags says what to change"
        )
    return rehearsals


def _on_cluster(config: Any) -> tuple[Any, Cluster]:
    """Return the configuration with the cluster's kind of device, and the cluster.

    Without --cluster, this machine is the cluster. A given name stays in the configuration only if
    the method is ``auto``, because the method is then chosen for that cluster.
    """
    name = config.context.cluster
    if name is None:
        return config, default_cluster(config.mesh.device_type)
    cluster = load_cluster(name)
    config = config.updated(device=cluster.device)
    if config.context.context_parallel_method != "auto":
        config = config.updated(cluster=None)
    return config, cluster


def _time_line(config: Any, world_size: int, cluster: Cluster) -> str:
    """Return a line with the predicted time of a step, divided by cause, and of all steps."""
    prediction = predicted(config, world_size, cluster, known_documents(config))
    causes = []
    for name, seconds in prediction.seconds.items():
        if seconds:
            causes.append(f"{name} {duration(seconds)}")
    iters = config.train.train_iters
    verb = "takes" if iters == 1 else "take"
    return (
        f"time: {duration(prediction.time)} a step, predicted: {', '.join(causes)}; "
        f"{counted(iters, 'step')} {verb} {duration(iters * prediction.time)}"
    )


def rehearsed(
    config: Any,
    task: Build[Any],
    world_size: int,
    cluster: Cluster,
    cu_seqlens: Sequence[int] | None = None,
) -> Iterator[Rehearsal]:
    """Rehearse each rank whose work differs; each takes seconds, so progress goes to stderr.

    These ranks are the first of each pipeline stage and, if context-parallel ranks have unequal
    work, the last context-parallel rank of the first stage. Data- and tensor-parallel ranks have
    equal work.
    """
    pp, cp, tp = config.mesh.sizes
    ranks = [stage * (world_size // pp) for stage in range(pp)]
    is_balanced = config.context.context_parallel_method in BALANCED_METHODS
    if cp > 1 and (config.packed or not is_balanced):
        ranks.insert(1, (cp - 1) * tp)
    with Progress() as progress:
        for number, rank in enumerate(ranks, 1):
            progress.of = (
                f"running rank {rank} of {world_size} without memory ({number} of {len(ranks)}): "
            )
            yield rehearse(
                config,
                task,
                rank,
                world_size,
                cluster.gpus_per_node,
                cu_seqlens,
                cluster.device,
                progress,
            )


def with_files(config: Any) -> tuple[Any, list[str], list[str]]:
    """Fill in names for the files that a run needs, so that everything else can be validated.

    Returns:
        The configuration with file names, notes on files that are not on this machine, and flags
        for the files that the user did not name.
    """
    named_config = config.with_file_names()
    writer = task_of(config).data_writer
    files = named_config.files()
    if named_config.checkpoint.load:
        files = [*files, ("load", named_config.checkpoint.load)]
    notes: list[str] = []
    missing_flags: list[str] = []
    for name, path in files:
        is_load = name == "load"
        remedy = f"; python -m {writer} writes one"
        if is_load:
            remedy = "; get it by hf download NAME --local-dir FOLDER"
            if not path.startswith("hf:"):
                remedy += f" and python -m tools.convert_hf import FOLDER {path}"
        section = config.checkpoint if is_load else config.data
        if not getattr(section, name):
            missing_flags += spelled(name, path.removesuffix(".idx")).split()
            note = f"note: {name} is not set; give {' '.join(missing_flags[-2:])}"
            if not is_load:
                note += remedy
            notes.append(note)
        elif not Path(path.removeprefix("hf:")).exists():
            notes.append(f"note: {name} {path} is not on this machine{remedy}")
    return named_config, notes, missing_flags


def _entries(config: Any) -> int | None:
    """Return the tokenizer's number of entries or, without its file, the vocabulary size.

    Return None if the data are not text.
    """
    if not config.reads_text:
        return None
    tokenizer_model = config.data.tokenizer_model
    if tokenizer_model and Path(tokenizer_model).exists():
        return load_tokenizer(str(tokenizer_model)).vocab_size
    if config.model.vocab_size is None:
        raise ConfigError(
            f"vocab_size is not set, and tokenizer_model {tokenizer_model} is not on this machine; "
            "give --vocab-size N, or write the tokenizer (python -m tools.prepare_data)"
        )
    return config.model.vocab_size


def verdict(rehearsals: Sequence[Rehearsal], cluster: Cluster) -> tuple[bool, str]:
    """Return True if every process has enough memory, and a sentence with the figures."""
    max_bytes = max(rehearsal.bytes for rehearsal in rehearsals)
    max_host_bytes = max(rehearsal.host for rehearsal in rehearsals)
    memory_gb = cluster.memory_gb
    host_gb = cluster.host_memory_gb
    if max_bytes > 1e9 * memory_gb:
        return False, f"does not fit in {memory_gb:g} GB: a process takes {amount(max_bytes)}"
    if 0 < 1e9 * host_gb < max_host_bytes:
        return False, (
            f"does not fit in {host_gb:g} GB of host memory: "
            f"a process moves {amount(max_host_bytes)} there"
        )
    return True, (
        f"fits in {memory_gb:g} GB: a process takes at most {amount(max_bytes)}"
        f"{tightly(max_bytes, cluster)}"
    )


def tightly(num_bytes: float, cluster: Cluster) -> str:
    """Return a warning if these bytes fit but an allocator may need more; else an empty string."""
    if num_bytes <= ROOM * 1e9 * cluster.memory_gb:
        return ""
    return " (leaves less than the tenth of memory that an allocator may need)"


def _table(rehearsals: Sequence[Rehearsal]) -> Iterator[str]:
    """Yield the lines of a table of memory and bytes sent; host memory has a column if used."""
    uses_host = any(rehearsal.host for rehearsal in rehearsals)
    heads = [*CAUSES, "GB of memory"]
    if uses_host:
        heads.append("GB of host memory")
    yield f"| stage | rank | {' | '.join(heads)} | GB sent {INSIDE} | {BETWEEN} |"
    yield "|" + " ---: |" * (len(heads) + 4)

    for rehearsal in rehearsals:
        counts = [rehearsal.memory.get(cause, 0) for cause in CAUSES]
        counts.append(rehearsal.bytes)
        if uses_host:
            counts.append(rehearsal.host)
        counts.append(rehearsal.sent.get(INSIDE, 0))
        counts.append(rehearsal.sent.get(BETWEEN, 0))
        cells = [f"{count / 1e9:.3f}" for count in counts]
        yield f"| {rehearsal.stage} | {rehearsal.rank} | {' | '.join(cells)} |"


def _step_line(rehearsals: Sequence[Rehearsal]) -> Iterator[str]:
    """Yield a line with the bytes that a rank sends in the optimizer's step, if it sends any."""
    busiest = max(rehearsals, key=lambda rehearsal: sum(rehearsal.step_sent.values()))
    links = []
    for link in (INSIDE, BETWEEN):
        num_bytes = busiest.step_sent.get(link, 0)
        if num_bytes:
            links.append(f"{num_bytes / 1e9:.3f} GB {link}")
    if links:
        yield f"optimizer: in its step rank {busiest.rank} sends {' and '.join(links)}"


def _commands(
    arguments: Sequence[str], entry: str, cluster: Cluster, world_size: int, requested: Any
) -> Iterator[str]:
    """Yield the commands that start the run with torchrun and, for a named cluster, with Slurm."""
    flags = _run_flags(arguments, requested)

    # A run without --save loses its weights, so --save is added, unless --save none is given.
    is_unsaved = not requested.checkpoint.save
    refuses_save = is_unsaved and any(flag.partition("=")[0] == "--save" for flag in flags)
    if is_unsaved and not refuses_save:
        flags += ["--save", "runs/NAME"]
    run = f"{entry} {shlex.join(flags)}"

    per_node = cluster.gpus_per_node
    num_nodes = -(-world_size // per_node)
    launch = "--standalone"
    if num_nodes > 1:
        launch = f"--nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    yield f"start: torchrun {launch} --nproc-per-node {min(world_size, per_node)} {run}"

    name = requested.context.cluster
    if name is not None and world_size == num_nodes * per_node:
        if refuses_save:
            run += " --save runs/NAME"  # slurm.submit refuses a job without --save
        yield f"or: python -m slurm.submit --cluster {shlex.quote(name)} --nodes {num_nodes} {run}"


def _run_flags(arguments: Sequence[str], requested: Any) -> list[str]:
    """Return the command line without the flags of the dry run.

    --cluster stays if the run itself uses it to choose its method or mesh.
    """
    chooses = requested.context.context_parallel_method == "auto" or requested.mesh.allow_resize
    flags = []
    skips_value = False
    for argument in arguments:
        if skips_value:
            skips_value = False
            continue
        flag, equals, _ = argument.replace("_", "-").partition("=")
        if flag in ("--dry-run", "--dry-run-html", "--world-size") or (
            flag == "--cluster" and not chooses
        ):
            skips_value = not equals and flag != "--dry-run"
            continue
        flags.append(argument)
    return flags
