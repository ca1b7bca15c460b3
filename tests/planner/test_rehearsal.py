"""A rank's dry run: what it finds wrong, and its memory against real processes'.

The report is in test_dry_run.py.
"""

import sys
from collections import Counter
from dataclasses import replace

import pytest
from torch import Tensor

from bench.memory import measured
from planner import recorder
from planner.recorder import BETWEEN, INSIDE, Recorder
from planner.rehearsal import rehearse
from runtime import tensors
from runtime.errors import UserError
from runtime.ranks import run_ranks
from train.config.language import parse_args
from train.tasks.language import LanguageTask

MODEL = """
    --vocab-size 2048 --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 1024
    --device cpu
    --micro-batch-size 1
""".split()
ZERO1, PIPELINE = (
    "--data-parallel-sharding-strategy zero1 ",
    "--pipeline-model-parallel-size 2 --global-batch-size 8 ",
)
MESHES = {
    "zero3": "--context-parallel-size 8 --data-parallel-sharding-strategy zero3",
    "tensor": ZERO1
    + "--tensor-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 4",
    "pipeline": PIPELINE + "--context-parallel-size 2 --recompute-granularity full",
    "zero bubble": PIPELINE
    + ZERO1
    + "--context-parallel-size 2 --pipeline-schedule InterleavedZeroBubble "
    "--num-virtual-stages-per-pipeline-rank 2",
}
SMALL = """
    --vocab-size 64 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --device
    cpu
    --pipeline-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 2
""".split()


def broken(change):
    """Build as the entry does, with the last layer's output changed."""

    def build(config, mesh):
        task = LanguageTask(config, mesh)
        plain = task.build_model

        def changed():
            model = plain()
            for layer in model.layers:
                layer.register_forward_hook(lambda module, inputs, out: change(out))
            return model

        task.build_model = changed
        return task

    return build


def test_a_stage_fits_the_next_and_a_wrong_shape_is_found(monkeypatch):
    monkeypatch.setattr(tensors, "generator_of", None)  # no number is drawn
    config = parse_args(SMALL)
    stage = rehearse(config, LanguageTask, 0, 4, per_node=2)
    assert stage.memory["optimizer"] == pytest.approx(2 * stage.memory["weights"], rel=0.01)
    passed_on = 32 * 16 * 4  # hidden states of half a sequence, to the next node's stage
    assert stage.sent[BETWEEN] == passed_on
    assert stage.sent[INSIDE] > passed_on
    with pytest.raises(
        UserError,
        match=r"pipeline stage 0 returns \[1, 31, 16\] torch.float32, but the next stage takes",
    ):
        rehearse(config, broken(lambda x: x[:, 1:]), 0, 4, per_node=2)
    with pytest.raises(UserError, match=r"returns .* torch.float64"):
        rehearse(config, broken(Tensor.double), 0, 4, per_node=2)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        rehearse(config, broken(lambda x: x[..., 1:]), 2, 4, per_node=2)


def test_documents_decide_what_an_exchange_receives():
    flags = (
        "--context-parallel-size 4 --context-parallel-method exchange --recompute-granularity full"
    )
    config = parse_args(
        [
            *MODEL,
            *flags.split(),
            "--reset-attention-mask",
            "--num-layers",
            "1",
            "--vocab-size",
            "64",
        ]
    )
    one_document, many = (
        rehearse(config, LanguageTask, 0, 4, 4, cu_seqlens).bytes
        for cu_seqlens in (None, range(0, 1025, 64))
    )
    assert many < 0.97 * one_document


def test_for_a_gpu_norms_keep_what_its_kernel_keeps():
    flags = (
        "--bf16 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 1024 "
        "--device cpu"
    )
    flags += (
        " --micro-batch-size 1 --global-batch-size 1 --vocab-size 8192"  # logits are at the peak
    )
    config = parse_args(flags.split())
    memory_by_device = {
        device: rehearse(config, LanguageTask, 0, 1, 1, device=device).memory
        for device in ("cuda", "cpu")
    }
    # before and after two norms; queries, keys, values and the output; in the feed-forward
    norm_bytes = (
        4 * 1024 * 2 * (4 * 256 + 4 * 256 + 3 * config.model.ffn_size) + 2 * 1024 * 2 * 256
    )  # the last norm's too
    assert memory_by_device["cuda"]["activations"] == pytest.approx(norm_bytes, rel=0.02)
    assert memory_by_device["cpu"]["activations"] > 1.2 * norm_bytes


def test_what_is_in_host_memory_is_not_on_the_device():
    """A stage of 4 layers with 2 micro-batches in flight has 8 inputs of layers.

    2 are on the device, and 6 are not.
    """
    flags = (
        "--pipeline-model-parallel-size 2 --global-batch-size 4 --recompute-granularity full "
        "--loss-chunk-size 64"
    )
    config = parse_args([*MODEL, *flags.split(), "--num-layers", "8", "--vocab-size", "64"])
    moved = replace(config, recompute=replace(config.recompute, recompute_offload=True))
    on_device, less = (
        rehearse(run_config, LanguageTask, 0, 2, 2) for run_config in (config, moved)
    )
    assert 6 <= (on_device.bytes - less.bytes) / (4 * 1024 * 256) < 8
    assert (on_device.host, less.host) == (0, 8 * 4 * 1024 * 256)
    shorter = replace(moved, train=replace(moved.train, seq_length=960))
    assert rehearse(shorter, LanguageTask, 0, 2, 2).host == less.host, "torch pins powers of two"


