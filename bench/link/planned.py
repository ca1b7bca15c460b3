"""The planner's proposals for a setting of the link bench: predicted for its cluster file, then profiled."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrain_dit
from bench.link.cases import VOCAB_SIZE, batch_of, command_line, method_flags, name_of
from bench.link.network import Network
from bench.link.ranks import profile
from planner.cluster import Cluster, load_cluster
from planner.complete import with_vocabulary
from planner.search import rank
from train.config.language import parse_args

CLUSTERS = Path(__file__).parent / "clusters"
ITERATIONS = 3


def planned(
    network: Network, model: str, link: str, data: Path, length: int, args: argparse.Namespace
) -> dict[str, tuple[tuple[str, ...], dict[str, float]]]:
    """Return flags and predicted seconds by name, predicted fastest first, and of the best the profiled seconds.

    Raises MeasureError: a rank failed.
    """
    shape: dict[str, Any] = {"size": network.size, "seq_length": length, "batch": batch_of(args, length)}
    found = {
        name: (flags, {"predicted": seconds})
        for name, (flags, seconds) in predictions(load_cluster(CLUSTERS / f"{link}.toml"), model, data, **shape).items()
    }
    best = list(found.values())[: args.profile]
    lines = [command_line(model, flags, data, **shape, iterations=ITERATIONS + 1) for flags, _ in best]
    network.limit(args.rate)
    for (_, said), seconds in zip(best, profile(network, lines, ITERATIONS), strict=True):
        said["profiled"] = seconds
    return found


def predictions(
    cluster: Cluster, model: str, data: Path, more: Sequence[str] = (), **shape: int
) -> dict[str, tuple[tuple[str, ...], float]]:
    """Return flags and predicted seconds of every candidate by name, fastest first.

    Args:
        more: flags of the model.
        shape: as ``command_line``'s.
    """
    asked = command_line(model, ("--context-parallel-method", "auto", *more), data, **shape, iterations=ITERATIONS + 1)
    config = pretrain_dit.parse_args(asked) if model == "dit" else with_vocabulary(parse_args(asked), VOCAB_SIZE)
    size = shape["size"]
    found = ((one.config.context, one.prediction.time) for one in rank([config], size, cluster).candidates)
    return {name_of(context): ((*method_flags(context, size), *more), seconds) for context, seconds in found}


def verdict(candidates: dict[str, dict[str, Any]], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the planner's choice by profile, its gap to the best of ``cases``, and that one's predicted rank."""
    choice = min(
        (name for name in candidates if "profiled" in candidates[name]), key=lambda n: candidates[n]["profiled"]
    )
    best = min(cases, key=lambda name: cases[name]["median"])
    return {
        "choice": choice,
        "behind_the_best": cases[choice]["median"] / cases[best]["median"] - 1,
        "best": best,
        "predicted_rank_of_the_best": 1 + list(candidates).index(best),
    }
