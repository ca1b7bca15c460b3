"""Moments in 16 and 8 bits on several ranks: equal to one process, in checkpoints, in a run."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from parallel.data import DataParallelConfig, local_shard, to_local
from parallel.mesh import distributed_mesh
from runtime.ranks import run_ranks
from tests.parallel.split import build, config, mesh_config, plain
from tests.parallel.tiny import full
from tests.pretraining import curve, flags_of, on_rank
from tests.train.optimizers.test_moments import differing, settings, state_bits, stepped
from train.checkpoint.api import load_checkpoint, save_checkpoint
from train.checkpoint.manifest import checkpoint_folder
from train.optimizers.adamw import FORMATS
from train.optimizers.config import build_optimizer
from train.optimizers.host import HostAdamW
from train.optimizers.moment_formats import MOMENTS, SCALE
from train.resume.start import notes_of_ranks

# Meshes

SMALL = {"num_layers": 1, "hidden_size": 24, "ffn_hidden_size": 32}
BLOCKS = {"num_layers": 1, "hidden_size": 512, "ffn_hidden_size": 512}
NARROW = {"num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 256}
"""Blocks of 128 become blocks of 64 where two ranks share a row."""
UNEVEN = {"num_layers": 1, "hidden_size": 96, "ffn_hidden_size": 96}
"""Rows of 96 have blocks, but where two ranks share a row, parts of 48 have none."""
MESHES = [
    ("zero1", 1, 1),
    ("zero2", 1, 1),
    ("zero3", 1, 1),
    ("ddp", 1, 1),
    ("legacy_ddp", 1, 1),
    ("zero1", 1, 2),
    ("zero3", 2, 1),
    ("ddp", 2, 1),
]
"""Strategy, tensor-parallel ranks, copies of the state. 37 entries are uneven over all ranks."""


def settings_of(mix):
    """Settings of both moments' dtypes and, if a third word follows, of an optimizer."""
    return settings(*mix[:2], optimizer=mix[2] if len(mix) > 2 else "adam")


@cache
def in_one_process(mix, sizes):
    module = plain(config(**dict(sizes)))
    return stepped(module, build_optimizer(settings_of(mix), module, seed=5))


def shard_of(whole, sharded):
    """The bits of this rank's shard of a whole tensor."""
    _, slices = local_shard(sharded)
    return whole[slices].contiguous().reshape(-1).view(torch.uint8)


def differences_of(module, optimizer, mix, sizes):
    """Names of this rank's tensors that differ from those of one process."""
    whole, whole_optimizer = in_one_process(mix, tuple(sizes.items()))
    sources = dict(whole.named_parameters())
    expected = {}
    for name, parameter in module.named_parameters():
        expected[name] = shard_of(sources[name].detach(), parameter)
        for key, value in optimizer.state[parameter].items():
            whole_value = whole_optimizer.state[sources[name]][key]
            expected[f"{name}/{key}"] = shard_of(whole_value, value)
    return differing(state_bits(module, optimizer), expected)


def differences(rank, world_size, cases):
    """Names of tensors that differ from one process, a list for each case."""
    results = []
    for mix, sizes, (strategy, tp, copies) in cases:
        with distributed_mesh(mesh_config(tp)) as mesh:
            data_parallel = DataParallelConfig(
                data_parallel_sharding_strategy=strategy, num_distributed_optimizer_instances=copies
            )
            module, _ = build(mesh, config(**sizes), data_parallel=data_parallel)
            optimizer = build_optimizer(settings_of(mix), module, seed=5, mesh=mesh)
            stepped(module, optimizer)
            results.append(differences_of(module, optimizer, mix, sizes))
    return results


