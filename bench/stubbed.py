"""Train on GPUs that are not there (``testing.cuda_stub``): which configurations end in an error, and their memory.

    make cuda-stub
    make cuda-stub ARGS="--only ulysses"

Each of ``CASES`` runs four steps by its entry on 1, 2 or 4 stubbed GPUs. It prints the most bytes that torch's CUDA
allocator gave to a process beside what ``tools.plan --fits`` predicts, and of the last step of the rank that has most
of each: kernels launched, times that the host waited for the device, copies to the host. Nothing is computed, so that
losses mean nothing, and neither does any time. Exit status 1 where a run ends in an error, or where memory is farther
than 5 % from the prediction.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import MeasureError
from bench.gpu_check import RESULTS, ended
from bench.packing import lognormal
from data.latents.writer import write_latents
from data.text.indexed import id_type, write_index
from data.tokenizer import load_tokenizer, train_tokenizer
from parallel.context.methods.registry import METHODS
from runtime.errors import UserError
from runtime.machine import describe
from testing.cuda_stub.__main__ import check_machine
from tools.arguments import one_line_errors, parser_for, run_command
from tools.plan import plan
from tools.report import read_records, write_records

MOST_ERROR = 0.05
LIMIT = 300.0
CLUSTER = "configs/clusters/h100_pod.toml"
LATENT = (4, 128, 128)
SHAPE = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --micro-batch-size 1 --device cuda --bf16 "
TEXT = SHAPE + "--mock-data --vocab-size 32000 --seq-length 16384 --model-type "
LLAMA, NORM, LINEAR = TEXT + "llama ", TEXT + "transnormer ", TEXT + "linear_transformer "
DIT = SHAPE + "--latent-shape 4 128 128 --num-classes 10 --ema-decay 0.99 --data-path {folder}/latents "
CP, TP, PP = "--context-parallel-size ", "--tensor-model-parallel-size ", "--pipeline-model-parallel-size "
BY, SHARDING, AGAIN = " --context-parallel-method ", "--data-parallel-sharding-strategy ", "--recompute-granularity "
DATA = "--data-path {folder}/text --tokenizer-model {folder}/text.model --split 1,0,0 --seq-length 16384 "
PACKED = SHAPE + DATA + "--reset-attention-mask --reset-position-ids "
TWO = "--global-batch-size 2 "
CHUNKS = " --loss-chunk-size 2048 --ffn-chunk-size 2048"
BUBBLES = SHARDING + "zero1 --pipeline-schedule InterleavedZeroBubble "
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2 "
CASES: dict[str, tuple[int, str]] = {
    "llama": (1, LLAMA),
    "llama, 8 layers of 2048": (1, LLAMA + "--num-layers 8 --hidden-size 2048 --num-attention-heads 16"),
    "llama, packed": (1, PACKED),
    "gpt": (1, TEXT + "gpt --max-position-embeddings 16384"),
    "transnormer": (1, NORM),
    "linear_transformer": (1, LINEAR),
    "hybrid": (1, NORM + "--softmax-every 4"),
    "dit": (1, DIT),
    **{f"llama, {again}": (1, LLAMA + AGAIN + again) for again in ("full", "selective", "attention_boundary")},
    "llama, chunks": (1, LLAMA + CHUNKS),
    "llama, full, chunks": (1, LLAMA + AGAIN + "full" + CHUNKS),
    "llama, full, offload": (1, LLAMA + AGAIN + "full --recompute-offload"),
    "llama, attention_boundary, offload": (1, LLAMA + AGAIN + "attention_boundary --recompute-offload"),
    "llama, moments on the host": (1, LLAMA + "--optimizer-cpu-offload"),
    "llama, compile": (1, LLAMA + "--compile"),
    "llama, fp8": (1, LLAMA + "--fp8-format hybrid"),
    "llama, resumed": (1, LLAMA + "--save {folder}/run --load {folder}/run --save-interval 2"),
    **{f"llama, {name} 2": (2, f"{LLAMA}{CP}2{BY}{name}") for name in METHODS},
    "transnormer, lasp 2": (2, NORM + CP + "2" + BY + "lasp"),
    "linear_transformer, lasp2 2": (2, LINEAR + CP + "2" + BY + "lasp2"),
    "dit, ring 2": (2, DIT + CP + "2" + BY + "ring"),
    "llama, tensor 2": (2, LLAMA + TP + "2"),
    "llama, pipeline 2, 1F1B": (2, LLAMA + PP + "2 --global-batch-size 4"),
    "llama, pipeline 2, interleaved": (
        2,
        LLAMA + PP + "2 --pipeline-schedule Interleaved1F1B --global-batch-size 8 " + VIRTUAL,
    ),
    "llama, pipeline 2, zero bubble": (2, LLAMA + PP + "2 --global-batch-size 4 " + BUBBLES + VIRTUAL),
    "llama, pipeline 4, 1F1B": (4, LLAMA + PP + "4 --global-batch-size 8"),
    "llama, pipeline 4, zero bubble": (4, LLAMA + PP + "4 --global-batch-size 8 " + BUBBLES),
    "llama, pipeline 2 x zigzag 2, zero bubble": (
        4,
        LLAMA + PP + "2 --global-batch-size 8 " + BUBBLES + VIRTUAL + CP + "2" + BY + "zigzag",
    ),
    **{f"llama, {name} 2": (2, LLAMA + TWO + SHARDING + name) for name in ("ddp", "zero1", "zero2", "zero3")},
    "llama, zero3 2, resumed": (2, LLAMA + TWO + "--save {folder}/run --load {folder}/run --save-interval 2"),
    **{f"llama, {name} 2, packed": (2, f"{PACKED}{CP}2{BY}{name}") for name in METHODS},
    **{f"llama, {name} 4": (4, f"{LLAMA}{CP}4{BY}{name}") for name in METHODS},
    "llama, wallfacer 4, teams of 2": (4, LLAMA + CP + "4" + BY + "wallfacer --context-parallel-team-size 2"),
    "llama, tensor 2 x zigzag 2": (4, LLAMA + TP + "2 " + CP + "2" + BY + "zigzag"),
}
"""Processes and flags by name."""


def run(processes: int, flags: Sequence[str], program: str, folder: Path) -> dict[str, Any]:
    """Train on stubbed GPUs; return the most of what the ranks counted, or why it ``failed``."""
    stub = [sys.executable, "-m", "testing.cuda_stub", "--gpus", str(processes), "--", sys.executable]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    told = folder / "told"
    told.mkdir(exist_ok=True)
    command = [*stub, *launcher, "-m", "testing.cuda_stub.worker", str(told), program, *flags]
    try:
        status, printed = ended(command, LIMIT, subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {LIMIT:.0f} s"}
    found = [read_records(path) for path in sorted(told.iterdir())]
    if status or len(found) != processes:
        said = [line.strip() for line in printed.splitlines() if "rror" in line]
        return {"failed": (said or [f"ended with status {status}, {len(found)} of {processes} ranks counted"])[0]}
    return {name: max(one[name] for one in found) for name in found[0]}


def predicted(processes: int, flags: Sequence[str]) -> int:
    """Return the bytes that ``tools.plan --fits`` predicts."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        plan(["--fits", "--json", "--cluster", CLUSTER, "--world-size", str(processes), *flags])
    return int(json.loads(out.getvalue())["memory_bytes"])


