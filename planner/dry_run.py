"""`--dry-run` of either entry: a run's memory, traffic and predicted time from one process, and its
command.
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
from planner.recorder import BETWEEN, CAUSES, INSIDE, Rehearsal
from planner.rehearsal import Build, fake_process_group, rehearse
from planner.search import ROOM, predicted
from planner.workload import known_documents
from runtime.errors import UserError
from runtime.progress import Progress, amount, counted, duration
from train.config.derive import rope_flags
from train.config.finalize import complete
from train.config.flags import ConfigError, spelled
from train.tasks.registry import task_of


class DoesNotFitError(UserError):
    """Less memory than a run takes."""

    status = 3


ALIKE = ("zigzag", "striped", "ulysses")
"""Methods that give all context-parallel ranks the same tiles, of whole sequences."""


def dry_run(arguments: Sequence[str], config: Any) -> list[Rehearsal]:
    """Check a run of ``config`` and print its memory, traffic and time; return the first two by
    rank.

    The first rank of each pipeline stage is run and, where context-parallel ranks have unequal
    work, the last one of the first stage. Ranks of dp and tp have the same.

    Raises:
        UserError: what the run itself would be refused for, but for missing files, which are noted.
        DoesNotFitError: it takes more memory than there is; after all is printed.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "dry_run is one process for all, and RANK is set; start it without torchrun"
        )
    asked, named, mesh, task = config, config.context.cluster, config.mesh, task_of(config)
    method = config.context.context_parallel_method
    cluster = default_cluster(mesh.device_type) if named is None else load_cluster(named)
    if named is not None:
        config = config.updated(device=cluster.device, cluster=named if method == "auto" else None)
    world_size = config.dry.world_size or math.prod(mesh.sizes)
    config, notes, lacking = with_files(config)
    with fake_process_group(0, world_size, cluster.gpus_per_node):
        task.validate(config, world_size)
        settings = tuple(partial(choose, cluster=cluster) for choose in PLANNER.settings)
        config = complete(config, _entries(config), PLANNER._replace(settings=settings))
    if named is None:
        notes.append(
            f"note: predicted for {cluster.name}, this machine's device; --cluster FILE predicts for other machines, "
            "as configs/clusters/h100_pod.toml"
        )
    found = list(rehearsed(config, task, world_size, cluster))
    ran = "a forward, a backward and an optimizer's step ran"
    print(f"dry run of {counted(world_size, 'process')} on {cluster.name}: {ran}")
    fits, said = verdict(found, cluster)
    seconds = predicted(config, world_size, cluster, known_documents(config))
    parts = ", ".join(
        f"{name} {duration(count)}" for name, count in seconds.seconds.items() if count
    )
    iters = config.train.train_iters
    whole = (
        f"{counted(iters, 'step')} take{'s' if iters == 1 else ''} {duration(iters * seconds.time)}"
    )
    time = f"time: {duration(seconds.time)} a step, predicted: {parts}; {whole}"
    print("\n".join([*_table(found), time, *[said] * fits, *notes]))
    lacking += " ".join(rope_flags(config)).split()  # which complete's note asks for
    print(
        "\n".join(_commands([*arguments, *lacking], task.entry, cluster, world_size, asked)),
        flush=True,
    )
    if not fits:
        raise DoesNotFitError(
            f"{said}; python -m tools.plan --fits with the same flags says what to change"
        )
    return found