def test_moments_and_weights_on_two_ranks_are_those_of_one_process_to_the_bit():
    cases = [(("bf16", "bf16"), SMALL, mesh) for mesh in MESHES[2:7:2]]
    cases += [(("fp32", "bf16"), SMALL, ("zero2", 1, 1))]
    cases += [(("bf16", "bf16", "muon"), SMALL, ("zero3", 1, 1))]
    cases += [(("int8", "int8", "muon"), NARROW, ("ddp", 2, 1))]
    cases += [(("fp8", "fp8"), BLOCKS, ("zero3", 1, 1)), (("int8", "int8"), BLOCKS, ("ddp", 2, 1))]
    for results in run_ranks(differences, 2, cases):
        assert results == [[]] * len(cases)


@pytest.mark.slow
def test_moments_and_weights_on_four_ranks_are_those_of_one_process_to_the_bit():
    cases = [(("bf16", "bf16"), SMALL, mesh) for mesh in MESHES]
    cases += [(("int8", "int8"), BLOCKS, mesh) for mesh in MESHES]
    cases += [(("bf16", "bf16", "muon"), SMALL, mesh) for mesh in MESHES]
    for results in run_ranks(differences, 4, cases):
        assert results == [[]] * len(cases)


# Checkpoints


EXACT = [
    ("bf16", SMALL, ("zero3", 1), "bf16", ("legacy_ddp", 1)),
    ("int8", BLOCKS, ("zero3", 1), "int8", ("zero3", 2)),
    ("bf16", SMALL, ("zero3", 1), "bf16", ("zero3", 1)),
    ("int8", BLOCKS, ("zero3", 1), "int8", ("zero1", 1)),
    ("fp8", BLOCKS, ("zero3", 2), "fp8", ("zero3", 1)),
]
"""Format, sizes and mesh of a save; format and mesh of a load."""
WIDER = [
    ("int8", NARROW, ("zero3", 2), "fp32", ("zero3", 1)),
    ("bf16", SMALL, ("zero3", 1), "fp32", ("ddp", 2)),
    ("int8", BLOCKS, ("zero3", 1), "fp32", ("zero3", 2)),
]
"""Loads that note another format, and lose nothing."""
IN_HOST_MEMORY = [
    ("fp32", BLOCKS, ("zero3", 1), "int8", ("zero1", 1)),
    ("fp8", BLOCKS, ("zero3", 1), "fp32", ("zero3", 1)),
    ("int8", BLOCKS, ("zero1", 1), "bf16", ("zero3", 1)),
    ("int8", BLOCKS, ("zero3", 1), "int8", ("zero1", 1)),
]
"""Loads by ``HostAdamW``, from checkpoints that it saved."""
ROUNDED = [
    ("fp32", SMALL, ("zero3", 1), "bf16", ("zero3", 1)),
    ("int8", NARROW, ("zero3", 1), "int8", ("zero3", 2)),
    ("int8", UNEVEN, ("zero3", 2), "int8", ("zero3", 1)),
    ("int8", UNEVEN, ("zero3", 2), "bf16", ("zero3", 1)),
]


def saved_and_loaded(rank, world_size, folder, cases, changes):
    """Save after two steps and load, on another mesh or in another format.

    Return for each case the largest error of a moment, the notes, and the tensors that differ from
    one process after a third step.
    """
    results = []
    for number, (saved, sizes, start, loaded, end) in enumerate(cases):
        path = folder / str(number)
        with distributed_mesh(mesh_config(start[1])) as mesh:
            module, optimizer = begun(mesh, saved, sizes, start[0], changes)
            stepped(module, optimizer, 2)
            save_checkpoint(path, 1, module, optimizer, architecture={}, extra={})
            moments = float_moments(module, optimizer)
        with distributed_mesh(mesh_config(end[1])) as mesh:
            module, optimizer = begun(mesh, loaded, sizes, end[0], changes)
            run = settings(loaded, **changes)
            conversion = run.spec.conversion(run)
            load_checkpoint(
                checkpoint_folder(path, 1), module, optimizer, {}, conversion=conversion
            )
            errors = []
            for name, value in float_moments(module, optimizer).items():
                errors.append(((value - moments[name]).norm() / moments[name].norm()).item())
            notes = conversion.notes()
            different = []
            if not notes:
                stepped(module, optimizer, 1, start=2)
                mix = (saved, saved, run.optimizer)
                different = differences_of(module, optimizer, mix, sizes)
        results.append((max(errors), notes, different))
    return results


