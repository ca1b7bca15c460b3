"""Measure attention on one device: block kernels beside torch's own, and a ring step's compute without its traffic.

The same code runs on the CPU, as in its tests. What a device or a library refuses is listed under ``skipped`` with the
reason and has no figure.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from bench.ceilings import measure as measure_ceilings
from bench.errors import MeasureError, one_line
from bench.rounds import target
from bench.workload import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Workload
from kernels.attention import CAUSAL, block_backward, block_forward, select_backend
from kernels.linear_attention import linear_attention
from model.attention import sdpa
from parallel.context import METHODS, make_plan
from parallel.context.executor import Executor
from parallel.context.geometry import Transfer
from parallel.context.heads import HeadExchange
from parallel.context.plan import Plan
from parallel.context.transport import Arrival, Tensors, Transport
from runtime.machine import describe, time_steps
from tools.report import aligned

LENGTHS = (2048, 4096, 8192, 16384, 32768)
BACKENDS = {"cuda": ("aten", "cudnn", "flash_attn", "flash_attn_3", "triton"), "cpu": ("aten",)}
WORST_ERROR = 2e-2
"""Relative difference from torch's own, in the 2-norm, beyond which a kernel is not timed."""

Step = Callable[[], Any]


def measure(
    device: str, work: Workload, lengths: tuple[int, ...], methods: tuple[str, ...], ranks: int, repeats: int
) -> dict[str, Any]:
    """Measure ceilings, kernels at every length, and simulated steps with ``work.seq_length`` positions per rank."""
    skipped: dict[str, str] = {}
    kernels: list[dict[str, Any]] = []
    result = {
        "benchmark": "attention on one device, causal",
        "machine": describe(device),
        "ceilings": measure_ceilings(device, (work.dtype,)),
        "workload": vars(work),
        "ranks": ranks,
        "kernels": kernels,
    }
    for length in lengths:
        kernels += kernels_of(device, replace(work, seq_length=length), repeats, skipped)
    return {**result, **_simulate(device, work, methods, ranks, repeats, skipped), "skipped": skipped}


