"""An optimizer's planned bytes, FLOPs, memory and seconds, against its real plan and its step."""

import re
import shlex
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parallel import matrices
from parallel.mesh import distributed_mesh
from planner import optimizer_cost
from planner.cluster import FLOAT32, load_cluster
from planner.optimizer_cost import (
    StageGroup,
    optimizer_shape,
    stage_group,
    temporary_bytes,
    whole_matrix_seconds,
)
from planner.recorder import Recorder
from planner.rehearsal import fake_process_group
from planner.search import cost_inputs, predicted
from runtime.simulation import SIMULATED_DEVICE
from tests.planner.test_step_cost import COMPUTE, LATENCY, NETWORK
from tests.starts import ROOT
from train.config.language import parse_args
from train.optimizers.base import MatrixCost, OptimizerSpec
from train.optimizers.config import OptimizerConfig, build_optimizer
from train.optimizers.muon import orthogonalize
from train.tasks.language import LanguageTask

TINY = (
    "--mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 256 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 "
)
MUON = "--optimizer muon "
BY = "--data-parallel-sharding-strategy "
TENSOR = "--tensor-model-parallel-size 2 "
PIPELINE = "--pipeline-model-parallel-size 2 "
COPIES = "--num-distributed-optimizer-instances 2 "


def inputs_of(config, world_size):
    """Return the cost model's description of the optimizer, and the ranks of a stage."""
    _, plan, arrangement = cost_inputs(config, world_size, load_cluster("h100"), None)
    return arrangement.optimizer, stage_group(plan, arrangement)


@contextmanager
def built(config, rank, world_size, recording=nullcontext):
    """Build a rank's parts of the model and its optimizer, and be that rank within the block."""
    on_cpu = replace(config.mesh, device="cpu", distributed_backend="auto")
    with (
        fake_process_group(rank, world_size, world_size),
        distributed_mesh(on_cpu) as mesh,
        SIMULATED_DEVICE.set_to("cuda" if recording is not nullcontext else "cpu"),
    ):
        task = LanguageTask(config, mesh)
        with recording():
            parts = task.build_parts(initialize=False)
            optimizer = build_optimizer(config.optimizer, *parts, portable=True, mesh=mesh)
            yield parts, optimizer


LAYOUTS = {
    "zero3": (4, BY + "zero3"),
    "zero2, bfloat16": (4, BY + "zero2 --muon-fp32-matmul-prec low"),
    "zero1, context 2": (4, BY + "zero1 --context-parallel-size 2"),
    "ddp": (4, BY + "ddp"),
    "legacy_ddp, tensor 2": (4, TENSOR + BY + "legacy_ddp"),
    "tensor 2": (4, TENSOR),
    "copies": (4, COPIES),
    "pipeline 2, tensor 2, copies": (8, PIPELINE + TENSOR + COPIES),
    "one process": (1, ""),
}


def sent_bytes(matrices, group):
    """Return the bytes that all ranks send in a step, by the shares that the plan's time has."""
    return sum(cost.num_bytes for cost in matrices) * (group.gathered + group.scattered)


def real_and_planned(flags, world_size):
    """Return the bytes that all ranks of a stage send in a step, by the real plan and planned."""
    config = parse_args(shlex.split(f"{TINY} --device cpu {MUON} {flags}"))
    optimizer, group = inputs_of(config, world_size)
    total = 0
    for rank in range(group.ranks):
        with built(config, rank, world_size) as (_, real):
            total += real.sent_bytes
    return total, sent_bytes(optimizer.matrices, group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_are_those_of_the_real_plan(layout):
    """Which are those that ranks send: tests/train/optimizers/test_muon_meshes.py."""
    world_size, flags = LAYOUTS[layout]
    real, planned = real_and_planned(flags, world_size)
    assert planned == real
    assert (real > 0) == (world_size > 1)


def test_slices_of_unequal_sizes_and_copied_keys_count_roughly():
    for world_size, flags in ((3, "--global-batch-size 9"), (4, "--tensor-model-parallel-size 4")):
        real, planned = real_and_planned(flags, world_size)
        assert planned == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("precision", ["high", "low"])
def test_flops_and_temporaries_are_those_of_newton_schulz(shape, precision):
    config = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec=precision)
    cost = config.spec.matrix_cost(config, shape)
    assert cost.dtype == (torch.float32 if precision == "high" else torch.bfloat16)
    matrix = torch.zeros(shape, dtype=cost.dtype)
    with FlopCounterMode(display=False) as counter:
        orthogonalize(matrix, config.muon_num_ns_steps)
    assert counter.get_total_flops() == cost.flops
    recorder = Recorder(0, 1)
    with recorder.recording():
        matrix = torch.zeros(shape, dtype=cost.dtype)
        start = len(recorder.events)
        orthogonalize(matrix, config.muon_num_ns_steps)
    assert peak_since(recorder, start) == cost.temporary_bytes