def rehearsed(
    config: Any,
    task: Build[Any],
    world_size: int,
    cluster: Cluster,
    documents: Sequence[int] | None = None,
) -> Iterator[Rehearsal]:
    """Rehearse each rank that has work of its own, and tell on stderr how far it is: each takes
    seconds.

    They are the first rank of each stage and, where context-parallel ranks have unequal work, the
    first stage's last.
    """
    pp, cp, tp = config.mesh.sizes
    ranks = [stage * (world_size // pp) for stage in range(pp)]
    if cp > 1 and (config.packed or config.context.context_parallel_method not in ALIKE):
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
                documents,
                cluster.device,
                progress,
            )


def with_files(config: Any) -> tuple[Any, list[str], list[str]]:
    """Name the files that a run must have, so that the rest can be validated.

    Return notes on those not here, and the words of the flags that name those that no flag names.
    """
    named, writer = config.with_file_names(), task_of(config).data_writer
    wanted = named.files() + ([("load", named.checkpoint.load)] if named.checkpoint.load else [])
    notes, lacking = [], list[str]()
    for name, path in wanted:
        written = f"; python -m {writer} writes one"
        if name == "load":
            hub = "hf download NAME --local-dir FOLDER"
            written = (
                f"; {hub}"
                if path.startswith("hf:")
                else f"; {hub}, python -m tools.convert_hf import FOLDER {path}"
            )
        if not getattr(config.checkpoint if name == "load" else config.data, name):
            written = "" if name == "load" else written
            lacking += spelled(name, path.removesuffix(".idx")).split()
            notes.append(f"note: {name} is not set; give {' '.join(lacking[-2:])}{written}")
        elif not Path(path.removeprefix("hf:")).exists():
            notes.append(f"note: {name} {path} is not on this machine{written}")
    return named, notes, lacking


def _entries(config: Any) -> int | None:
    """Return the entries of the tokenizer or, if that is not here, of the vocabulary; None if the
    data are no text.
    """
    if not config.reads_text:
        return None
    if config.data.tokenizer_model and Path(config.data.tokenizer_model).exists():
        return load_tokenizer(str(config.data.tokenizer_model)).vocab_size
    if config.model.vocab_size is None:
        raise ConfigError(
            f"vocab_size is not set, and there is no tokenizer_model {config.data.tokenizer_model} here to count; give "
            "--vocab-size N, or write it (python -m tools.prepare_data)"
        )
    return config.model.vocab_size


def verdict(found: Sequence[Rehearsal], cluster: Cluster) -> tuple[bool, str]:
    """Return whether every process has enough memory, and that in a sentence."""
    most, host = max(one.bytes for one in found), max(one.host for one in found)
    room, there = cluster.memory_gb, cluster.host_memory_gb
    if most > 1e9 * room:
        return False, f"does not fit in {room:g} GB: a process takes {amount(most)}"
    if 0 < 1e9 * there < host:
        return (
            False,
            f"does not fit in {there:g} GB of host memory: a process moves {amount(host)} there",
        )
    return (
        True,
        f"fits in {room:g} GB: a process takes at most {amount(most)}{tightly(most, cluster)}",
    )


def tightly(count: float, cluster: Cluster) -> str:
    """Return a warning to append where so many bytes fit and leave an allocator too little."""
    return ", which leaves less than the tenth that an allocator may need" * (
        count > ROOM * 1e9 * cluster.memory_gb
    )


def _table(found: Sequence[Rehearsal]) -> Iterator[str]:
    """Yield a table of memory and bytes; host memory has a column if anything is moved there."""
    heads = [*CAUSES, "GB of memory", *["GB of host memory"] * any(one.host for one in found)]
    yield f"| stage | rank | {' | '.join(heads)} | GB sent {INSIDE} | {BETWEEN} |"
    yield "|" + " ---: |" * (len(heads) + 4)
    for one in found:
        counts = [*(one.memory.get(cause, 0) for cause in CAUSES), one.bytes, one.host][
            : len(heads)
        ]
        counts += [one.sent.get(link, 0) for link in (INSIDE, BETWEEN)]
        yield f"| {one.stage} | {one.rank} | {' | '.join(f'{count / 1e9:.3f}' for count in counts)} |"


def _commands(
    arguments: Sequence[str], entry: str, cluster: Cluster, world_size: int, asked: Any
) -> Iterator[str]:
    """Yield the commands that start the run, by torchrun and, where a cluster file is named, by
    Slurm.
    """
    flags, named = list(arguments), asked.context.cluster
    chosen = (
        asked.context.context_parallel_method == "auto" or asked.mesh.allow_resize
    )  # by the run, for the cluster
    for index in reversed(range(len(flags))):
        flag, equals, _ = flags[index].replace("_", "-").partition("=")
        if flag in ("--dry-run", "--world-size") or (flag == "--cluster" and not chosen):
            del flags[index : index + (1 if equals or flag == "--dry-run" else 2)]
    unsaved = not asked.checkpoint.save
    refused = unsaved and any(word.partition("=")[0] == "--save" for word in flags)  # --save none
    flags += ["--save", "runs/NAME"] if unsaved and not refused else []
    nodes, run = -(-world_size // cluster.gpus_per_node), f"{entry} {shlex.join(flags)}"
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    each = min(world_size, cluster.gpus_per_node)
    yield f"start: torchrun {'--standalone' if nodes == 1 else several} --nproc-per-node {each} {run}"
    if named is not None and world_size == nodes * cluster.gpus_per_node:
        run += " --save runs/NAME" if refused else ""  # which a job must have
        yield f"or: python -m slurm.submit --cluster {shlex.quote(named)} --nodes {nodes} {run}"
