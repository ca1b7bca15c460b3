"""Train on GPUs that are not there: which configurations end in an error, and their memory.

    make cuda-stub
    make cuda-stub ARGS="--only ulysses"

Each case runs four steps by its entry on 1, 2 or 4 stubbed GPUs. It prints the most bytes that
torch's CUDA allocator gave to a process beside what ``tools.plan --fits`` predicts, and of the last
step of the rank that has most of each: kernels launched, times that the host waited for the device,
copies to the host. Nothing is computed, so that losses mean nothing, and neither does any time.
Exit status 1 where a run ends in an error, or where memory is farther than 5 % from the prediction.
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

from bench.harness import MeasureError
from bench.memory import command, lines_of
from bench.shapes import lognormal
from data.latents.writing import write_latents
from data.text.indexed import id_type, write_index
from data.tokenizer import load_tokenizer, train_tokenizer
from parallel.context.methods import METHODS
from runtime.machine import describe
from tests.cuda_stub.__main__ import check_machine
from tests.steps import RESULTS, ended
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.report import Column, Table, read_records, write_records
from tools.plan import plan

MOST_ERROR = 0.05
LIMIT = 300.0
CLUSTER = "configs/clusters/h100_pod.toml"
LATENT = (4, 128, 128)
SHAPE = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --micro-batch-size 1 --device "
    "cuda --bf16 "
)
TEXT = SHAPE + "--mock-data --vocab-size 32000 --seq-length 16384 --model-type "
DATA = (
    "--data-path {folder}/text --tokenizer-model {folder}/text.model --split 1,0,0 "
    "--seq-length "
    "16384 "
)
MODELS = {
    "llama": TEXT + "llama",
    "large": TEXT + "llama --num-layers 8 --hidden-size 2048 --num-attention-heads 16",
    "packed": SHAPE + DATA + "--reset-attention-mask --reset-position-ids",
    "gpt": TEXT + "gpt --max-position-embeddings 16384",
    "transnormer": TEXT + "transnormer",
    "linear_transformer": TEXT + "linear_transformer",
    "hybrid": TEXT + "transnormer --softmax-every 4",
    "dit": SHAPE
    + "--latent-shape 4 128 128 --num-classes 10 --ema-decay 0.99 --data-path {folder}/latents",
}
"""large has 8 layers of 2048, packed documents of drawn lengths."""
RESUMED = "--save {folder}/run --load {folder}/run --save-interval 2"
CHUNKS = "loss_chunk=2048 ffn_chunk=2048"


def _cases() -> str:
    """Return the cases, a line each."""
    lines = [*MODELS, *(f"llama {again}" for again in ("full", "selective", "attention_boundary"))]
    lines += [f"llama {CHUNKS}", f"llama full {CHUNKS}", "llama full --recompute-offload"]
    lines += [
        "llama attention_boundary --recompute-offload",
        "llama --optimizer-cpu-offload",
        *(f"llama --exp-avg-dtype {name} --exp-avg-sq-dtype {name}" for name in ("bf16", "int8")),
        "llama --optimizer-cpu-offload --exp-avg-dtype int8 --exp-avg-sq-dtype int8",
        "llama --optimizer muon",
        "llama --optimizer muon --exp-avg-dtype int8 --exp-avg-sq-dtype int8",
        "llama --compile",
    ]
    lines += ["llama --fp8-format hybrid", f"llama {RESUMED}"]
    lines += [f"{model} cp=2 {name}" for model in ("llama", "packed") for name in METHODS]
    lines += [
        "transnormer cp=2 lasp",
        "linear_transformer cp=2 lasp2",
        "dit cp=2 ring",
        "llama tp=2",
    ]
    lines += ["llama pp=2 batch=4", "llama pp=2 batch=8 virtual=2 Interleaved1F1B"]
    lines += ["llama pp=2 batch=4 virtual=2 InterleavedZeroBubble zero1", "llama pp=4 batch=8"]
    lines += ["llama pp=4 batch=8 InterleavedZeroBubble zero1"]
    lines += ["llama pp=2 cp=2 zigzag batch=8 virtual=2 InterleavedZeroBubble zero1"]
    lines += [f"llama dp=2 batch=2 {mode}" for mode in ("ddp", "zero1", "zero2", "zero3")]
    lines += [f"llama dp=2 batch=2 zero3 {RESUMED}", *(f"llama cp=4 {name}" for name in METHODS)]
    return "\n".join([*lines, "llama cp=4 wallfacer team=2", "llama tp=2 cp=2 zigzag"])


CASES = _cases()
COLUMNS: dict[str, Column] = {
    "case": "{name}",
    "processes": "{processes}",
    "GB": lambda row: f"{row['bytes'] / 1e9:.3f}",
    "predicted": lambda row: f"{row['predicted_bytes'] / 1e9:.3f}",
    "error": lambda row: f"{row['predicted_bytes'] / row['bytes'] - 1:+.1%}",
    "launches": "{launches}",
    "waits": "{waits}",
    "copies": "{copies}",
}


def run(processes: int, flags: Sequence[str], program: str, folder: Path) -> dict[str, Any]:
    """Train on stubbed GPUs; return the most of what the ranks counted, or why it ``failed``."""
    stub = [sys.executable, "-m", "tests.cuda_stub", "--gpus", str(processes), "--", sys.executable]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    counts_folder = folder / "told"
    counts_folder.mkdir(exist_ok=True)
    command = [
        *stub,
        *launcher,
        "-m",
        "tests.cuda_stub.worker",
        str(counts_folder),
        program,
        *flags,
    ]
    try:
        status, printed = ended(command, LIMIT, subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {LIMIT:.0f} s"}
    records = [read_records(path) for path in sorted(counts_folder.iterdir())]
    if status or len(records) != processes:
        errors = [line.strip() for line in printed.splitlines() if "rror" in line]
        return {
            "failed": (
                errors
                or [f"ended with status {status}, {len(records)} of {processes} ranks counted"]
            )[0]
        }
    return {name: max(record[name] for record in records) for name in records[0]}


def predicted(processes: int, flags: Sequence[str]) -> int:
    """Return the bytes that ``tools.plan --fits`` predicts."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        plan(["--fits", "--json", "--cluster", CLUSTER, "--world-size", str(processes), *flags])
    return int(json.loads(out.getvalue())["memory_bytes"])


