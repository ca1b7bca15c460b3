import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from runtime.ranks import run_ranks
from tests.parallel.tiny import (
    ARCHITECTURE,
    VOCABULARY,
    WIDTH,
    Tiny,
    build,
    equal,
    flip_a_byte,
    loss_of,
    save,
    train,
    two_checkpoints,
    whole_tensors,
)
from train.checkpoint import drafts
from train.checkpoint.api import load_checkpoint, load_model
from train.checkpoint.manifest import CheckpointError, describe
from train.checkpoint.search import find_checkpoint


def _train_and_save(rank, size, folder, tied):
    model, optimizer = build(0, sharded=True, tied=tied)
    train(model, optimizer, range(3))
    with torch.no_grad():
        loss_of(
            model, 50
        )  # leaves the root's parameters unsharded, as an evaluation before a save does
    save(folder, 3, model, optimizer)
    return whole_tensors(model, optimizer)


def _load(rank, size, path, tied):
    model, optimizer = build(1, sharded=True, tied=tied)
    extra = load_checkpoint(path, model, optimizer, ARCHITECTURE)
    return whole_tensors(model, optimizer), extra


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_saved_on_4_ranks_and_loaded_on_1_and_3_and_by_a_plain_process(tmp_path, tied):
    saved = run_ranks(_train_and_save, 4, tmp_path, tied)[0]
    assert saved["embedding.weight/step"].item() == 3
    path = find_checkpoint(tmp_path)
    assert path == tmp_path / "iter_0000003"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    for size in (1, 3):
        for loaded, extra in run_ranks(_load, size, path, tied):
            assert extra == {"consumed_samples": 12}
            assert equal(loaded, saved), f"on {size} ranks"

    model, optimizer = build(1, sharded=False, tied=tied)
    assert not equal(whole_tensors(model, optimizer), saved), "the comparison can tell models apart"
    load_checkpoint(path, model, optimizer, ARCHITECTURE)
    assert equal(whole_tensors(model, optimizer), saved)
    only_weights = Tiny(tied).bfloat16()
    assert load_model(path, only_weights, ARCHITECTURE).iteration == 3
    assert torch.equal(
        only_weights.head.weight, saved["embedding.weight" if tied else "head.weight"].bfloat16()
    )


def test_saved_by_a_plain_process_and_loaded_on_3_ranks(tmp_path):
    model, optimizer = two_checkpoints(tmp_path)
    for loaded, _ in run_ranks(_load, 3, tmp_path / "iter_0000002", False):
        assert equal(loaded, whole_tensors(model, optimizer))


def _interrupted(rank, size, folder):
    model, optimizer = build(0, sharded=True)
    save(folder, 0, model, optimizer)
    whole = train(model, optimizer, range(6))

    pieces = []
    for start in (0, 2, 4):
        model, optimizer = build(7 + start, sharded=True)
        loss_of(model, 99).backward()  # what was done before a load must not count
        load_checkpoint(find_checkpoint(folder, start), model, optimizer, ARCHITECTURE)
        pieces += train(model, optimizer, range(start, start + 2))
        save(folder, start + 2, model, optimizer)

    model, optimizer = build(8, sharded=True)
    load_model(find_checkpoint(folder, 2), model, ARCHITECTURE)
    return {
        "whole": whole,
        "pieces": pieces,
        "without moments": train(model, optimizer, range(2, 6)),
    }


def test_resumed_training_is_bitwise_that_of_an_uninterrupted_run(tmp_path):
    for losses in run_ranks(_interrupted, 4, tmp_path):
        assert losses["pieces"] == losses["whole"]
        # Negative control: the weights alone give the first loss and not the later ones.
        assert losses["without moments"][0] == losses["whole"][2]
        assert losses["without moments"][1:] != losses["whole"][3:]


def _wrapped(rank, size, folder):
    model = Tiny()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["dp", "cp"]._flatten(
        "dp_cp"
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, range(2))
    compiled = torch.compile(model)  # never called: only its names matter
    path = save(folder, 2, compiled, optimizer)
    before = whole_tensors(model, optimizer)
    train(model, optimizer, range(2, 3))
    load_checkpoint(path, compiled, optimizer, ARCHITECTURE)
    return model.head.weight.full_tensor().detach(), equal(before, whole_tensors(model, optimizer))


def test_wrappers_and_a_flattened_mesh_leave_no_trace_in_the_names(tmp_path):
    answers = run_ranks(_wrapped, 4, tmp_path)
    assert all(exact for _, exact in answers)
    plain = Tiny()
    load_model(tmp_path / "iter_0000002", plain, ARCHITECTURE)
    assert torch.equal(plain.head.weight, answers[0][0])


class Float32Momentum(torch.optim.Optimizer):
    """Keeps a float32 moment for bf16 weights.

    torch's own optimizers would cast it at load_state_dict.
    """

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault(
                "moment", torch.zeros_like(parameter, dtype=torch.float32)
            )
            moment.mul_(0.9).add_(parameter.grad)
            parameter.add_(moment.to(parameter.dtype), alpha=-self.param_groups[0]["lr"])


def test_float32_moments_of_bf16_weights_are_not_rounded(tmp_path):
    model = Tiny().bfloat16()
    optimizer = Float32Momentum(model.parameters())
    train(model, optimizer, range(3))
    path = save(tmp_path, 3, model, optimizer)
    loaded = Tiny().bfloat16()
    fresh = Float32Momentum(loaded.parameters())
    load_checkpoint(path, loaded, fresh, ARCHITECTURE)
    tensors = whole_tensors(loaded, fresh)
    assert equal(tensors, whole_tensors(model, optimizer))
    moment = tensors["head.weight/moment"]
    assert moment.dtype == torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())


