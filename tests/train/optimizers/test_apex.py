"""AdamW by apex's kernel, of which a stand-in runs on the CPU.

It is torch's to the bit on every sharding, and resumed.
"""

import json
import sys
from typing import get_args

import pytest
import torch
from torch import nn

from parallel.data import DataParallelConfig, Strategy, finish_gradients, set_gradient_sync
from parallel.mesh import distributed_mesh
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel import tiny
from tests.parallel.split import build, config, mesh_config, own_batch
from tests.pretraining import flags_of, on_rank
from tests.train.optimizers import apex_stub
from tests.train.optimizers.test_host import everything, model, steps
from train.callbacks.metrics import METRICS
from train.checkpoint.api import load_checkpoint
from train.checkpoint.manifest import checkpoint_folder
from train.objectives.language import NextToken
from train.optimizers import apex
from train.optimizers.adamw import Backend
from train.optimizers.config import OptimizerConfig, build_optimizer

STRATEGIES = get_args(Strategy)
TORCH, APEX = (OptimizerConfig(lr=1e-2, optimizer_backend=backend) for backend in get_args(Backend))
ORDERS = ((TORCH, TORCH), (APEX, APEX), (TORCH, APEX), (APEX, TORCH))
"""Backends of the steps before a checkpoint and after it."""


@pytest.fixture
def stub(monkeypatch):
    """Have apex's modules for a test, with torch's arithmetic."""
    modules = dict(sys.modules)
    monkeypatch.setattr(apex, "EMULATED", True)
    apex_stub.install(modules=modules)
    for name in ("apex", "apex.multi_tensor_apply", "amp_C"):
        monkeypatch.setitem(sys.modules, name, modules[name])
    apex_stub.CALLS.clear()
    return monkeypatch


def trained(chosen):
    weights = model()
    optimizer = build_optimizer(chosen, weights)
    steps(weights, optimizer)
    return everything(weights, optimizer)


def test_weights_and_state_are_torchs_to_the_bit(stub):
    """Matrices decay, vectors do not; one is empty, one has no gradient in the second step."""
    actual, want = trained(APEX), trained(TORCH)
    assert all(torch.equal(a, b) for a, b in zip(actual, want, strict=True))
    # In the third step a parameter counts one step less than the others of its group.
    assert apex_stub.CALLS == {"launches": 2 + 2 + 3, "tensors": 5 + 4 + 5}


def test_the_kernels_own_arithmetic_is_adamw_and_its_other_mode_is_not(stub):
    stub.setattr(sys.modules["amp_C"], "multi_tensor_adam", apex_stub.as_apex)
    want = torch.cat([x.flatten() for x in trained(TORCH)])
    start = torch.cat([x.flatten() for x in model()])
    for mode, min_error, max_error in ((1, 0.0, 1e-6), (0, 1e-3, 1.0)):
        stub.setattr(apex, "ADAM_W", mode)
        actual = torch.cat([x.flatten() for x in trained(APEX)])
        error = (actual - want)[: len(start)].norm() / (want[: len(start)] - start).norm()
        assert min_error <= error < max_error, (mode, error)


def one_step(mesh, parts, strategy):
    model, cp = parts
    tokens, labels = own_batch(mesh, cp)
    set_gradient_sync(model, True, strategy)
    NextToken(cp, mesh.device).loss_sum(model, {"tokens": tokens, "labels": labels}).backward()
    finish_gradients(model, mesh.dp_cp, strategy)


