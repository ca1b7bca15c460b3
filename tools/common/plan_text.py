"""Format plans as text: candidates, memory bars, discarded candidates, and the best plan."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kernels.backends import RATED
from parallel.mesh import SIZES
from planner.cluster import Cluster, largest_public_error
from planner.dry_run import tightly
from planner.layers.float8 import SPEEDUP, published_error
from planner.levers import described, memory_of, mesh_of, method_of
from planner.search import Candidate, Ranking
from runtime.progress import amount, counted, duration
from tools.common.report import aligned
from train.config.derive import beyond_rope, rope_flags
from train.config.flags import spelled
from train.tasks.registry import task_of

BAR = 40
"""Number of characters of a full memory bar."""
WIDTH = 116
NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")
OTHERS = 3
"""Number of plans to show after the first."""
ALIKE = 0.01
"""Relative difference of predicted times below which two plans count as equal."""


@dataclass(frozen=True)
class PlanRow:
    """A row of the planner's table: a candidate, and its measured seconds per iteration, if any."""

    candidate: Candidate
    dp: int
    measured: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the predicted tokens (for a DiT, patches) per second of all processes together."""
        config = self.candidate.config
        tokens = config.train.batch_size(self.dp) * config.sequence_length
        return float(tokens / self.candidate.prediction.time)

    def entry(self) -> dict[str, Any]:
        """Return the row as --json writes it."""
        config = self.candidate.config
        prediction = self.candidate.prediction
        return {
            "context": asdict(config.context),
            "mesh": {name: getattr(config.mesh, name) for name in SIZES},
            "recompute": asdict(config.recompute),
            "sharding": config.data_parallel.strategy,
            "seq_length": config.sequence_length,
            "predicted_seconds": prediction.time,
            "predicted_seconds_by_part": prediction.seconds,
            "predicted_tokens_per_second": self.tokens_per_second,
            "measured_seconds": self.measured,
            "memory_bytes": prediction.bytes,
            "memory_bytes_by_part": prediction.memory,
            "host_bytes": prediction.host,
            "attention_bytes_inside_nodes": prediction.links.inside,
            "attention_bytes_between_nodes": prediction.links.between,
        }


def _measured(row: PlanRow) -> str:
    if row.measured is None:
        return ""
    return duration(row.measured)


def _host_memory(row: PlanRow) -> str:
    host_bytes = row.candidate.prediction.host
    if not host_bytes:
        return ""
    return f"{host_bytes / 1e9:.1f}"


COLUMNS: dict[str, Callable[[PlanRow], str]] = {
    "method": lambda row: method_of(row.candidate.config),
    "mesh": lambda row: mesh_of(row.candidate.config),
    "memory by": lambda row: memory_of(row.candidate.config),
    "predicted": lambda row: duration(row.candidate.prediction.time),
    "measured": _measured,
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "inside nodes GB": lambda row: f"{row.candidate.prediction.links.inside / 1e9:.3f}",
    "between GB": lambda row: f"{row.candidate.prediction.links.between / 1e9:.3f}",
    "memory GB": lambda row: f"{row.candidate.prediction.bytes / 1e9:.1f}",
    "host GB": _host_memory,
}
"""Columns of the table: each name with the function that formats a cell.

The first three are words, aligned to the left.
"""


SHORT = ("method", "mesh", "memory by", "predicted", "memory GB", "host GB")


def table_cells(
    rows: Sequence[PlanRow], columns: Sequence[str] = tuple(COLUMNS), first: int = 1
) -> list[list[str]]:
    """Return a head and the rows' cells, numbered from ``first``, without empty columns."""
    used: dict[str, list[str]] = {}
    for head in columns:
        cells = [COLUMNS[head](row) for row in rows]
        if any(cells):
            used[head] = cells

    lines = [["", *used]]
    for number, row_cells in enumerate(zip(*used.values(), strict=True), first):
        lines.append([str(number), *row_cells])
    return lines


def table(rows: Sequence[PlanRow], columns: Sequence[str] = tuple(COLUMNS), first: int = 1) -> str:
    """Format the rows as a table, numbered from ``first``, without columns that are all empty."""
    return "\n".join(aligned(table_cells(rows, columns, first), range(1, 4)))