def _killed_while_saving(rank, size, folder, stage):
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    victim = {"shards": 1, "hashes": 1}.get(stage, 0)
    if rank == victim:
        module, name = {
            "shards": (torch, "save"),
            "hashes": (drafts, "describe"),
            "manifest": (drafts, "write_manifest"),
            "pointer": (drafts, "write_text"),
        }[stage]
        setattr(module, name, die)
    model, optimizer = build(0, sharded=True)
    train(model, optimizer, range(1))
    save(folder, 5, model, optimizer)


@pytest.mark.parametrize("stage", ["shards", "hashes", "manifest", "pointer"])
def test_kill_9_in_the_middle_of_a_save(tmp_path, stage):
    model, optimizer = two_checkpoints(tmp_path)
    with pytest.raises(RuntimeError, match="rank"):
        run_ranks(_killed_while_saving, 2, tmp_path, stage)
    notes = []
    newest = find_checkpoint(tmp_path, report=notes.append)
    if stage == "pointer":
        assert newest == tmp_path / "iter_0000005", "after the rename it is there, whole"
        assert "says 2, but the newest whole checkpoint is 5" in notes[0]
        return
    assert newest == tmp_path / "iter_0000002"
    # A surviving rank 0 may have cleaned up; a killed one cannot.
    if stage == "manifest":
        (draft,) = tmp_path.glob("iter_0000005.*.tmp")
        assert notes == [f"{draft} was never finished; a later save removes it"]
    save(tmp_path, 5, model, optimizer)
    assert find_checkpoint(tmp_path, 5) == tmp_path / "iter_0000005"
    assert not list(tmp_path.glob("*.tmp"))


def _out_of_space(rank, size, folder, failing):
    model, optimizer = build(0, sharded=True)
    train(model, optimizer, range(1))
    save(folder, 1, model, optimizer)
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    with pytest.raises(CheckpointError) as caught:
        save(folder, 2, model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_refuses_one_rank_fails_all_and_leaves_nothing(tmp_path, failing):
    answers = run_ranks(_out_of_space, 3, tmp_path, failing)
    message = answers[0]
    assert re.search(r"iter_0000002\.[0-9a-f]{8}\.tmp", message)
    assert f"rank {failing}" in message
    assert "File too large" in message
    assert set(answers) == {message}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_whole_checkpoint_is_never_overwritten(tmp_path):
    model, optimizer = two_checkpoints(tmp_path)
    before = {path.name: describe(path) for path in (tmp_path / "iter_0000001").iterdir()}
    with pytest.raises(
        CheckpointError, match="iter_0000001 is a whole checkpoint, which is not overwritten"
    ):
        save(tmp_path, 1, model, optimizer)
    assert {path.name: describe(path) for path in (tmp_path / "iter_0000001").iterdir()} == before


def test_a_broken_one_is_moved_aside_when_its_iteration_comes_again(tmp_path, capsys):
    model, optimizer = two_checkpoints(tmp_path)
    flip_a_byte(tmp_path / "iter_0000002")
    broken = describe(tmp_path / "iter_0000002" / "__0_0.distcp")
    save(tmp_path, 2, model, optimizer)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    assert describe(tmp_path / "iter_0000002.broken-1" / "__0_0.distcp") == broken
    assert "__0_0.distcp has a different SHA-256" in capsys.readouterr().err


def test_another_architecture_is_refused_with_its_fields(tmp_path):
    two_checkpoints(tmp_path)
    model, optimizer = build(5, sharded=False)
    before = whole_tensors(model, optimizer)
    other, path = (
        {"num_layers": 3, "sizes": [VOCABULARY, WIDTH], "rotary_base": 1e4},
        tmp_path / "iter_0000002",
    )
    with pytest.raises(
        CheckpointError,
        match=r"num_layers is 2 in the checkpoint and 3 in this run; rotary_base is absent in the ",
    ):
        load_checkpoint(path, model, optimizer, other)
    assert equal(before, whole_tensors(model, optimizer))


def test_everything_is_on_disk_before_a_checkpoint_bears_its_name(tmp_path, monkeypatch):
    """A power cut can lose what was not synced.

    Files first, then the rename, then the parent, then the pointer.
    """
    events = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced_as(stem, event):
        return event.startswith(
            (f"fsync {stem}", f"fsync .{stem}.")
        )  # a draft's name is of its own

    def synced(handle):
        events.append("fsync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        Path, "rename", lambda a, b: (events.append(f"rename {Path(b).name}"), rename(a, b))[1]
    )
    monkeypatch.setattr(
        Path, "replace", lambda a, b: (events.append(f"replace {Path(b).name}"), replace(a, b))[1]
    )
    model, optimizer = build(0, sharded=False)
    save(tmp_path, 1, model, optimizer)
    named = events.index("rename iter_0000001")
    for file in (tmp_path / "iter_0000001").iterdir():
        assert any(synced_as(file.stem, event) for event in events[:named]), (file.name, events)
    after = events[named + 1 :]
    pointer = next(i for i, event in enumerate(after) if event.startswith("replace latest"))
    assert f"fsync {tmp_path.name}" in after[:pointer]
    assert any(synced_as("latest_checkpointed_iteration", event) for event in after[:pointer])