def test_an_optimizer_of_whole_matrices_has_to_state_their_cost():
    class Silent(type(OptimizerConfig(optimizer="muon").spec)):
        matrix_cost = OptimizerSpec.matrix_cost

    with pytest.raises(NotImplementedError, match=r"^Silent takes whole matrices; add matrix_cost"):
        Silent().matrix_cost(OptimizerConfig(), (2, 2))


def peak_since(recorder, start):
    """Return the most bytes that were allocated at once since an event."""
    live = peak = 0
    for _, change in recorder.events[start:]:
        live += change
        peak = max(peak, live)
    return peak


def step_peak(config, rank, world_size):
    """Return the bytes that a rank's second step takes at its peak, beside states and gradients."""
    recorder = Recorder(rank, world_size)
    with built(config, rank, world_size, recorder.recording) as (parts, optimizer):
        for part in parts:
            for weight in part.parameters():
                weight.grad = torch.zeros_like(weight)
        optimizer.step()
        start = len(recorder.events)
        optimizer.step()
        return peak_since(recorder, start)


MODEL = (
    "--device cuda --bf16 --mock-data --num-layers 2 --hidden-size 1024 --num-attention-heads 16 "
    "--num-query-groups 4 --seq-length 256 --micro-batch-size 1 --global-batch-size 4 "
    "--vocab-size 8000 "
)
MESHES = {
    "one process": (1, ""),
    "zero3": (4, ""),
    "ddp": (4, BY + "ddp"),
    "tensor 2": (4, TENSOR),
    "copies": (4, COPIES),
    "pipeline 2": (4, PIPELINE),
}
LOW = "--muon-fp32-matmul-prec low"
OFFLOAD = "--optimizer-cpu-offload "
STEPS = {
    "muon": MUON,
    "muon, bfloat16": MUON + LOW,
    "muon, bf16": f"{MUON} {LOW} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --vocab-size 512",
    "muon, int8": f"{MUON} {LOW} --exp-avg-dtype int8 --exp-avg-sq-dtype int8 --vocab-size 512",
    "bf16": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "one in bf16": "--exp-avg-sq-dtype bf16",
    "fp8": "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
    "int8": "--exp-avg-dtype int8 --exp-avg-sq-dtype int8",
    "on the host": OFFLOAD,
    "bf16 on the host": OFFLOAD + "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "int8 on the host": OFFLOAD + "--exp-avg-dtype int8 --exp-avg-sq-dtype int8",
}
QUICK = ("copies",)


@pytest.mark.parametrize(
    "mesh",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MESHES],
)
@pytest.mark.parametrize("step", STEPS)
def test_temporary_tensors_of_a_step_are_those_that_the_code_makes(mesh, step):
    world_size, flags = MESHES[mesh]
    config = parse_args(shlex.split(f"{MODEL} {flags} {STEPS[step]}"))
    optimizer, group = inputs_of(config, world_size)
    peak = max(step_peak(config, rank, world_size) for rank in range(group.ranks))
    assert temporary_bytes(optimizer, group) == pytest.approx(peak, rel=1e-3)


def test_a_round_in_several_collectives_has_smaller_buffers(monkeypatch):
    config = parse_args(shlex.split(f"{MODEL} {MUON} {BY} ddp"))
    optimizer, group = inputs_of(config, 4)
    whole = temporary_bytes(optimizer, group)
    optimizer_cost._whole_matrix_bytes.cache_clear()
    for module in (matrices, optimizer_cost):
        monkeypatch.setattr(module, "BUFFER", 1 << 22)
    assert temporary_bytes(optimizer, group) == pytest.approx(step_peak(config, 0, 4), rel=1e-3)
    assert temporary_bytes(optimizer, group) < whole
    optimizer_cost._whole_matrix_bytes.cache_clear()


def test_a_stage_with_embeddings_has_more_state_than_the_average():
    """Llama 3 8B: 8 of 32 layers with 4 bytes a parameter, and an embedding with 8."""
    config = parse_args(shlex.split("--config llama3_8b --optimizer muon"))
    shape = optimizer_shape(config.optimizer, config.model, 8)
    assert shape.state_bytes == pytest.approx(4, rel=1e-3)
    assert shape.outside_state_bytes == 8
    layers = 8 * 218_112_000
    embedding = 128256 * 4096
    stage = (shape.state_bytes * layers + 8 * embedding) / (layers + embedding)
    assert stage == pytest.approx(4.93, abs=0.01)
    assert len(shape.matrices) == 8 * 7
    adam = optimizer_shape(OptimizerConfig(), config.model, 8)
    assert adam.state_bytes == adam.outside_state_bytes == 8


def test_adapters_alone_have_the_state_of_their_own_weights():
    flags = f"--config llama3_8b --lora-rank 8 {MUON} --muon-lora"
    config = parse_args(shlex.split(flags))
    shape = optimizer_shape(config.optimizer, config.model, 32)
    assert shape.state_bytes == shape.outside_state_bytes == 4


def costs(*sizes, dtype=torch.bfloat16):
    """Square matrices whose FLOPs are 1e12 times their size."""
    return tuple(MatrixCost((size, size), size * 1e12, dtype, 0) for size in sizes)