def _try(label: str, skipped: dict[str, str], measured: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return ``measured()``, or None and note the refusal (no memory, not installed, not supported)."""
    try:
        return measured()
    except torch.AcceleratorError:
        raise  # whatever comes after it fails too
    except Exception as error:  # Triton's own errors have no other base
        skipped[label] = one_line(error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def kernels_of(device: str, shape: Workload, repeats: int, skipped: dict[str, str]) -> list[dict[str, Any]]:
    """Time torch's own attention, then each of our backends."""
    q, k, v, dout = shape.tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    truth: list[Tensor] = []

    def peer() -> dict[str, Any]:
        out = sdpa(*leaves)
        truth[:] = [out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True)]
        backward = time_steps(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, repeats)
        return _row("sdpa", shape, time_steps(lambda: sdpa(*leaves), device, repeats), backward)

    def ours(name: str) -> dict[str, Any]:
        backend, scale = select_backend(name, device, q.dtype), shape.head_dim**-0.5
        with torch.no_grad():
            out, lse = block_forward(q, k, v, CAUSAL, scale, backend)
            gradients = block_backward(dout, q, k, v, out, lse, CAUSAL, scale, backend)
            error = _error([out, *gradients], truth)
            if not error <= WORST_ERROR:
                raise MeasureError(f"differs from scaled_dot_product_attention by {error:.1e} of the 2-norm")
            forward = time_steps(lambda: block_forward(q, k, v, CAUSAL, scale, backend), device, repeats)
            backward = time_steps(
                lambda: block_backward(dout, q, k, v, out, lse, CAUSAL, scale, backend), device, repeats
            )
        return _row(name, shape, forward, backward) | {"error": error}

    rows = [_try(f"sdpa at {shape.seq_length}", skipped, peer)]
    if truth:
        for name in BACKENDS[device]:
            rows.append(_try(f"{name} at {shape.seq_length}", skipped, lambda name=name: ours(name)))  # type: ignore[misc]
    return [row for row in rows if row is not None]


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest relative difference of a pair of tensors in the 2-norm; NaN if any is."""
    pairs = ((a.double(), b.double()) for a, b in zip(got, want, strict=True))
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()


def _row(name: str, shape: Workload, forward: list[float], backward: list[float]) -> dict[str, Any]:
    there, back = median(forward), median(backward)
    return {
        "kernel": name,
        "seq_length": shape.seq_length,
        "forward_seconds": there,
        "backward_seconds": back,
        "forward_tflops": shape.flops(shape.pairs, FORWARD_PRODUCTS) / there / 1e12,
        "backward_tflops": shape.flops(shape.pairs, BACKWARD_PRODUCTS) / back / 1e12,
    }


class Alone(Transport):
    """One rank's links without peers: it receives what it would send."""

    def _new_group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
        return None

    def post(
        self, sends: list[tuple[int, Tensors]], receives: list[tuple[int, Tensors]], far: bool
    ) -> tuple[list[Arrival], Callable[[], object]]:
        return [lambda tensors=tensors: tensors for _, tensors in receives], lambda: None  # type: ignore[misc]

    def shift(self, tensors: Tensors, transfer: Transfer, far: bool) -> Arrival:
        return lambda: tensors

    def gather(self, tensors: Tensors, ranks: tuple[int, ...]) -> Arrival:
        return lambda: tuple(torch.cat([tensor] * len(ranks), dim=1) for tensor in tensors)

    def exchange(self, parts: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return parts.contiguous()


def _simulate(
    device: str, local: Workload, methods: tuple[str, ...], ranks: int, repeats: int, skipped: dict[str, str]
) -> dict[str, Any]:
    """Time each rank's forward + backward of every method in turn; a method is as fast as its slowest rank."""
    whole = replace(local, seq_length=local.seq_length * ranks)
    tensors = local.tensors(device)
    steps: dict[str, Any] = {}
    for method in methods:
        plan = make_plan(method, seq_len=whole.seq_length, size=ranks)
        if plan.local_len != local.seq_length:
            skipped[f"simulated {method}"] = f"{local.seq_length} positions a rank would be padded to {plan.local_len}"
            continue
        geometry = plan.geometry
        executors = [Executor(geometry, Alone(geometry, None, rank), rank, "auto") for rank in range(ranks)]
        measured = _try(
            f"simulated {method}",
            skipped,
            lambda plan=plan, executors=executors: {  # type: ignore[misc]
                "seconds_by_rank": [median(time_steps(step_of(plan, e, *tensors), device, repeats)) for e in executors],
                "pairs_by_rank": [sum(step.pairs for step in plan.rounds(e.rank)) for e in executors],
            },
        )
        if measured is not None:
            slowest = max(measured["seconds_by_rank"])
            flops = whole.flops(max(measured["pairs_by_rank"]))
            steps[method] = measured | {"slowest_seconds": slowest, "tflops": flops / slowest / 1e12}
    alone = _try("sdpa of the whole sequence", skipped, lambda: _whole(device, whole, ranks, repeats))
    return {"simulated": steps, "simulated_ratios": _ratios(steps, alone), "whole_sequence": alone}


def step_of(plan: Plan, executor: Executor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Step:
    """Return a forward + backward of one rank of a plan."""
    scale = q.shape[-1] ** -0.5

    def step() -> None:
        out, lse = executor.forward(plan, q, k, v, None, scale)
        executor.backward(plan, dout, q, k, v, out, lse, scale)

    return step


def _whole(device: str, whole: Workload, ranks: int, repeats: int) -> dict[str, Any]:
    q, k, v, dout = whole.tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seconds = median(time_steps(lambda: torch.autograd.grad(sdpa(*leaves), leaves, dout), device, repeats))
    return {"seq_length": whole.seq_length, "seconds": seconds, "share_seconds": seconds / ranks}


def _ratios(steps: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, dict[str, float]]:
    """Return ratios of ring to each method and of each method to its share of the whole sequence; limits count
    pairs."""
    ratios = {}
    for name, step in steps.items():
        seconds, pairs = step["slowest_seconds"], step["pairs_by_rank"]
        if "ring" in steps and name != "ring":
            ring = steps["ring"]
            limit = max(ring["pairs_by_rank"]) / max(pairs)
            ratios[f"ring/{name}"] = {"ratio": ring["slowest_seconds"] / seconds, "limit": limit}
        if alone is not None:
            limit = max(pairs) / fmean(pairs)
            ratios[f"{name}/share"] = {"ratio": seconds / alone["share_seconds"], "limit": limit}
    return ratios


def masked(device: str, work: Workload, repeats: int) -> dict[str, Any]:
    """Time a CAUSAL tile off the diagonal beside one on it, and packed documents beside one, forward + backward."""
    q, k, v, dout = work.tensors(device)
    backend, scale = select_backend("auto", device, q.dtype), work.head_dim**-0.5

    def tile(rows: slice, columns: slice) -> float:
        own, keys = (q[:, rows], dout[:, rows]), (k[:, columns], v[:, columns])

        def step() -> None:
            out, lse = block_forward(own[0], *keys, CAUSAL, scale, backend)
            block_backward(own[1], own[0], *keys, out, lse, CAUSAL, scale, backend)

        return median(time_steps(step, device, repeats))

    on, off = slice(0, work.seq_length - 1), slice(1, work.seq_length)
    tiles, rates = {"on the diagonal": tile(on, on), "off it": tile(off, on)}, dict[str, float]()
    for name, mask in {"one document": work, "packed": replace(work, documents="lognormal")}.items():
        plan = mask.plan("zigzag", 1)
        executor = Executor(plan.geometry, Alone(plan.geometry, None, 0), 0, "auto")
        seconds = median(time_steps(step_of(plan, executor, q, k, v, dout), device, repeats))
        rates[name] = mask.flops(mask.pairs) / seconds / 1e12
    return {
        "causal_tile_seconds": tiles,
        "off_the_diagonal": tiles["off it"] / tiles["on the diagonal"],
        "tflops": rates,
        "packed": rates["packed"] / rates["one document"],
    }


def targets(found: dict[str, Any], chosen: str) -> list[dict[str, Any]]:
    """Return what is wanted of the figures of ``measure`` and ``masked``; ``chosen`` is the backend that auto takes."""
    rows, wanted = found["kernels"], list[dict[str, Any]]()
    seconds = {
        (row["kernel"], row["seq_length"]): (row["forward_seconds"], row["forward_seconds"] + row["backward_seconds"])
        for row in rows
    }
    for length in {8192, 32768} & {row["seq_length"] for row in rows}:
        for half, said in enumerate(("forward", "forward + backward")):
            others = (name for name in BACKENDS["cuda"] if name != "triton")
            best = [seconds[name, length][half] for name in others if (name, length) in seconds]
            for name, least in ((chosen, 1.0), ("triton", 0.75)):
                if best and (name, length) in seconds:
                    label = f"{name} over the best of torch's and flash-attn's, {length} tokens, {said}"
                    wanted.append(target(label, min(best) / seconds[name, length][half], least))
    for method in ("zigzag", "striped"):
        if (share := found["simulated_ratios"].get(f"{method}/share")) is not None:
            wanted.append(target(f"{method} ranks over their share of one GPU's attention", 1 / share["ratio"], 0.95))
    wanted.append(
        target("a CAUSAL tile off the diagonal over one on it", found["masked"]["off_the_diagonal"], 0.97, 1.03)
    )
    return [*wanted, target("packed documents over the dense rate", found["masked"]["packed"], 0.85)]


def layers_and_methods(device: str, documents: tuple[int, ...]) -> dict[str, Step]:
    """Return forward + backward of two layers, of the scan, and of a rank's part by every method, whole and packed.

    The rank has no peers, and receives what it would send.
    """
    from model.config import ModelConfig
    from model.llama import Llama

    model = Llama(ModelConfig(num_layers=2, hidden_size=512, num_attention_heads=8, vocab_size=1024)).to(device)
    tokens, length = torch.zeros(1, 512, dtype=torch.long, device=device), documents[-1]
    work = Workload(seq_length=length, num_heads=4, kv_heads=4, head_dim=64, dtype="bfloat16")
    q, k, v, dout = work.tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def layers() -> None:
        with torch.autocast(device, torch.bfloat16):
            model(tokens).sum().backward()

    def scan(bounds: tuple[int, ...] | None, backend: str) -> None:
        out, _ = linear_attention(q, k, v, [-0.1] * 4, documents=bounds, backend=backend)
        torch.autograd.grad(out, leaves, dout)

    def attend(plan: Plan, rank: Executor, heads: HeadExchange) -> None:
        with torch.no_grad():
            local = [heads.to_heads(x[:, : plan.local_len]) for x in (q, k, v, dout)]
            step_of(plan, rank, *local)()
            heads.to_tokens(local[3], 4)

    found: dict[str, Step] = {"two layers": layers}
    for bounds, kind in ((None, "whole"), (documents, "packed")):
        found |= {f"linear attention, {name}, {kind}": partial(scan, bounds, name) for name in ("auto", "chunked")}
        for method in METHODS:
            plan = make_plan(method, seq_len=length, size=4, documents=bounds)
            alone = Alone(plan.geometry, None, 1)
            found[f"{method}, {kind}"] = partial(
                attend, plan, Executor(plan.geometry, alone, 1, "auto"), HeadExchange(alone)
            )
    return found


def table(result: dict[str, Any]) -> str:
    """Format the figures of ``measure`` as a table."""
    machine, work, ceilings = result["machine"], result["workload"], result["ceilings"]
    ceiling = ceilings["matmul_tflops"][work["dtype"]]
    lines = [
        f"{machine['device']}, torch {machine['torch']}: batch {work['batch']}, {work['num_heads']} heads "
        f"({work['kv_heads']} of keys) of {work['head_dim']}, {work['dtype']}, causal",
        f"measured ceilings: matmul {ceiling:.1f} TFLOP/s, copy {ceilings['copy_gb_per_s']:.0f} GB/s",
        "",
    ]
    halves = ("forward", "backward")
    rows = [["", "sequence", *(head for half in halves for head in (f"{half} ms", "TFLOP/s", "of matmul"))]]
    for row in result["kernels"]:
        rows.append([row["kernel"], str(row["seq_length"])])
        for half in halves:
            rate = row[f"{half}_tflops"]
            rows[-1] += [f"{row[f'{half}_seconds'] * 1e3:.3f}", f"{rate:.1f}", f"{rate / ceiling:.1%}"]
    lines += [
        *aligned(rows),
        "",
        f"compute of {result['ranks']} ranks, {work['seq_length']} positions each, forward + backward, no traffic;",
        "share: scaled_dot_product_attention of the whole sequence on this device, divided by the ranks",
    ]
    for name, step in result["simulated"].items():
        lines.append(f"{name:12}slowest rank {step['slowest_seconds'] * 1e3:9.2f} ms {step['tflops']:9.1f} TFLOP/s")
    for name, found in result["simulated_ratios"].items():
        lines.append(f"{name:24}{found['ratio']:8.3f}  by pairs {found['limit']:.3f}")
    return "\n".join([*lines, *(f"skipped: {label}: {reason}" for label, reason in result["skipped"].items())])
