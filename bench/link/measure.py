"""Measure every configuration in every setting: steps without and with the limit, and the bytes that crossed."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.link.cases import VOCAB_SIZE, batch_of, cases_of, command_line, reference_of
from bench.link.network import Network
from bench.link.planned import planned
from bench.link.ranks import Iteration, train
from data.text.prepare import Request
from parallel.context import Plan, make_plan
from runtime.machine import describe
from train.config.language import Config, parse_args

CORPUS = Request(vocab_size=VOCAB_SIZE, max_bytes=4 << 20)
WARM_UP, WARM_UP_LIMITED = 2, 1  # steps: connections are made; TCP finds its window
FREE = 3  # counted steps without the limit


def measure(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Measure all settings of a command line on the corpus ``data``, with a line for each configuration.

    Raises MeasureError: a rank failed; NetworkError: the machine does not allow the namespaces, or tc does not know the
    rate.
    """
    tables: dict[str, list[dict[str, Any]]] = {"settings": [], "cases": [], "planner": []}
    machine = describe("cpu")
    for link in args.links:
        with Network(rails=link == "rails") as network:
            network.limit(args.rate)  # fails before training if tc does not know the rate
            for model in args.models:
                for length in args.seq_length:
                    _setting(tables, network, model, link, length, data, args)
    return {
        "benchmark": "training steps between two emulated nodes",
        "machine": machine,
        "note": args.note,
        "load_average": list(os.getloadavg()),
        "rate": args.rate,
        "ranks_per_node": network.ranks_per_node,
        "repeats": args.repeats,
        **tables,
    }


def _setting(
    tables: dict[str, list[dict[str, Any]]],
    network: Network,
    model: str,
    link: str,
    length: int,
    data: Path,
    args: argparse.Namespace,
) -> None:
    """Add the rows of one setting: all configurations, including those that the planner profiles."""
    setting = {"model": model, "link": link, "seq_length": length, "batch": batch_of(args, length)}
    known, reference = cases_of(model), reference_of(model)
    methods = {name: known[name] for name in (reference, *(args.cases or known)) if name in known}
    tables["settings"].append(setting)
    if args.profile and model != "transnormer":  # for linear attention it weighs only lasp and lasp2
        print(f"{model:6}{link:8}{length:6} profiling the {args.profile} best predictions", flush=True)
        for name, (flags, said) in planned(network, model, link, data, length, args).items():
            methods |= {name: flags} if "profiled" in said else {}
            tables["planner"].append({**setting, "name": name, **said})
    found: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        found[name] = one(network, model, method, data, length, args)
        tables["cases"].append({**setting, "name": name, **found[name]})
        print(_line(setting, name, found[name], found[reference]), flush=True)


def one(
    network: Network, model: str, method: Sequence[str], data: Path, length: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Train one configuration; return the medians of its steps, without and with the limit."""
    last = WARM_UP + FREE + WARM_UP_LIMITED + args.repeats
    batch = batch_of(args, length)
    flags = command_line(model, method, data, size=network.size, seq_length=length, batch=batch, iterations=last)
    found = medians(network, args.rate, lambda before: train(network, flags, before), WARM_UP, FREE)
    return {**found, "attention_by_plan": max(attention_crossing(parse_args(flags), network.ranks_per_node))}


def medians(
    network: Network, rate: str, run: Callable[[Callable[[int], None]], list[Iteration]], warm_up: int, free: int
) -> dict[str, Any]:
    """Return the medians of the iterations of ``run(before)``: ``warm_up`` and ``free`` without the limit, then within.

    The first within the limit does not count.
    """
    begin = warm_up + free

    def limit(iteration: int) -> None:
        if iteration in (0, begin):
            network.limit(rate if iteration else None)

    steps = run(limit)
    limited = steps[begin + WARM_UP_LIMITED :]
    return {
        "seconds": [step.seconds for step in limited],
        "median": median(step.seconds for step in limited),
        "unlimited": median(step.seconds for step in steps[warm_up:begin]),
        "crossed": _busier(limited),
    }


def attention_crossing(config: Config, ranks_per_node: int) -> tuple[int, int]:
    """Return the bytes that a step's attentions send from the first node to the second, and back, by the plan.

    Zero with tensor parallelism, whose layers send their tokens outside of the plan.
    """
    model, sent = config.model, [0, 0]
    size = config.mesh.context_parallel_size
    plan = make_plan(
        config.context.context_parallel_method,
        seq_len=config.train.seq_length,
        size=size,
        **config.context.plan_arguments(ranks_per_node),
    )
    for layer in range(model.num_layers):
        turned = model.model_type == "transnormer" and layer == 0  # LRPE doubles queries and keys
        crossing = plan_crossing(
            plan,
            ranks_per_node,
            batch=config.train.micro_batch_size,
            heads=model.num_attention_heads,
            kv_heads=model.query_groups,
            head_dim=model.head_dim * (2 if turned else 1),
            value_dim=model.head_dim,
            element_size=4,
        )
        sent = [before + more for before, more in zip(sent, crossing, strict=True)]
    return sent[0], sent[1]


def plan_crossing(plan: Plan, ranks_per_node: int, **sizes: Any) -> tuple[int, int]:
    """Return the bytes that one attention sends from the first node to the second, and back; as ``plan.cost``."""
    sent = [0, 0]
    for rank in range(plan.size):
        cost = plan.cost(rank, **sizes)
        for traffic in (cost.forward, cost.backward):
            sent[rank // ranks_per_node] += traffic.between_nodes(rank, ranks_per_node)
    return sent[0], sent[1]


def _busier(steps: list[Iteration]) -> float:
    return max(median(step.there for step in steps), median(step.back for step in steps))


def _line(shape: dict[str, Any], name: str, found: dict[str, Any], reference: dict[str, Any]) -> str:
    return (
        f"{shape['model']:12}{shape['link']:8}{shape['seq_length']:6} {name:26}{found['median']:8.3f} s"
        f"{reference['median'] / found['median']:8.2f} x {reference_of(shape['model'])}, "
        f"{found['crossed'] / 2**20:7.1f} MiB crossed, {found['unlimited']:7.3f} s without a limit"
    )
