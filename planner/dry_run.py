"""`--dry-run` of either entry: a run's memory, traffic and predicted time from one process, and its command."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data.latents.dataset import DIGITS
from data.text.config import blend
from data.tokenizer import load_tokenizer
from planner.choice import fastest_method, with_layout_and_schedule
from planner.cluster import Cluster, default_cluster, load_cluster
from planner.recorder import BETWEEN, CAUSES, INSIDE, Rehearsal
from planner.rehearsal import Build, fake_process_group, rehearse
from planner.search import ROOM, predicted
from planner.workload import known_documents
from runtime.errors import UserError
from runtime.progress import Progress, amount, counted, duration
from train.config.derive import complete, rope_flags, with_joined_ranks, with_method
from train.config.entries import Config
from train.config.flags import ConfigError, spelled


class DoesNotFitError(UserError):
    """Less memory than a run takes."""

    status = 3


ALIKE = ("zigzag", "striped", "ulysses")
"""Methods that give all context-parallel ranks the same tiles, of whole sequences."""


def dry_run(
    arguments: Sequence[str], config: Any, entry: str, validate: Callable[[Any, int], None], build: Build[Any]
) -> list[Rehearsal]:
    """Check a run of ``config`` and print its memory, traffic and time; return the first two by rank.

    The first rank of each pipeline stage is run and, where context-parallel ranks have unequal work, the last one of
    the first stage. Ranks of dp and tp have the same.

    Raises:
        UserError: what the run itself would be refused for, but for missing files, which are noted.
        DoesNotFitError: it takes more memory than there is; after all is printed.
    """
    if "RANK" in os.environ:
        raise ConfigError("dry_run is one process for all, and RANK is set; start it without torchrun")
    asked, named, mesh = config, config.context.cluster, config.mesh
    method = config.context.context_parallel_method
    cluster = default_cluster(mesh.device_type) if named is None else load_cluster(named)
    if named is not None:
        mesh = replace(mesh, device=cluster.device)
        context = replace(config.context, cluster=named if method == "auto" else None)
        config = replace(config, mesh=mesh, context=context)
    world_size = config.dry.world_size or math.prod(mesh.sizes)
    config, notes, lacking = with_files(config)
    with fake_process_group(0, world_size, cluster.gpus_per_node):
        validate(config, world_size)
        config = with_joined_ranks(config, world_size)
        if isinstance(config, Config):
            config = complete(
                config, _entries(config), fastest_method, partial(with_layout_and_schedule, cluster=cluster)
            )
        else:
            config = with_method(config, world_size, fastest_method)
    if named is None:
        notes.append(
            f"note: predicted for {cluster.name}, this machine's device; --cluster FILE predicts for other machines, "
            "as configs/clusters/h100_pod.toml"
        )
    found = list(rehearsed(config, build, world_size, cluster))
    ran = "a forward, a backward and an optimizer's step ran"
    print(f"dry run of {counted(world_size, 'process')} on {cluster.name}: {ran}")
    fits, said = verdict(found, cluster)
    seconds = predicted(config, world_size, cluster, known_documents(config))
    parts = ", ".join(f"{name} {duration(count)}" for name, count in seconds.seconds.items() if count)
    iters = config.train.train_iters
    whole = f"{counted(iters, 'step')} take{'s' if iters == 1 else ''} {duration(iters * seconds.time)}"
    time = f"time: {duration(seconds.time)} a step, predicted: {parts}; {whole}"
    print("\n".join([*_table(found), time, *[said] * fits, *notes]))
    if isinstance(config, Config):
        lacking += " ".join(rope_flags(config)).split()  # which complete's note asks for
    print("\n".join(_commands([*arguments, *lacking], entry, cluster, world_size, asked)), flush=True)
    if not fits:
        raise DoesNotFitError(f"{said}; python -m tools.plan --fits with the same flags says what to change")
    return found


def rehearsed(
    config: Any, build: Build[Any], world_size: int, cluster: Cluster, documents: Sequence[int] | None = None
) -> Iterator[Rehearsal]:
    """Rehearse each rank that has work of its own, and tell on stderr how far it is: each takes seconds.

    They are the first rank of each stage and, where context-parallel ranks have unequal work, the first stage's last.
    """
    pp, cp, tp = config.mesh.sizes
    ranks = [stage * (world_size // pp) for stage in range(pp)]
    if cp > 1 and (config.packed or config.context.context_parallel_method not in ALIKE):
        ranks.insert(1, (cp - 1) * tp)
    with Progress() as progress:
        for number, rank in enumerate(ranks, 1):
            progress.of = f"running rank {rank} of {world_size} without memory ({number} of {len(ranks)}): "
            yield rehearse(config, build, rank, world_size, cluster.gpus_per_node, documents, cluster.device, progress)


def with_files(config: Any) -> tuple[Any, list[str], list[str]]:
    """Name the files that a run must have, so that the rest can be validated.

    Return notes on those not here, and the words of the flags that name those that no flag names.
    """
    data, checkpoint = config.data, replace(config.checkpoint, save=config.checkpoint.save or "RUN")
    if isinstance(config, Config) and not data.mock_data:
        data = replace(data, data_path=data.data_path or ("PREFIX",), tokenizer_model=data.tokenizer_model or "FILE")
        wanted = [("data_path", f"{prefix}.idx") for prefix in blend(data.data_path)[0]]
        wanted += [("tokenizer_model", data.tokenizer_model)]
    else:
        wanted = [("data_path", path) for path in data.data_path if path != DIGITS]
    if isinstance(config, Config) and config.model.lora_rank:
        checkpoint = replace(checkpoint, load=checkpoint.load or "RUN")
    wanted += [("load", checkpoint.load)] if checkpoint.load else []
    writer = "tools.prepare_data" if isinstance(config, Config) else "tools.prepare_latents"
    notes, lacking = [], list[str]()
    for name, path in wanted:
        written = f"; python -m {writer} writes one"
        if name == "load":
            hub = "hf download NAME --local-dir FOLDER"
            written = (
                f"; {hub}" if path.startswith("hf:") else f"; {hub}, python -m tools.convert_hf import FOLDER {path}"
            )
        if not getattr(config.checkpoint if name == "load" else config.data, name):
            written = "" if name == "load" else written
            lacking += spelled(name, path.removesuffix(".idx")).split()
            notes.append(f"note: {name} is not set; give {' '.join(lacking[-2:])}{written}")
        elif not Path(path.removeprefix("hf:")).exists():
            notes.append(f"note: {name} {path} is not on this machine{written}")
    return replace(config, data=data, checkpoint=checkpoint), notes, lacking


def _entries(config: Config) -> int:
    """Return the entries of the tokenizer or, where that is not here, of the vocabulary."""
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
        return False, f"does not fit in {there:g} GB of host memory: a process moves {amount(host)} there"
    return True, f"fits in {room:g} GB: a process takes at most {amount(most)}{tightly(most, cluster)}"


def tightly(count: float, cluster: Cluster) -> str:
    """Return a warning to append where so many bytes fit and leave an allocator too little."""
    return ", which leaves less than the tenth that an allocator may need" * (count > ROOM * 1e9 * cluster.memory_gb)


def _table(found: Sequence[Rehearsal]) -> Iterator[str]:
    """Yield a table of memory and bytes; host memory has a column if anything is moved there."""
    heads = [*CAUSES, "GB of memory", *["GB of host memory"] * any(one.host for one in found)]
    yield f"| stage | rank | {' | '.join(heads)} | GB sent {INSIDE} | {BETWEEN} |"
    yield "|" + " ---: |" * (len(heads) + 4)
    for one in found:
        counts = [*(one.memory.get(cause, 0) for cause in CAUSES), one.bytes, one.host][: len(heads)]
        counts += [one.sent.get(link, 0) for link in (INSIDE, BETWEEN)]
        yield f"| {one.stage} | {one.rank} | {' | '.join(f'{count / 1e9:.3f}' for count in counts)} |"


def _commands(arguments: Sequence[str], entry: str, cluster: Cluster, world_size: int, asked: Any) -> Iterator[str]:
    """Yield the commands that start the run, by torchrun and, where a cluster file is named, by Slurm."""
    flags, named = list(arguments), asked.context.cluster
    chosen = asked.context.context_parallel_method == "auto" or asked.mesh.allow_resize  # by the run, for the cluster
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