def bars(
    parts: Mapping[str, float], host: float, cluster: Cluster, owner: str = "a process"
) -> str:
    """Draw a process's memory by cause, as shares of its device memory.

    The rest of the device memory is shown as left for the allocator's fragmentation. Pinned host
    memory gets a bar as a share of the host memory that the process may use.
    """
    total = sum(parts.values())
    device_bytes = 1e9 * cluster.memory_gb
    host_bytes = 1e9 * cluster.host_memory_gb

    shown: dict[str, tuple[float, float]] = {}  # name -> bytes, and the bytes of a full bar
    for name, count in {**parts, "together": total}.items():
        if count:
            shown[name] = (count, device_bytes)

    if total <= device_bytes:
        shown["left for fragmentation"] = (device_bytes - total, device_bytes)
    if host:
        shown["on the host, pinned"] = (host, host_bytes or math.inf)

    host_note = ""
    if host and host_bytes:
        host_note = f" and {cluster.host_memory_gb:g} GB of host memory"
    lines = [f"memory of {owner}, which has {cluster.memory_gb:g} GB{host_note}:"]
    width = max(map(len, shown))
    for name, (count, room) in shown.items():
        filled = min(BAR, round(BAR * count / room))
        over = "+" if count > room else ""
        lines.append(f"  {name:{width}}  {'#' * filled:.<{BAR}}{over:1} {amount(count):>9}")

    return "\n".join(lines)


def discarded(ranking: Ranking, cluster: Cluster, top: int) -> str:
    """Return how many candidates there are, and how many were discarded for which reasons."""
    num_candidates = len(ranking.candidates)
    shown = ""
    if top < num_candidates:
        shown = f" (the best {top} are shown, --top)"
    sums = f"{ranking.refused.total()} refused, {len(ranking.over_memory)} too large"
    if ranking.over_host_memory:
        sums += f", {len(ranking.over_host_memory)} too large for host memory"

    lines = [f"{counted(num_candidates, 'candidate')}{shown}; {sums}"]
    for example, count in grouped(ranking.refused):
        lines.append(f"  refused {count}{example}")

    if ranking.over_memory:
        smallest = min(ranking.over_memory) / 1e9
        lines.append(
            f"  too large {len(ranking.over_memory)}: memory is {cluster.memory_gb:g} GB, but "
            f"these take {smallest:.1f} or more"
        )

    return "\n".join(lines)


def grouped(refused: Counter[str]) -> list[tuple[str, int]]:
    """Group reasons that differ only in numbers; return each group's example and count.

    The largest group comes first.
    """
    first_reasons: dict[str, str] = {}
    counts: Counter[str] = Counter()
    several: set[str] = set()
    for reason, count in refused.items():
        words = NUMBER.sub("", reason)
        if words in first_reasons:
            several.add(words)
        first_reasons.setdefault(words, reason)
        counts[words] += count

    groups = []
    for words, reason in first_reasons.items():
        lead = ", such as: " if words in several else ": "
        groups.append((lead + reason, counts[words]))

    return sorted(groups, key=lambda group: -group[1])


def headline(world_size: int, cluster: Cluster, config: Any) -> str:
    """Return a plan's heading: number of processes, cluster and sequence length."""
    processes = counted(world_size, "process")
    return f"{processes} on {cluster.name}, sequences of {config.sequence_length} tokens"


def answer(
    rows: Sequence[PlanRow], config: Any, world_size: int, cluster: Cluster, file: str
) -> str:
    """Describe the fastest plan that fits for a named model.

    The text has the plan's time by part and its memory, the next plans, the command that starts
    the fastest one, and the sources of the numbers.
    """
    first = rows[0]
    prediction = first.candidate.prediction
    best = first.candidate.config

    slowest_first = sorted(
        ((seconds, name) for name, seconds in prediction.seconds.items()), reverse=True
    )
    spent = []
    for seconds, name in slowest_first:
        if seconds > 0.005 * prediction.time:
            spent.append(f"{name} {duration(seconds)}")

    step = duration(prediction.time)

    lines = [
        f"{headline(world_size, cluster, best)}: fits{tightly(prediction.bytes, cluster)}",
        f"  {step} a step, {first.tokens_per_second:,.0f} tokens/s: {', '.join(spent)}",
        f"  {described(best)}",
        bars(prediction.memory, prediction.host, cluster),
    ]
    if len(rows) > 1:
        lines.append("next:")
        lines.append(table(rows[1 : 1 + OTHERS], columns=SHORT, first=2))
        lines += alike(rows[: 1 + OTHERS])

    lines += ["start it:", *command(best, config, world_size, cluster, file)]
    if best.checkpoint.load is None:
        lines.append(
            "  it trains from random weights; add --finetune --load RUN to begin with RUN's weights"
        )

    return "\n".join([*lines, *notes(best, scaled=True), *sources(best, cluster)])


def alike(rows: Sequence[PlanRow]) -> list[str]:
    """Return a line that lists the rows predicted to be as fast as the first, within ``ALIKE``.

    Nothing is returned if there are none, or if the rows were measured.
    """
    if rows[0].measured is not None:
        return []
    return equal_to_first([row.candidate.prediction.time for row in rows])