def ends_of(rank, world_size, folder, strategy, tp):
    """Say that weights and state end alike, and count apex's launches.

    Kernels take turns at a checkpoint in any way.
    """
    apex_stub.install()
    ends = []
    with distributed_mesh(mesh_config(tp)) as mesh:
        for number, order in enumerate(ORDERS):
            for behind, chosen in enumerate(order):
                parts = build(
                    mesh,
                    config(),
                    data_parallel=DataParallelConfig(data_parallel_sharding_strategy=strategy),
                )
                optimizer = build_optimizer(chosen, parts[0])
                path = checkpoint_folder(folder / str(number), 2)
                if behind:
                    load_checkpoint(path, parts[0], optimizer, tiny.ARCHITECTURE)
                for _ in range(1 if behind else 2):
                    one_step(mesh, parts, strategy)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                if not behind:
                    tiny.save(folder / str(number), 2, parts[0], optimizer)
            ends.append(tiny.whole_tensors(parts[0], optimizer))
    assert all(end["embedding.weight/step"] == 3 for end in ends)
    return all(tiny.equal(end, ends[0]) for end in ends[1:]), apex_stub.CALLS["launches"]


@pytest.mark.parametrize(
    ("strategy", "tp"),
    [
        *(
            pytest.param(strategy, 1, marks=() if strategy == "zero3" else pytest.mark.slow)
            for strategy in STRATEGIES
        ),
        pytest.param("zero3", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_every_sharding_ends_with_torchs_bits_and_goes_on_from_its_checkpoints(
    strategy, tp, tmp_path
):
    assert run_ranks(ends_of, 2, tmp_path, strategy, tp) == [(True, 16)] * 2  # 8 steps of 2 groups


SHORT = ("--train-iters", "3", "--num-layers", "1", "--seq-length", "64")


def in_the_entry(rank, world_size, arguments):
    apex_stub.install()
    return on_rank(rank, world_size, arguments)


def test_a_run_is_torchs_and_goes_on_from_its_checkpoint(default_data, tmp_path):
    """Three iterations by torch, and one by it and two by apex around a checkpoint.

    They are equal in all but times.
    """
    records = []
    for name, starts in (
        ("torch", {"torch": []}),
        ("turns", {"torch": ["--exit-interval", "1"], "apex": ["--load", str(tmp_path / "turns")]}),
    ):
        save = str(tmp_path / name)
        for backend, more in starts.items():
            flags = flags_of(
                default_data, *SHORT, "--save", save, "--optimizer-backend", backend, *more
            )
            outputs = run_ranks(in_the_entry, 2, flags)
            assert [output.count("attention kernel: aten\n") for output in outputs] == [1, 0]
        lines = [json.loads(line) for line in (tmp_path / name / METRICS).read_text().splitlines()]
        records.append(
            [
                {key: line.get(key) for key in ("iteration", "lm_loss", "grad_norm")}
                for line in lines
            ]
        )
    assert [line["iteration"] for line in records[0] if line["lm_loss"]] == [1, 2, 3]
    assert records[1] == records[0]


APEX_ALONE = {"apex/__init__.py": "", "amp_C.py": ""}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "No module named 'amp_C'"),
        (APEX_ALONE, "apex.multi_tensor_apply"),
        (
            {"amp_C.py": "raise ImportError('amp_C.so: undefined symbol:\\n _ZN3c10')"},
            "undefined symbol",
        ),
    ],
)
def test_a_missing_kernel_is_refused_in_a_line(files, reason, tmp_path, monkeypatch):
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("apex", "apex.multi_tensor_apply", "amp_C"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UserError, match=rf"^optimizer_backend is apex, but .*{reason}") as no:
        build_optimizer(APEX, nn.Linear(1, 1))
    assert "\n" not in str(no.value)
    for module in ("apex", "apex.multi_tensor_apply", "amp_C"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def refused(rank, world_size, arguments):
    """The error of this rank, where the other one alone lacks the kernel."""
    apex_stub.install()
    if rank:
        del sys.modules["amp_C"]
    with pytest.raises(UserError) as error:
        on_rank(rank, world_size, arguments)
    return str(error.value)


def test_all_ranks_refuse_before_any_work(default_data, tmp_path):
    flags = flags_of(default_data, "--save", str(tmp_path / "run"), "--optimizer-backend", "apex")
    first, second = run_ranks(refused, 2, flags)
    assert first == second
    assert first.startswith("optimizer_backend is apex, but NVIDIA's apex")
    assert not (tmp_path / "run").exists()