@pytest.mark.slow
def test_in_a_zero_bubble_gradients_wait_for_the_weights():
    """Against the same stages with whole backwards.

    More rounds of micro-batches than it runs change nothing.
    """
    flags = [
        *SMALL,
        "--vocab-size",
        "1024",
        "--num-layers",
        "4",
        "--num-virtual-stages-per-pipeline-rank",
        "2",
    ]
    flags += ["--data-parallel-sharding-strategy", "zero1", "--pipeline-schedule"]

    def taken(schedule, batch):
        config = parse_args([*flags, schedule, "--global-batch-size", str(batch)])
        return rehearse(config, LanguageTask, 2, 4, per_node=2)

    whole = taken("Interleaved1F1B", 6)
    split, longer = (taken("InterleavedZeroBubble", batch) for batch in (6, 8))
    logits = 32 * 1024 * 4  # gradients of half a sequence's
    assert split.memory["logits"] >= whole.memory["logits"] + logits
    assert longer.memory == split.memory
    assert split.sent[BETWEEN] == whole.sent[BETWEEN]


def test_moments_in_host_memory_are_not_on_the_device_either():
    config = parse_args([*MODEL, "--vocab-size", "64", "--device", "cpu"])
    moved = replace(config, optimizer=replace(config.optimizer, optimizer_cpu_offload=True))
    on_device, less = (
        rehearse(run_config, LanguageTask, 0, 1, 1) for run_config in (config, moved)
    )
    assert on_device.memory["optimizer"] > 1.9 * on_device.memory["weights"]
    assert less.memory == {
        **on_device.memory,
        "optimizer": pytest.approx(0, abs=1000),
    }  # steps are single numbers
    assert less.host == 2 * less.memory["weights"]
    assert less.host < rehearse(moved, LanguageTask, 0, 1, 1, device="cuda").host < 1.3 * less.host


def test_a_kernel_that_is_missing_here_is_rehearsed_as_torchs(monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_C", None)
    flags = [
        *MODEL,
        "--vocab-size",
        "64",
        "--num-layers",
        "1",
        "--seq-length",
        "64",
        "--optimizer-backend",
    ]
    torchs, apexs = (
        rehearse(parse_args([*flags, name]), LanguageTask, 0, 1, 1) for name in ("torch", "apex")
    )
    assert apexs.memory == torchs.memory


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_memory_is_that_of_eight_real_processes(mesh):
    flags = [*MODEL, *MESHES[mesh].split()]
    config, real = (
        parse_args(flags),
        [rank_figures["bytes"] for rank_figures in run_ranks(measured, 8, " ".join(flags))],
    )
    for rank in (0, 4):
        stage = rehearse(config, LanguageTask, rank, 8, per_node=8)
        print(
            f"{mesh}: rank {rank} takes {real[rank]:,.0f} bytes, predicted {stage.bytes:,} of "
            f"{stage.memory}"
        )
        assert stage.bytes == pytest.approx(real[rank], rel=0.15)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            (
                "--context-parallel-method wallfacer --context-parallel-team-size 2 "
                "--recompute-granularity full"
            ),
            marks=pytest.mark.slow,
        ),
        "--context-parallel-method allgather --recompute-granularity attention_boundary "
        "--window-size 100,0 "
        "--window-attn-skip-freq 2",
    ],
)
def test_attention_that_is_told_again_is_as_if_it_ran(flags, monkeypatch):
    config = parse_args(
        [*MODEL, "--context-parallel-size", "4", "--vocab-size", "64", *flags.split()]
    )
    ran = []
    code = Recorder._by_its_code

    def counted(self, func, tensor, *rest):
        def called(*args, **kwargs):
            ran[-1][func.name()] += 1
            return tensor(*args, **kwargs)

        return code(self, func, called, *rest)

    def found():
        ran.append(Counter())
        return rehearse(config, LanguageTask, 3, 4, per_node=2)

    monkeypatch.setattr(Recorder, "_by_its_code", counted)
    first_counts = found()
    monkeypatch.setattr(recorder, "Tape", lambda *_: None)  # nothing is kept
    assert first_counts == found()
    again = "longmesh::context_attention_backward"
    assert ran[0][again] == (2 if "window" in flags else 1)
    assert ran[1][again] == 4


def test_an_optimizers_bytes_are_not_a_micro_batchs():
    """With 2 ranks in a stage, half of a matrix goes to its owner and back."""
    flags = "--pipeline-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 8"
    adam, muon = (
        rehearse(parse_args([*MODEL, *flags.split(), *more]), LanguageTask, 0, 4, per_node=4)
        for more in ((), ("--optimizer", "muon"))
    )
    assert adam.step_sent == {}
    assert muon.sent == adam.sent
    ffn = parse_args(MODEL).model.ffn_size
    layer = 4 * 256 * 256 + 3 * 256 * ffn
    assert muon.step_sent == {INSIDE: 4 * 2 * layer // 2}
    far = rehearse(
        parse_args([*MODEL, *flags.split(), "--optimizer", "muon"]), LanguageTask, 0, 4, per_node=1
    )
    assert far.step_sent == {BETWEEN: muon.step_sent[INSIDE]}
