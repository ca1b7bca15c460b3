"""WallFacer's gain over Ring Attention on emulated links: training steps of 8 ranks beside the planner's prediction.

The paper's clusters have fast links between the 16 or 8 GPUs of a node, and slow ones between nodes. Here links of 100
Mbit/s join two nodes of 4 processes, one for each node or for each rank; a DiT and a GPT of 2 layers train on them.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import interleaved
from bench.link.cases import cases_of, command_line, corpus, data_of
from bench.link.choices import CLUSTERS, cluster_of, predictions
from bench.link.network import LINKS, Network, prepare_machine
from bench.link.ranks import train
from papers.rows import Row
from planner.cluster import Cluster, load_cluster
from runtime.machine import device_name

RATE, TOKENS = "100mbit", 8192
"""The rate of the link or of each rail; tokens of a step."""
SETTINGS = [(link, model, length) for link in LINKS for model in ("dit", "gpt") for length in (1024, 2048)]
RING = {"dit": "ring", "gpt": "zigzag"}
"""Ring Attention as it is fastest: a causal mask's work is balanced."""
WALLFACER = ("wallfacer_c2", "wallfacer_c2_p2p_intra")
"""Teams of 2, the only size of 8 ranks besides 1; both placements, of which the faster counts."""
WARM_UP, STEPS, TURNS = 1, 4, 1
"""Steps of a turn that do not count, and that do."""
ENTRIES = {"dit": "pretrain_dit", "gpt": "pretrain_gpt"}


def gains(measured: bool = False) -> list[Row]:
    """Return the gains predicted by ``bench/link``'s cluster files, or by a calibration of each link and measured.

    Raises NetworkError: the machine does not allow the namespaces; MeasureError: a rank failed.
    """
    if not measured:
        clusters = {link: load_cluster(CLUSTERS / f"{link}.toml") for link in LINKS}
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "no"
            return [_row(*of, predicted(clusters[of[0]], *of[1:], text)) for of in SETTINGS]
    prepare_machine()
    found = []
    with corpus() as text:
        for link in LINKS:
            with Network(rails=link == "rails") as network:
                network.limit(RATE)
                cluster = Cluster(**cluster_of(network, link))
                found += [_measured(network, cluster, *setting, text) for setting in SETTINGS if setting[0] == link]
    return found


def predicted(cluster: Cluster, model: str, length: int, text: Path) -> dict[str, float]:
    """Return the predicted seconds of a step by method."""
    data = data_of(model, text, length)
    found = predictions(cluster, model, data, length, TOKENS // length)
    return {name: found[name][1] for name in (RING[model], *WALLFACER)}


def _measured(network: Network, cluster: Cluster, link: str, model: str, length: int, text: Path) -> Row:
    expected = predicted(cluster, model, length, text)
    seconds: dict[str, list[float]] = {name: [] for name in expected}
    shape: dict[str, Any] = {"seq_length": length, "batch": TOKENS // length, "iterations": WARM_UP + STEPS}
    for name in interleaved([*expected], TURNS):
        flags = command_line(model, cases_of(model)[name], data_of(model, text, length), **shape)
        steps = train(network, flags, lambda iteration: None, ENTRIES[model])
        seconds[name] += [step.seconds for step in steps[WARM_UP:]]
    row = _row(link, model, length, expected, {name: median(taken) for name, taken in seconds.items()})
    print(f"{link} {model} {length}: {row.measured}, predicted {row.analytic}", file=sys.stderr)
    return row


def _row(link: str, model: str, length: int, expected: dict[str, float], found: dict[str, float] | None = None) -> Row:
    of: dict[str, str | int] = {"link": link, "model": model, "tokens": length}
    where = f"{device_name('cpu') if found else 'emulated'}, 2 nodes of 4 processes, {RATE}"
    return Row(of, {}, _gain(model, expected), where, found and _gain(model, found))


def _gain(model: str, seconds: dict[str, float]) -> dict[str, float]:
    ring, ours = seconds[RING[model]], min(seconds[name] for name in WALLFACER)
    return {
        "ring_s": round(float(ring), 3),
        "wallfacer_s": round(float(ours), 3),
        "times_as_fast": round(float(ring / ours), 3),
    }