def begun(mesh, dtype, sizes, strategy, changes):
    data_parallel = DataParallelConfig(data_parallel_sharding_strategy=strategy)
    module, _ = build(mesh, config(**sizes), data_parallel=data_parallel)
    optimizer = build_optimizer(settings(dtype, **changes), module, seed=5, mesh=mesh)
    assert isinstance(optimizer, HostAdamW) == ("optimizer_cpu_offload" in changes)
    return module, optimizer


def float_moments(module, optimizer):
    """The moments, whole, as float32."""
    moments = {}
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            if moment not in state:  # one of Muon's matrices
                continue
            stored = [to_local(state[moment]).view(-1)]
            dtype = stored[0].dtype
            moment_format = next(kind() for kind in FORMATS.values() if kind.dtype == dtype)
            if moment + SCALE in state:
                stored.append(to_local(state[moment + SCALE]).view(-1))
            values = torch.zeros_like(parameter)
            local = to_local(values)
            if local.numel():
                local.copy_(moment_format.unpack(tuple(stored), moment).view(local.shape))
            moments[f"{name}/{moment}"] = full(values)
    return moments


def load_errors(folder, cases, **changes):
    """The results of ``saved_and_loaded`` on two ranks, case by case."""
    results = run_ranks(saved_and_loaded, 2, folder, cases, changes)
    assert results[0] == results[1]
    print(*results[0], sep="\n")
    return results[0]


@pytest.mark.parametrize("cases", [EXACT[:2], pytest.param(EXACT[2:], marks=pytest.mark.slow)])
def test_checkpoints_keep_the_bits_on_any_mesh(cases, tmp_path):
    assert load_errors(tmp_path, cases) == [(0, [], [])] * len(cases)


@pytest.mark.parametrize("cases", [WIDER[:1], pytest.param(WIDER[1:], marks=pytest.mark.slow)])
def test_a_wider_format_loses_nothing(cases, tmp_path):
    for error, notes, _ in load_errors(tmp_path, cases):
        assert error == 0
        assert len(notes) == 1


INT8_TO_BF16 = (
    "note: exp_avg_dtype was int8 and is bf16, exp_avg_sq_dtype was int8 and is bf16; "
    "--exp-avg-dtype int8 --exp-avg-sq-dtype int8 keeps the moments as they are"
)


def test_another_format_or_block_is_converted_with_a_note(tmp_path):
    to_bf16, to_shorter_blocks, to_blocks, from_int8 = load_errors(tmp_path, ROUNDED)
    assert 1e-4 < to_bf16[0] < 1 / 256  # half a unit in the last place
    assert to_bf16[1] == [
        "note: exp_avg_dtype was fp32 and is bf16, exp_avg_sq_dtype was fp32 and is bf16; "
        "--exp-avg-dtype fp32 --exp-avg-sq-dtype fp32 keeps the moments as they are"
    ]
    for error, notes, _ in (to_shorter_blocks, to_blocks):
        assert 0 < error < 0.02
        assert notes == [
            "note: this mesh cuts int8 moments into blocks of other lengths than the "
            "checkpoint's, or for some parameters only one of the two has blocks, so they are "
            "converted"
        ]
    assert from_int8[1] == [INT8_TO_BF16]


def test_with_muon_the_moments_of_other_weights_are_converted(tmp_path):
    to_bf16, same = load_errors(tmp_path, [ROUNDED[0], EXACT[2]], optimizer="muon")
    assert 1e-4 < to_bf16[0] < 1 / 256
    assert to_bf16[1][0].startswith("note: exp_avg_dtype was fp32 and is bf16, exp_avg_sq_dtype")
    assert same == (0, [], [])


