"""Hold the memory that a dry run predicts against that of real processes: a step of every kind of model on the CPU.

Each configuration of ``CASES`` runs on 1, 4 or 8 processes of gloo; what counts is the process that takes most.
Measured are the bytes of weights and optimizer that lie there before the second step, and what torch's profiler sees
that step allocate at its peak; predicted is ``planner.rehearsal``, which starts no process.

    python -m bench.fits --json bench/results/fits-NAME.jsonl
    python -m bench.fits --only dit
"""

import statistics
from itertools import accumulate
from typing import Any

import torch

import pretrain_dit
import pretrain_gpt
from bench.memory import allocations
from bench.rounds import add_json, keep
from parallel.mesh import distributed_mesh
from planner.rehearsal import rehearse
from runtime.errors import UserError
from runtime.machine import describe
from runtime.ranks import run_ranks
from tools.arguments import one_line_errors, parser_for, run_command
from tools.fit import parsed
from train.assemble import build_runner
from train.config.entries import Config
from train.ema import Ema
from train.optim import build_optimizer

SHAPE = "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --micro-batch-size 1 --device cpu "
TEXT = SHAPE + "--vocab-size 1024 --seq-length 1024 --model-type "
LATENTS = SHAPE + "--latent-shape 4 64 64 --num-classes 10 --ema-decay 0.99 "
LLAMA, GPT, NORM = TEXT + "llama ", TEXT + "gpt --max-position-embeddings 1024 ", TEXT + "transnormer "
LINEAR, HYBRID = TEXT + "linear_transformer ", NORM + "--softmax-every 4 "
CHUNKS = " --loss-chunk-size 256 --ffn-chunk-size 256"
CP, TP, PP = "--context-parallel-size ", "--tensor-model-parallel-size ", "--pipeline-model-parallel-size "
BY, SHARDING, AGAIN = " --context-parallel-method ", "--data-parallel-sharding-strategy ", " --recompute-granularity "
PACKED = " --reset-attention-mask --reset-position-ids"
CASES: dict[str, tuple[int, str]] = {
    "llama": (1, LLAMA),
    "llama, attention_boundary, chunks": (1, LLAMA + AGAIN + "attention_boundary" + CHUNKS),
    "llama, full, chunks": (1, LLAMA + AGAIN + "full" + CHUNKS),
    "gpt": (1, GPT),
    "transnormer": (1, NORM),
    "linear_transformer": (1, LINEAR),
    "hybrid": (1, HYBRID),
    "dit": (1, LATENTS),
    "llama, zigzag 4": (4, LLAMA + CP + "4" + BY + "zigzag"),
    "llama, teams of 2": (4, LLAMA + CP + "4" + BY + "wallfacer --context-parallel-team-size 2"),
    "llama, exchange 4, full, chunks": (4, LLAMA + CP + "4" + BY + "exchange" + PACKED + AGAIN + "full" + CHUNKS),
    "gpt, tensor 2 x striped 2": (4, GPT + TP + "2 " + CP + "2"),
    "gpt, pipeline 2 x data 2": (4, GPT + PP + "2 --global-batch-size 8"),
    "transnormer, lasp 4": (4, NORM + CP + "4" + BY + "lasp"),
    "linear_transformer, lasp2 4, full": (4, LINEAR + CP + "4" + BY + "lasp2" + AGAIN + "full"),
    "hybrid, lasp 4": (4, HYBRID + "--hybrid-softmax-layout zigzag " + CP + "4" + BY + "lasp"),
    "dit, ring 4": (4, LATENTS + CP + "4"),
    "llama, zigzag 8, zero3": (8, LLAMA + SHARDING + "zero3 " + CP + "8" + BY + "zigzag"),
    "llama, tensor 2 x context 2 x data 2, zero1": (
        8,
        LLAMA + "--global-batch-size 4 " + SHARDING + "zero1 " + TP + "2 " + CP + "2",
    ),
    "dit, ulysses 4 x data 2": (8, LATENTS + CP + "4" + BY + "ulysses"),
}
"""Processes and flags by name."""


def configured(flags: str) -> tuple[Any, Any]:
    """Return a case's configuration, and what builds it."""
    config = parsed(flags.split())
    return config, (pretrain_gpt if isinstance(config, Config) else pretrain_dit).resolve


def measured(rank: int, world_size: int, flags: str) -> int:
    """Return the bytes of this rank at the peak of a real step, the second; collective."""
    config, resolve = configured(flags)
    with distributed_mesh(config.mesh) as mesh:
        run = resolve(config, mesh)
        objective, parts = run.objective, run.parts
        optimizer = build_optimizer(config.optimizer, *parts)
        averaged = getattr(getattr(config, "ema", None), "ema_decay", None)
        averages = Ema(averaged, parts).weights.values() if averaged else ()
        runner = build_runner(run)
        size, count = config.train.micro_batch_size, config.train.micro_batches(mesh.dp.size())
        batches = [objective.local(objective.blank(size)) for _ in range(count)]
        runner.forward_backward(batches, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        held: list[Any] = [*averages, *(p for part in parts for p in part.parameters())]
        held += [x for state in optimizer.state.values() for x in state.values()]
        there = sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in held)
        peaks = []
        for _ in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
                runner.forward_backward(batches, 1)
            optimizer.zero_grad(set_to_none=True)
            peaks.append(max(accumulate(allocations(found))))
    return there + min(peaks)  # gloo's workers let go of a tensor some time after they have sent it


def compare(processes: int, flags: str) -> dict[str, Any]:
    """Return predicted and measured bytes of the process that takes most, and the prediction's relative error."""
    config, resolve = configured(flags)
    stages = config.mesh.pipeline_model_parallel_size
    ranks = {*range(0, processes, processes // stages), processes - 1}
    predicted = {rank: rehearse(config, resolve, rank, processes, per_node=processes) for rank in sorted(ranks)}
    real = run_ranks(measured, processes, flags)
    most = max(predicted.values(), key=lambda one: one.bytes)
    return {
        "processes": processes,
        "flags": flags,
        "predicted_bytes": most.bytes,
        "measured_bytes": max(real),
        "error": most.bytes / max(real) - 1,
        "by_cause": most.memory,
    }


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.fits", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    add_json(parser)
    args = parser.parse_args(argv)
    cases, rows = {name: case for name, case in CASES.items() if args.only in name}, {}
    if not cases:
        raise UserError(f"--only is {args.only!r}, which no case has in its name; there are: {'; '.join(CASES)}")
    for name, case in cases.items():
        row = rows[name] = compare(*case)
        print(
            f"{name:44} {row['processes']} {row['predicted_bytes'] / 1e6:9.2f} MB predicted "
            f"{row['measured_bytes'] / 1e6:9.2f} measured {row['error']:+7.1%}",
            flush=True,
        )
    errors = [abs(row["error"]) for row in rows.values()]
    print(f"{len(rows)} configurations: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    keep(args, {"benchmark": "memory predicted against measured", "machine": describe("cpu"), "cases": rows})


if __name__ == "__main__":
    run_command(main)
