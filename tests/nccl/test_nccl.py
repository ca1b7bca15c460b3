"""Steps of the check of several GPUs, on gloo; wrong meshes, hangs and missing results are told."""

import re
from pathlib import Path

import pytest
import torch

import tests.nccl.__main__ as nccl
from kernels.attention import select_backend
from parallel.context import LINEAR_METHODS, METHODS
from runtime.errors import UserError
from tests.nccl.rank import result
from tests.parity.cases import reference_of
from tools.common.cases import Case
from tools.common.report import read_records
from tools.parity.own import merged
from tools.parity.rank import RankResult
from train.config.language import parse_args, validate

ROWS = [("llama", Case(cp=2, method=name)) for name in ("ring", "zigzag")]


def found(gradient=0.25):
    records = [
        {"iteration": n, "lm_loss": 8.0, "grad_norm": 1.0, "iteration_time_ms": 1.0} for n in (1, 2)
    ]
    tensors = {
        "initial": torch.ones(2),
        "gradients": torch.tensor([gradient]),
        "final": torch.ones(2),
    }
    return RankResult(records, {name: {"weight": value} for name, value in tensors.items()})


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.setattr(nccl, "prepare", lambda *_, **__: None)


def test_too_few_gpus_or_too_many_processes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert nccl.main(["--output", str(tmp_path)]) == 1
    assert nccl.main(["--device", "cpu", "--nproc", "9", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "error: nccl-check needs 2 to 8 CUDA GPUs, and torch sees 1 here; nothing was written\n"
        "error: nproc is 9; it must be from 2 to 8\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_data")
def test_a_mesh_that_differs_and_one_that_fails_are_named(tmp_path, monkeypatch):
    def trained(processes, cases, folder):
        runs = [merged([found()]), merged([found(0.25 + 6e-7)]), "RuntimeError: a hang"]
        return dict(zip(cases, runs if processes > 1 else runs[:1], strict=True))

    monkeypatch.setattr(nccl, "trained", trained)
    rows = [*ROWS, ("llama", Case(cp=2, method="striped"))]
    outcome = nccl.compared(2, "cpu", tmp_path, rows)
    assert [re.split(", zero3: ", words)[0] for words in outcome["wrong"]] == [
        "llama, cp 2, zigzag",
        "llama, cp 2, striped",
    ]
    assert outcome["wrong"][1].endswith(": RuntimeError: a hang")
    assert outcome["gradients"] == pytest.approx(6e-7, rel=0.1)
    assert len(nccl.compared(2, "cuda", tmp_path, rows)["wrong"]) == 1  # ten times the bound


def test_after_a_failure_the_other_cases_are_trained(tmp_path, monkeypatch):
    launches = []

    def launched(processes, *command):
        launches.append(names := [*nccl.json.loads((tmp_path / nccl.CASES).read_text())])
        for name in names:
            for rank in range(processes - (name == "bad")):
                torch.save(found(), result(tmp_path, name, rank))
            if name == "bad":
                return (
                    1,
                    "[rank1]: torch.distributed.DistBackendError: NCCL error\nChildFailedError: \n",
                )
        return 0, ""

    monkeypatch.setattr(nccl, "launched", launched)
    runs = nccl.trained(2, {name: [] for name in ("one", "bad", "two")}, tmp_path)
    assert launches == [["one", "bad", "two"], ["two"]]
    assert runs["bad"] == "torch.distributed.DistBackendError: NCCL error"
    assert not isinstance(runs["one"], str)
    assert not isinstance(runs["two"], str)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("struck", [False, True])
def test_a_rank_that_is_not_killed_or_not_named_is_wrong(struck, tmp_path, monkeypatch):
    def launched(processes, *command):
        if struck:
            (tmp_path / "struck").touch()
        return 1, "error: no such flag\n"

    monkeypatch.setenv(nccl.PLAN, "")
    monkeypatch.setattr(nccl, "launched", launched)
    unstruck = "no rank came to the step where it is killed: error: no such flag"
    assert nccl.killed(2, "cpu", tmp_path)["wrong"] == [
        "the killed rank 1 is not named" if struck else unstruck
    ]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_flags_suit_the_device(device):
    rows = [("llama", Case(cp=2, method=method)) for method in METHODS]
    rows += [("transnormer", Case(cp=2, method=method)) for method in LINEAR_METHODS]
    for kind, case in (
        *rows,
        ("llama", reference_of("llama")),
        ("transnormer", reference_of("transnormer")),
    ):
        config = parse_args(nccl.flags_of(kind, case, Path("data"), 2, device))
        validate(config, case.ranks)
        if kind == "llama" and case.method != "none":
            select_backend(config.context.attention_backend, config.mesh.device_type, torch.float32)
    with pytest.raises(UserError, match="takes bfloat16"):
        select_backend("auto", "cuda", torch.float32)


@pytest.mark.slow
def test_every_step_runs_under_gloo(tmp_path, capsys):
    assert nccl.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    ends = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" s)")]
    assert [line.split(",")[0] for line in ends] == [
        f"{step.__name__}: right" for step in nccl.STEPS
    ]
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-nccl-check-2.jsonl")
    steps = read_records(path)["steps"]
    assert steps["methods"]["cases"] == len(METHODS) + len(LINEAR_METHODS)
    assert all(rate > 0 for row in steps["links"]["gb_per_s"] for rate in row.values())
    assert steps["killed"]["seconds_to_end"] < nccl.SECONDS_TO_END["cpu"]