def test_rounds_take_the_time_of_their_largest_matrix_on_every_link():
    """Matrices of 3 and 2 in the first round of two ranks, and 1 in the second."""
    alone, pair = StageGroup(1, 1), StageGroup(2, 2)
    assert whole_matrix_seconds(costs(1, 3, 2), alone, COMPUTE) == pytest.approx(6)
    assert whole_matrix_seconds(costs(1, 3, 2), pair, COMPUTE) == pytest.approx(3 + 1)
    full = whole_matrix_seconds(costs(1, 3, 2, dtype=torch.float32), pair, COMPUTE)
    assert full == pytest.approx(4 / FLOAT32)
    on_cpu = replace(COMPUTE, device="cpu")
    full = whole_matrix_seconds(costs(1, 3, 2, dtype=torch.float32), pair, on_cpu)
    assert full == pytest.approx(4), "a CPU has one rate"
    stated = replace(COMPUTE, float32_tflops=COMPUTE.peak_tflops / 2)
    full = whole_matrix_seconds(costs(1, 3, 2, dtype=torch.float32), pair, stated)
    assert full == pytest.approx(2 * 4)

    # Half of the largest matrix of a round, there and back.
    moved = 2 * (3**2 + 1**2) / 1e9
    network = replace(NETWORK, peak_tflops=1e30)
    assert whole_matrix_seconds(costs(1, 3, 2), pair, network) == pytest.approx(moved)
    copies = whole_matrix_seconds(costs(3, 3, 3, 3), StageGroup(4, 2), network)
    assert copies == pytest.approx(2 * 9 * (1 / 2 + 3 / 2) / 1e9)
    latency = replace(LATENCY, peak_tflops=1e30)
    assert whole_matrix_seconds(costs(1, 3, 2), pair, latency) == pytest.approx(4)
    whole = whole_matrix_seconds(costs(1, 3, 2), StageGroup(2, 1), latency)
    assert whole == pytest.approx(2), "nothing has to be gathered"

    # On two nodes of two, 2 of 3 messages leave the node, over the link that its ranks share.
    nodes = replace(network, gpus_per_node=2, inside_gb_per_s=1e9)
    four = StageGroup(4, 4)
    far = 2 * 2 * 16 * 3 / 4 * 2 / 3 / 1e9
    assert whole_matrix_seconds(costs(4), four, nodes) == pytest.approx(2 * far)
    rails = replace(nodes, between_link="rank")
    assert whole_matrix_seconds(costs(4), four, rails) == pytest.approx(far)


def test_a_prediction_has_the_optimizers_time_as_a_cause_of_its_own():
    cluster = load_cluster("h100")
    flags = "--config llama3_8b --optimizer "
    adam, muon = (
        predicted(parse_args(shlex.split(flags + name)), 8, cluster) for name in ("adam", "muon")
    )
    assert "optimizer" not in adam.seconds
    step = muon.seconds.pop("optimizer")
    assert muon.seconds == adam.seconds
    assert muon.time == pytest.approx(adam.time)

    # 224 matrices on 8 ranks: 12 rounds of the feed-forward's, 8 of queries and outputs, and 8 of
    # keys and values.
    flops = 0
    for rounds, short, long in ((12, 4096, 14336), (8, 4096, 4096), (8, 1024, 4096)):
        flops += rounds * 5 * (4 * short**2 * long + 2 * short**3)
    elements = 12 * 4096 * 14336 + 8 * 4096 * 4096 + 8 * 1024 * 4096
    by_hand = flops / cluster.float32_flops_per_s
    by_hand += 2 * 4 * elements * 7 / 8 / cluster.inside_bytes_per_s
    by_hand += 2 * 28 * cluster.inside_latency_us * 1e-6
    assert step == pytest.approx(by_hand)


NAMES = re.compile(r"muon|\badamw?\b|adam_|exp_avg|optimizer_backend", re.IGNORECASE)
PRODUCT = ("train", "planner", "parallel", "model", "data", "kernels", "runtime", "tools", "slurm")
NAMING = {
    "train/resume/start.py": "checkpoints that name no optimizer were trained with adam",
    "tools/parity/own.py": "a comment on the bounds of its test",
}
"""Sources that may name an optimizer, each with the reason."""


def naming(root):
    """Return the sources of the product, outside train/optimizers, that name an optimizer."""
    sources = sorted(root.glob("*.py"))
    for folder in PRODUCT:
        sources += sorted((root / folder).rglob("*.py"))
    paths = []
    for path in sources:
        is_own = path.is_relative_to(root / "train" / "optimizers")
        if not is_own and NAMES.search(path.read_text(encoding="utf-8")):
            paths.append(str(path.relative_to(root)))
    return paths


def test_nothing_but_its_own_folder_names_an_optimizer(tmp_path):
    assert sorted(naming(ROOT)) == sorted(NAMING)
    for folder in ("planner", "train/optimizers"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text('if config.optimizer == "muon":\n    pass\n')
    (tmp_path / "train.py").write_text("# AdamW's defaults\n")
    assert naming(tmp_path) == ["train.py", "planner/a.py"]