def write_data(folder: Path, flags: str) -> None:
    """Write what a case reads: latents, or documents of log-normal lengths and a tokenizer.

    --mock-data needs none.
    """
    draw = np.random.default_rng(0)
    if "latents" in flags:
        write_latents(
            folder / "latents",
            [(draw.standard_normal((32, *LATENT), np.float32), np.arange(32) % 10)],
        )
    if "text" in flags:
        tokenizer = load_tokenizer(
            train_tokenizer([Path(__file__).read_text()], folder / "text", 400)
        )
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
        more = [
            "--eval-iters",
            "0",
            *([] if again else ["--save", "none", "--save-interval", "none"]),
        ]
        for last in ("4", "8")[: 1 + again]:
            row |= run(processes, [*text, *more, "--train-iters", last], program, folder)
        try:
            return row | {"predicted_bytes": predicted(processes, text)}
        except (
            Exception
        ) as error:  # a bug in the prediction of one case is told, and the others run
            return {"failed": f"the prediction: {type(error).__name__}: {error}"} | row


def verdict(row: dict[str, Any]) -> str:
    """Say what is wrong with a case; an empty string if nothing is."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    off = row["predicted_bytes"] / row["bytes"] - 1
    return "" if abs(off) <= MOST_ERROR else f"the prediction is {off:+.1%} off"


def line(name: str, row: dict[str, Any]) -> str:
    """Return what is printed of a case."""
    wrong = verdict(row)
    return (
        f"{name}: {wrong}"
        if "failed" in row
        else f"{Table(COLUMNS).line({'name': name, **row})} {wrong}".rstrip()
    )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m tests.cuda_stub.check", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/results, or no file with --only"
    )
    args = parser.parse_args(argv)
    folder = args.output or (None if args.only else RESULTS)
    check_machine()
    machine = describe("cpu")
    cases, rows = lines_of(CASES, args.only), dict[str, dict[str, Any]]()
    if find_spec("torchao") is None and (fp8 := "llama --fp8-format hybrid") in cases:
        cases.remove(fp8)
        print(f"{fp8}: left out, torchao is not installed")
    for name in cases:
        start = time.monotonic()
        rows[name] = measure(*command(name, MODELS))
        print(f"{line(name, rows[name])} ({time.monotonic() - start:.0f} s)", flush=True)
        if folder:
            all_records = {
                "benchmark": "stubbed GPUs: nothing is computed",
                "machine": machine,
                "cases": rows,
            }
            write_records(folder / "cuda-stub.jsonl", all_records)
    if bad := [name for name, row in rows.items() if verdict(row)]:
        raise MeasureError(
            f"{len(bad)} of {len(rows)} configurations are not as they must be: {'; '.join(bad)}"
        )


if __name__ == "__main__":
    run_command(main)