def write_data(folder: Path, flags: str) -> None:
    """Write what a case reads: latents, or documents of log-normal lengths and a tokenizer; --mock-data needs none."""
    draw = np.random.default_rng(0)
    if "latents" in flags:
        write_latents(folder / "latents", [(draw.standard_normal((32, *LATENT), np.float32), np.arange(32) % 10)])
    if "text" in flags:
        tokenizer = load_tokenizer(train_tokenizer([Path(__file__).read_text()], folder / "text", 400))
        lengths = np.array([lognormal(draw, 16384) for _ in range(200)], np.int32)
        ids = draw.integers(300, 400, lengths.sum()).astype(id_type(tokenizer.vocab_size))
        ids[lengths.cumsum() - 1] = tokenizer.eod
        ids.tofile(folder / "text.bin")
        write_index(folder / "text.idx", ids.dtype, lengths)


def measure(processes: int, flags: str) -> dict[str, Any]:
    """Run a case, twice if it resumes, and predict it."""
    with tempfile.TemporaryDirectory() as name:
        folder, row = Path(name), {"processes": processes, "flags": flags}
        text, again = flags.replace("{folder}", name).split(), "--load" in flags
        write_data(folder, flags)
        program = "pretrain_dit.py" if "latents" in flags else "pretrain_gpt.py"
        more = ["--eval-iters", "0", *([] if again else ["--save", "none", "--save-interval", "none"])]
        for last in ("4", "8")[: 1 + again]:
            row |= run(processes, [*text, *more, "--train-iters", last], program, folder)
        try:
            return row | {"predicted_bytes": predicted(processes, text)}
        except Exception as error:  # a bug in the prediction of one case is told, and the others run
            return {"failed": f"the prediction: {type(error).__name__}: {error}"} | row


def verdict(row: dict[str, Any]) -> str:
    """Say what is wrong with a case; an empty string if nothing is."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    off = row["predicted_bytes"] / row["bytes"] - 1
    return "" if abs(off) <= MOST_ERROR else f"the prediction is {off:+.1%} off"


def line(name: str, row: dict[str, Any]) -> str:
    """Return a case's line of the table."""
    wrong = verdict(row)
    if "failed" in row:
        return f"{name:36} {row['processes']} {wrong}"
    return (
        f"{name:36} {row['processes']} {row['bytes'] / 1e9:7.3f} GB {row['predicted_bytes'] / 1e9:7.3f} predicted "
        f"{row['predicted_bytes'] / row['bytes'] - 1:+6.1%} {row['launches']:6} launches {row['waits']:3} waits "
        f"{row['copies']:3} copies {wrong}".rstrip()
    )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.stubbed", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: bench/results, or no file with --only")
    args = parser.parse_args(argv)
    folder = args.output or (None if args.only else RESULTS)
    check_machine()
    machine = describe("cpu")
    cases, rows = {name: case for name, case in CASES.items() if args.only in name}, {}
    if find_spec("torchao") is None and "llama, fp8" in cases:
        del cases["llama, fp8"]
        print("llama, fp8: left out, torchao is not installed")
    if not cases:
        raise UserError(f"--only is {args.only!r}, which no case has in its name; there are: {'; '.join(CASES)}")
    for name, case in cases.items():
        start = time.monotonic()
        rows[name] = measure(*case)
        print(f"{line(name, rows[name])} ({time.monotonic() - start:.0f} s)", flush=True)
        if folder:
            found = {"benchmark": "stubbed GPUs: nothing is computed", "machine": machine, "cases": rows}
            write_records(folder / "cuda-stub.jsonl", found)
    if bad := [name for name, row in rows.items() if verdict(row)]:
        raise MeasureError(f"{len(bad)} of {len(rows)} configurations are not as they must be: {'; '.join(bad)}")


if __name__ == "__main__":
    run_command(main)
