"""WallFacer's gains over Ring Attention on emulated links, predicted and measured.

The paper's clusters have fast links between the GPUs of a node, and slow ones between nodes. Here
links of 100 Mbit/s connect two nodes of 4 processes, one for each node or for each rank; a DiT and
a GPT of 2 layers train on them, and the planner predicts the same steps from a calibration of the
link.
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
"""Rate of the link, or of each rail."""
LINK_TOKENS = 8192
"""Number of tokens of a step."""
LINK_SETTINGS = [
    (link, model, length) for link in LINKS for model in ("dit", "gpt") for length in (1024, 2048)
]
RING = {"dit": "ring", "gpt": "zigzag"}
"""Fastest form of Ring Attention for each model: zigzag balances the work of a causal mask."""
TEAMS = ("wallfacer_c2", "wallfacer_c2_p2p_intra")
"""Teams of 2 ranks, the only size besides 1 for 8 ranks, in both placements; the faster counts."""
WARM_UP = 1
"""Number of warm-up steps, which are not timed."""
STEPS = 4
"""Number of timed steps."""
CALIBRATED_SHAPE = AttentionShape(num_heads=8, head_dim=16, batch=4)
"""Shape that the calibration measures: the models' heads."""
CALIBRATED_LENGTHS = (128, 512)
"""Numbers of tokens per rank at which the calibration measures."""


def link_gains(measured: bool = False) -> Iterator[TableRow]:
    """Yield the gains on each link: predicted with ``bench/link``'s cluster files, or measured too.

    If ``measured``, the predictions come from a calibration of each link.

    Raises NetworkError: the machine does not allow the namespaces; MeasureError: a rank failed.
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
    """Emulate and calibrate a link; yield its settings, each trained on it.

    The calibration is of the link itself, so that the rows compare the planner's model of a step
    with the step, and not a data sheet with a network.
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
    """Return the flags of the entry script, keyed by method."""
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
    """Return the predicted seconds of a step, keyed by method.

    Only a diffusion transformer's command line has the shape of latents.
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
    """Train with a method; return the median seconds of a step.

    The first steps allocate memory and connect the processes, and do not count.
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
    """Return the row of a setting from the seconds of a step, predicted and trained."""
    labels: dict[str, str | int] = {"link": link, "model": model, "tokens": length}
    machine = device_name("cpu") if trained else "emulated"
    hardware = f"{machine}, 2 nodes of 4 processes, {LINK_RATE}"
    measured = _gain(model, trained) if trained else None
    return TableRow(labels, {}, _gain(model, predictions), hardware, measured)


def _gain(model: str, seconds: dict[str, float]) -> dict[str, float]:
    """Return the seconds of Ring Attention and of the faster teams, and their ratio."""
    ring = seconds[RING[model]]
    wallfacer = min(seconds[name] for name in TEAMS)
    figures = {"ring_s": ring, "wallfacer_s": wallfacer, "times_as_fast": ring / wallfacer}
    return {name: round(float(value), 3) for name, value in figures.items()}
