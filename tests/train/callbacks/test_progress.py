"""The lines that a run prints as it goes on."""

import io
from contextlib import redirect_stdout

import pytest
import torch

from parallel.context import context_parallel
from runtime.ranks import run_ranks
from tests.train.callbacks.test_metrics import record
from tests.train.runs import run_with, settings
from train.callbacks.progress import COLUMNS, ProgressReport, machine_line, progress_line
from train.objectives.diffusion import Denoising
from train.objectives.language import NextToken


def test_a_line_has_the_means_since_the_last_one():
    assert progress_line(NextToken, [record(2), record(4)], 50, 65.4).split(" | ") == [
        "iteration 4/50",
        "loss 3.0000",
        "grad norm 2",
        "lr 4.00e-03",
        "300 ms",
        "3333 tokens/s",
        "1:05 left",
    ]
    assert machine_line([record(2), record(4)], "process") == (
        "per process: 250 GFLOP/s, MFU 12.5%, 1.50 GB of memory at most"
    )
    assert machine_line([record(2, tflops_per_gpu=431.2)], "GPU").startswith(
        "per GPU: 431 TFLOP/s, MFU 12.5%"
    )


def test_skipped_iterations_are_left_out_of_the_loss_and_a_diffusion_run_has_samples():
    nan = float("nan")
    line = progress_line(
        NextToken, [record(1), record(2, lm_loss=nan, grad_norm=nan), record(4)], 50, 0.0
    )
    assert "| loss 5.0000 | grad norm 2 |" in line
    assert "| 1 skipped |" in line
    records = [record(i, diffusion_loss=0.5 * i, samples_per_second=8.0 * i) for i in (1, 2)]
    for each in records:
        del each["lm_loss"]
    line = progress_line(Denoising, records, 9, 60.0)
    assert "| loss 0.7500 |" in line
    assert "| 13.33 samples/s |" in line, "by time, as other rates"
    assert "tokens" not in line


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "lm_loss": 11.98765,
            "grad_norm": 1234567.8,
            "iteration_time_ms": 110000.0,
            "tokens_per_second": 12345678.0,
        },
        {
            "iteration": 9_999_999,
            "iteration_time_ms": 1e7,
            "tokens_per_second": 3.21e10,
            "grad_norm": float("inf"),
        },
        {"iteration": 10**9, "lm_loss": 1e6, "grad_norm": float("nan"), "learning_rate": 1e-30},
    ],
)
@pytest.mark.parametrize("left", [0.0, 1.2e7, float("inf")])
def test_no_line_is_wider_than_a_window(more, left):
    last = record(12345) | more
    line = progress_line(NextToken, [last], 10 * last["iteration"], left)
    assert len(line) <= COLUMNS
    assert line.startswith(f"iteration {last['iteration']}/")
    assert line.endswith(" left")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (3599.9, "1:00:00"), (3 * 86400 + 7260.0, "3d 2:01"), (1e10, "over 30 years")],
)
def test_time_left_says_what_matters_of_it(seconds, text):
    assert progress_line(NextToken, [record(1)], 2, seconds).endswith(f"| {text} left")


def test_the_first_iteration_of_a_run_has_a_line_and_every_tenth_and_the_last():
    """A resumed run's first one too.

    Time left goes by the iterations after the first, whose time is none of theirs.
    """
    objective = NextToken(context_parallel("ring", seq_len=8), torch.device("cpu"))
    report = ProgressReport(None, objective, train_iters=34, log_interval=10, device_type="cuda")
    printed = {}
    for i in range(7, 35):
        now = 5000.0 + 2.0 * (i - 7)
        printed[i] = report.lines(
            record(i) | {"iteration_time_ms": 90_000.0 if i == 7 else 2000.0}, now, last=i == 34
        )
    assert {i: len(texts) for i, texts in printed.items() if texts} == {
        7: 1,
        10: 2,
        20: 1,
        30: 1,
        34: 2,
    }
    assert printed[7][0].endswith("| 40:30 left"), "27 iterations like the first"
    assert printed[10][0].endswith("| 0:48 left")
    assert printed[34][0].startswith("iteration 34/34")
    assert "left" not in printed[34][0]
    assert [printed[i][1].split(":")[0] for i in (10, 34)] == ["per GPU", "per GPU"]


def said(rank, world_size, folder):
    output = io.StringIO()
    with redirect_stdout(output):
        run_with(rank, world_size, settings(train_iters=3, eval_iters=0), folder)
    return output.getvalue().splitlines()


def test_a_run_on_a_cpu_speaks_of_processes_and_its_first_rank_alone_speaks(tmp_path):
    first, *others = run_ranks(said, 2, tmp_path / "run")
    kinds = [
        line.split(" ")[0] + " " + line.split(" ")[1].split("/")[0] for line in first[2:]
    ]  # after those on the run and its kernel
    assert kinds[:3] == ["iteration 1", "iteration 3", "per process:"]
    assert others == [[]]