def optimizer_share(rows: Sequence[PlanRow]) -> list[str]:
    """Return a line with the optimizer's time in the first row's step, if it is a cause."""
    prediction = rows[0].candidate.prediction
    seconds = prediction.seconds.get("optimizer", 0.0)
    if not seconds:
        return []
    share = seconds / prediction.time
    return [f"the optimizer takes {duration(seconds)} of the first row's step, {share:.1%}"]


def equal_to_first(seconds: Sequence[float]) -> list[str]:
    """List the row numbers whose times equal the first one within ``ALIKE``."""
    numbers = []
    for number, time in enumerate(seconds[1:], 2):
        if time < (1 + ALIKE) * seconds[0]:
            numbers.append(str(number))

    if not numbers:
        return []

    return [f"as fast as 1, as far as predictions tell (to {ALIKE:.0%}): {', '.join(numbers)}"]


def notes(config: Any, scaled: bool = False) -> list[str]:
    """Return a warning, in lines, if sequences are longer than the model's maximum length.

    ``scaled`` means that the printed command already scales rope to the sequence length.
    """
    note = beyond_rope(config)
    if note and scaled:
        note = re.sub(
            r"scale rope with .*, or set --max-position-embeddings",
            "the command scales rope to them; set --max-position-embeddings instead",
            note,
        )

    return textwrap.wrap(note or "", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def command(
    best: Any,
    config: Any,
    world_size: int,
    cluster: Cluster,
    file: str,
    *,
    has_data: bool = False,
) -> list[str]:
    """Return the lines of the command that starts a plan.

    Only the settings that differ from ``config``, those of the file, become flags. With
    ``has_data`` the file names the data too.
    """
    nodes = -(-world_size // cluster.gpus_per_node)
    while world_size % nodes:  # torchrun starts the same number of processes on each node
        nodes += 1

    flags = []
    for section in fields(best):
        planned = getattr(best, section.name)
        base = getattr(config, section.name)
        if planned == base:
            continue
        for entry in fields(planned):
            value = getattr(planned, entry.name)
            if value != getattr(base, entry.name):
                flags.append(spelled(entry.name, value))

    flags += rope_flags(best)

    launch = f"torchrun --nproc-per-node {world_size // nodes}"
    if nodes > 1:
        launch += f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    task = task_of(best)
    data_flags = () if has_data else task.data_flags
    words = [launch, f"{task.entry} --config {file}", *flags, *data_flags, "--save runs/NAME"]

    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > WIDTH - 4:
            lines.append("     ")
        lines[-1] += f" {word}"

    return [" " + " \\\n ".join(lines)]


def sources(best: Any, cluster: Cluster) -> list[str]:
    """Return lines on the sources of a plan's numbers, and its error on published runs."""
    cluster = cluster.running(best.context.attention_backend, best.packed)
    kernel = "attention"
    if cluster.attention_kernel:
        kernel = RATED[cluster.attention_kernel].title or cluster.attention_kernel

    recurrent = best.model.recurrent
    is_published = best.causal and not recurrent
    float8 = best.float8
    table = "float8" if float8.fp8_format else "public"
    if is_published and float8.fp8_format:
        cp = best.mesh.context_parallel_size
        error = published_error(float8.fp8_recipe, cp, best.train.compile)
    elif is_published and cluster.public_error:
        error = (
            f"at most {cluster.public_error:.0%} on published runs on this GPU that were not used "
            f"for fitting; on all GPUs at most {largest_public_error():.0%}"
        )
    else:
        error = (
            f"unknown: there is no published run of such a model on this GPU with {kernel} to "
            "compare with"
        )

    speedup = ""
    if float8.fp8_format and best.train.compile:
        speedup = f" ({SPEEDUP[float8.fp8_recipe]} times that for the layers in float8)"
    elif float8.fp8_format:
        speedup = " (no more in float8 without --compile)"

    rule = ""
    if recurrent and best.model.delta_rule:
        assumed = "" if cluster.delta_fraction else " (assumed)"
        rule = f", the delta rule at {cluster.delta_share:.1%}{assumed}"

    return [
        "where this comes from:",
        f"  time: matmuls at {cluster.matmul_fraction:.0%} of {cluster.peak_tflops:,g} TFLOP/s"
        f"{speedup}, {kernel} at {cluster.attention_fraction:.0%}{rule}; the cluster's file has "
        "their sources",
        f"  error: {error}",
        f"         (python -m papers.records --table {table} compares them all)",
        "  memory: counted from the plan that runs, without the allocator's reserve; "
        "--dry-run rehearses the run's own code",
        "  this program has not been run on a GPU yet",
    ]
