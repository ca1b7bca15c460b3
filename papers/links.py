"""WallFacer's gains over Ring Attention on emulated links, predicted and measured.

The paper's clusters have fast links between the GPUs of a node, and slow ones between nodes. Here,
two emulated nodes of 4 processes are connected by links of 100 Mbit/s, one for each node or one for
each rank. A DiT and a GPT of 2 layers train over these links, and the planner predicts the same
steps from a calibration of the link.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.link.cases import CLUSTERS as LINK_CLUSTERS
from bench.link.cases import RANKS as LINK_RANKS
from bench.link.cases import VOCAB_SIZE, cases_of, command_line, corpus, data_of
from bench.link.network import LINKS, Network, prepare_machine
from bench.link.ranks import calibrated, train
from papers.table import TableRow
from planner.cluster import Cluster, load_cluster
from planner.search import predicted
from runtime.machine import device_name
from tools.common.shapes import AttentionShape
from train.config import diffusion
from train.config.derive import with_vocabulary
from train.config.language import parse_args

LINK_RATE = "100mbit"
"""Rate of the link between the nodes, or of each rail (a rank's own link), in tc's notation."""
LINK_TOKENS = 8192
"""Number of tokens of a step."""
LINK_SETTINGS = [
    (link, model, length) for link in LINKS for model in ("dit", "gpt") for length in (1024, 2048)
]
RING = {"dit": "ring", "gpt": "zigzag"}
"""Fastest form of Ring Attention, keyed by model: zigzag balances the work of a causal mask."""
TEAMS = ("wallfacer_c2", "wallfacer_c2_p2p_intra")
"""Configurations of WallFacer: teams of 2 ranks, the only size besides 1 that 8 ranks allow, in
both placements. The faster one is compared with Ring Attention."""
WARM_UP = 1
"""Number of warm-up steps, which are not timed."""
STEPS = 4
"""Number of timed steps."""
CALIBRATED_SHAPE = AttentionShape(num_heads=8, head_dim=16, batch=4)
"""Attention shape that the calibration measures; its heads are those of the models."""
CALIBRATED_LENGTHS = (128, 512)
"""Numbers of tokens per rank at which the calibration measures."""


def link_gains(measured: bool = False) -> Iterator[TableRow]:
    """Yield WallFacer's gains on each link: predicted and, if ``measured``, measured too.

    The predictions use ``bench/link``'s cluster files or, if ``measured``, a calibration of each
    link.

    Raises NetworkError if the machine does not allow network namespaces, and MeasureError if a rank
    failed.
    """
    if measured:
        prepare_machine()
        with corpus() as text:
            for link in LINKS:
                yield from _measured_gains(link, text)
        return
    for link, model, length in LINK_SETTINGS:
        cluster = load_cluster(LINK_CLUSTERS / f"{link}.toml")
        flags = _link_flags(model, length, Path("nowhere"))
        yield _link_row(link, model, length, _link_seconds(cluster, flags))


def _measured_gains(link: str, text: Path) -> Iterator[TableRow]:
    """Emulate and calibrate a link; yield a row for each setting, trained over this link.

    The calibration measures the emulated link itself. So the rows test the planner's model of a
    step, and not whether a data sheet describes the network.
    """
    with Network(rails=link == "rails") as network:
        network.limit(LINK_RATE)
        figures = calibrated(network, CALIBRATED_SHAPE, CALIBRATED_LENGTHS)
        values = {key: value for key, (value, _) in figures.items()}
        cluster = Cluster(name=link, device="cpu", **values)
        for setting, model, length in LINK_SETTINGS:
            if setting != link:
                continue
            flags = _link_flags(model, length, data_of(model, text, length))
            trained = {}
            for name, words in flags.items():
                trained[name] = _trained_on_link(network, model, words)

            row = _link_row(link, model, length, _link_seconds(cluster, flags), trained)
            print(
                f"{link} {model} {length}: {row.measured}, predicted {row.analytic}",
                file=sys.stderr,
            )
            yield row


def _link_flags(model: str, length: int, data: Path) -> dict[str, list[str]]:
    """Return the entry script's flags for Ring Attention and WallFacer, keyed by configuration."""
    cases = cases_of(model)
    shape = {
        "seq_length": length,
        "batch": LINK_TOKENS // length,
        "iterations": WARM_UP + STEPS,
    }
    flags = {}
    for name in (RING[model], *TEAMS):
        flags[name] = command_line(model, cases[name], data, **shape)
    return flags


def _link_seconds(cluster: Cluster, flags: dict[str, list[str]]) -> dict[str, float]:
    """Return the predicted seconds of a step, keyed by configuration.

    Flags with --latent-shape are those of a diffusion transformer; others are a language model's.
    """
    seconds = {}
    for name, words in flags.items():
        if "--latent-shape" in words:
            step = predicted(diffusion.parse_args(words), LINK_RANKS, cluster)
        else:
            step = predicted(with_vocabulary(parse_args(words), VOCAB_SIZE), LINK_RANKS, cluster)
        seconds[name] = float(step.time)
    return seconds


def _trained_on_link(network: Network, model: str, flags: list[str]) -> float:
    """Train over the link with these flags; return the median seconds of a step.

    The first steps do not count, since they also allocate memory and connect the processes.
    """
    steps = train(network, flags, lambda iteration: None, f"pretrain_{model}")
    return median(step.seconds for step in steps[WARM_UP:])


def _link_row(
    link: str,
    model: str,
    length: int,
    predictions: dict[str, float],
    trained: dict[str, float] | None = None,
) -> TableRow:
    """Return the row of a setting, from the predicted and the measured seconds of a step.

    The seconds are keyed by configuration.
    """
    labels: dict[str, str | int] = {"link": link, "model": model, "tokens": length}
    machine = device_name("cpu") if trained else "emulated"
    hardware = f"{machine}, 2 nodes of 4 processes, {LINK_RATE}"
    measured = _gain(model, trained) if trained else None
    return TableRow(labels, {}, _gain(model, predictions), hardware, measured)


def _gain(model: str, seconds: dict[str, float]) -> dict[str, float]:
    """Return the step times in seconds of Ring Attention and of WallFacer, and their ratio.

    WallFacer's time is that of its faster placement.
    """
    ring = seconds[RING[model]]
    wallfacer = min(seconds[name] for name in TEAMS)
    figures = {"ring_s": ring, "wallfacer_s": wallfacer, "times_as_fast": ring / wallfacer}
    return {name: round(float(value), 3) for name, value in figures.items()}