def test_moments_in_host_memory_are_converted_as_on_the_device(tmp_path):
    """From and to 8 bits; with the same format, they keep the bits."""
    to_int8, to_fp32, to_bf16, same = load_errors(
        tmp_path, IN_HOST_MEMORY, optimizer_cpu_offload=True
    )
    assert 1e-4 < to_int8[0] < 0.03
    assert to_fp32[0] == 0
    assert 1e-4 < to_bf16[0] < 1 / 256
    for (_, notes, _), before, after in (
        (to_int8, "fp32", "int8"),
        (to_fp32, "fp8", "fp32"),
        (to_bf16, "int8", "bf16"),
    ):
        assert notes == [
            f"note: exp_avg_dtype was {before} and is {after}, exp_avg_sq_dtype was {before} and "
            f"is {after}; --exp-avg-dtype {before} --exp-avg-sq-dtype {before} keeps the moments "
            "as they are"
        ]
    assert same == (0, [], [])


def notes_of_stage(rank, world_size, folder):
    """Load moments of int8 as bf16: rank 0 those of a matrix and a norm, rank 1 those of a norm."""
    conversion = settings("bf16").spec.conversion(settings("bf16"))
    stored = FileSystemReader(folder).read_metadata()
    tensors = {
        f"state.1.weight.{moment}": torch.zeros(64, dtype=torch.bfloat16) for moment in MOMENTS
    }
    if rank == 0:
        for moment in MOMENTS:
            tensors[f"state.0.weight.{moment}"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    conversion.to_read(tensors, stored)
    return notes_of_ranks(conversion.notes())


def test_a_stage_of_norms_alone_names_the_checkpoints_format(tmp_path):
    matrix_and_norm = nn.Sequential(nn.Linear(64, 64, bias=False), nn.RMSNorm(64))
    optimizer = build_optimizer(settings("int8"), matrix_and_norm)
    stepped(matrix_and_norm, optimizer)
    save_checkpoint(tmp_path, 1, matrix_and_norm, optimizer, architecture={}, extra={})
    notes = run_ranks(notes_of_stage, 2, checkpoint_folder(tmp_path, 1))
    assert notes == [[INT8_TO_BF16]] * 2


def notes_of_rank(rank, world_size):
    return notes_of_ranks(["of both"] + ["of the last"] * rank)


def test_a_note_of_any_rank_is_a_note_of_the_run():
    notes = ["of both", "of the last (on 1 of 2 ranks)"]
    assert run_ranks(notes_of_rank, 2) == [notes, notes]


# A run

SHORT = ("--train-iters", "3", "--num-layers", "1", "--seq-length", "64")
BF16 = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")


@pytest.mark.slow
def test_a_run_goes_on_with_its_moments_to_the_bit_and_with_others_with_a_note(
    default_data, tmp_path
):
    """Two ranks, stopped after the second step; then again, with moments in float32."""
    curves = {}
    outputs = {}
    for name, flags in (("whole", ()), ("stopped", ("--exit-interval", "2"))):
        save = ("--save", str(tmp_path / name))
        run_ranks(on_rank, 2, flags_of(default_data, *SHORT, *save, *BF16, *flags))
    stopped = str(tmp_path / "stopped")
    for name, dtype in (("again", BF16), ("wider", ())):
        flags = flags_of(
            default_data, *SHORT, "--save", str(tmp_path / name), "--load", stopped, *dtype
        )
        outputs[name] = run_ranks(on_rank, 2, flags)[0]
    for name in ("whole", "again", "wider"):
        curves[name] = curve(tmp_path / name, "iteration", "lm_loss", "grad_norm")
    assert curves["again"][-1] == curves["whole"][-1]
    assert "exp_avg_dtype" not in outputs["again"]
    assert outputs["wider"].count("note: exp_avg_dtype was bf16 and is fp32") == 1
    assert curves["wider"][-1] == curves["whole"][-1]  # the step's loss, before its update
