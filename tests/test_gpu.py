"""The whole run on one GPU: NCCL, bfloat16, sharded weights, a checkpoint and its resume."""

import pytest
import torch

from tests.pretraining import TINY
from tests.starts import ended, torchrun
from train.callbacks.metrics import METRICS, read_metrics


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize(
    "attention",
    [
        "--context-parallel-method striped",
        pytest.param("--context-parallel-method allgather", marks=pytest.mark.slow),
        "--model-type transnormer --num-query-groups none",
        pytest.param(
            "--model-type linear_transformer --num-query-groups none", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_learns_saves_and_resumes_on_a_gpu(attention, tmp_path):
    pytest.importorskip("tomli_w", reason="a run that is kept writes its configuration")
    save = tmp_path / "run"
    command = [*torchrun(1), "pretrain_gpt.py", *TINY]
    command += ["--mock-data", "--vocab-size", "512", "--device", "cuda"]  # which need torch alone
    command += ["--bf16", *attention.split(), "--train-iters", "20", "--save", str(save)]
    for stop in ("10", "20"):
        process = ended(
            [*command, "--load", str(save), "--exit-interval", stop], OMP_NUM_THREADS="1"
        )
        assert process.returncode == 0, process.stderr
    records = read_metrics(save / METRICS)
    assert [record["iteration"] for record in records] == list(range(1, 21))
    assert records[-1]["lm_loss"] < records[0]["lm_loss"] - 0.2
