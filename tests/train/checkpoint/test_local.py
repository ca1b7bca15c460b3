"""The local tier: parts of a checkpoint on several nodes, here folders of pairs of ranks."""

import json
import re

import pytest
import torch.distributed as dist

from runtime.ranks import run_ranks
from runtime.together import from_first
from tests.parallel.tiny import (
    ARCHITECTURE,
    build,
    equal,
    flip_a_byte,
    rewrite_manifest,
    save,
    train,
    whole_tensors,
)
from train.checkpoint.api import CheckpointConfig, load_checkpoint
from train.checkpoint.manifest import CheckpointError
from train.checkpoint.saving import Saves, newest_checkpoint
from train.checkpoint.search import _abandoned


def config(folder, node, beside=False):
    """The configuration of a rank on a node; on real machines all nodes have the same path."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "starts.jsonl").touch()
    return CheckpointConfig(
        save=str(run),
        load=str(run),
        async_save=beside,
        non_persistent_save_interval=1,
        non_persistent_local_ckpt_dir=str(folder / f"node{node}"),
    )


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def found(config_):
    notes = []
    return newest_checkpoint(config_, notes.append), "\n".join(notes)


def _all_that_can_happen(rank, size, folder, sharded, beside):
    settings = config(folder, rank // 2, beside)
    model, optimizer = build(0, sharded=sharded)
    saves = Saves(config=settings, say=lambda line: None)

    def step(iteration, tier):
        if sharded:
            train(model, optimizer, range(iteration, iteration + 1))
        for parameter in (
            () if sharded else model.parameters()
        ):  # alike on all ranks, which write each tensor once
            parameter.data += iteration
        saves.save(tier, iteration, model, optimizer, architecture=ARCHITECTURE, extra={})
        saves.wait()
        return whole_tensors(model, optimizer)

    step(1, "shared")
    step(2, "local")
    state = step(3, "local")
    local = saves._local
    assert local.parent == folder / f"node{rank // 2}"
    assert re.fullmatch(r"run-[0-9a-f]{12}", local.name)
    assert local.stat().st_mode & 0o777 == 0o700
    dist.barrier()
    names = {name.rpartition("/")[2] for name in files(local)} - {
        "manifest.json",
        "latest_checkpointed_iteration.txt",
    }
    assert {path.name for path in local.glob("iter_*")} == {"iter_0000003"}
    own_shards = {f"__{other}_0.distcp" for other in (0, 1, 2, 3) if other // 2 == rank // 2}
    assert names <= own_shards | ({".metadata"} if rank < 2 else set())
    dist.barrier()

    path, note = found(settings)
    assert path == local / "iter_0000003"
    assert note == ""
    model, optimizer = build(1, sharded=sharded)
    load_checkpoint(path, model, optimizer, ARCHITECTURE)
    assert equal(whole_tensors(model, optimizer), state)
    dist.barrier()
    assert ".metadata" in {file.name for file in path.iterdir()}, "brought from the other node"
    assert not [file for file in path.iterdir() if "distcp." in file.name]

    dist.barrier()
    if rank == 2:
        flip_a_byte(path, ".metadata")
    again, note = found(settings)
    assert again == folder / "run" / "iter_0000001", "each node's copy is looked at"
    assert rank or "node1" in note

    saves.save("shared", 4, model, optimizer, architecture=ARCHITECTURE, extra={})
    saves.end(4)
    dist.barrier()
    assert not list(local.glob("iter_*")), "the run ends with a shared one"
    saves.save("local", 5, model, optimizer, architecture=ARCHITECTURE, extra={})
    saves.end(5)
    assert found(settings)[0] == local / "iter_0000005", "the newest one is local"


@pytest.mark.parametrize(
    ("sharded", "beside"),
    [
        (False, False),
        *(pytest.param(True, beside, marks=pytest.mark.slow) for beside in (False, True)),
    ],
)
def test_each_node_has_its_part_of_the_newest_one_and_all_can_be_read(sharded, beside, tmp_path):
    run_ranks(_all_that_can_happen, 4, tmp_path, sharded, beside)


def second(node):
    """A node's part of the local checkpoint."""
    return next(node.glob("*/iter_0000002"))


BREAKS = {
    "flipped": (
        lambda node: flip_a_byte(second(node), "__3_0.distcp"),
        (
            "passed over a broken one: .*/node1/run-.*/iter_0000002/__3_0.distcp has a different "
            "SHA-256 than"
        ),
    ),
    "cut off": (
        lambda node: (second(node) / "__2_0.distcp").unlink(),
        "passed over a broken one: .*/iter_0000002/__2_0.distcp is missing",
    ),
    "lost": (
        lambda node: next(node.glob("run-*")).rename(node / "elsewhere"),
        "passed over a broken one: .*/node1/run-.*/iter_0000002/manifest.json is missing",
    ),
    "of another moment": (
        lambda node: rewrite_manifest(second(node), extra={"consumed_samples": 9}),
        "passed over a broken one: .*/iter_0000002 is not the same checkpoint on all nodes",
    ),
    "of another run": (
        lambda node: (node.parent / "run" / "starts.jsonl").write_text("begun anew\n"),
        (
            "passed over .*/node0/run-[0-9a-f]{12}, which belongs to another run; remove it if "
            "that run is over"
        ),
    ),
    "untouched": (lambda node: None, ""),
}


def _broken(rank, size, folder):
    model, optimizer = build(0, sharded=True)
    for broken, (damage, note) in BREAKS.items():
        broken_folder = folder / broken
        from_first(broken_folder.mkdir)
        settings = from_first(
            lambda broken_folder=broken_folder: config(broken_folder, 0)
        ) and config(broken_folder, rank // 2)
        saves = Saves(config=settings, say=lambda line: None)
        for iteration, tier in ((1, "shared"), (2, "local")):
            saves.save(tier, iteration, model, optimizer, architecture=ARCHITECTURE, extra={})
        from_first(
            lambda damage=damage, broken_folder=broken_folder: damage(broken_folder / "node1")
        )
        path, restored_note = found(settings)
        local = broken == "untouched"
        assert (
            path
            == (saves._local if local else broken_folder / "run")
            / f"iter_000000{2 if local else 1}"
        ), (broken, path, restored_note)
        if rank == 0:
            assert re.search(note, restored_note), restored_note
        if not local and broken != "of another run":
            dist.barrier()
            assert not list(saves._local.glob("iter_*")), "what was passed over does not come back"


def test_what_is_not_whole_on_all_nodes_is_passed_over_by_name(tmp_path):
    """The last of them is untouched, and is taken."""
    run_ranks(_broken, 4, tmp_path)


def test_the_newest_of_both_tiers_is_taken_and_nothing_else_starts_a_run_afresh(tmp_path):
    settings = config(tmp_path, 0)
    run = build(0, sharded=False)
    saves = Saves(config=settings, say=lambda line: None)
    saves.save("local", 1, *run, architecture=ARCHITECTURE, extra={})
    flip_a_byte(saves._local / "iter_0000001")
    path, note = found(settings)
    assert path is None, "there was no shared one yet"
    assert "__0_0.distcp has a different SHA-256" in note
    saves.save("local", 2, *run, architecture=ARCHITECTURE, extra={})
    save(tmp_path / "run", 3, *run)
    path, note = found(settings)
    assert path == tmp_path / "run" / "iter_0000003"
    assert note == f"passed over {saves._local}/iter_0000002: {path} is as new or newer"
    saves.save("local", 4, *run, architecture=ARCHITECTURE, extra={})
    (saves._local / "iter_0000005.1a2b3c4d.tmp").mkdir()
    flip_a_byte(path)
    path, note = found(settings)
    assert path == saves._local / "iter_0000004", "whole, though the shared one is broken"
    assert files(saves._local) == {
        f"iter_0000004/{name}" for name in ("manifest.json", ".metadata", "__0_0.distcp")
    } | {"latest_checkpointed_iteration.txt"}
    saves._local.rename(tmp_path / "mine")
    saves._local.symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="is a symlink, or belongs to another user"):
        newest_checkpoint(settings)


def test_a_local_one_waits_for_no_save_and_a_shared_one_takes_its_place():
    saves = Saves(
        config=CheckpointConfig(save="x", save_interval=4, non_persistent_save_interval=2),
        say=print,
    )
    assert [saves.due(iteration, last=False) for iteration in (1, 2, 3)] == [None, "local", "local"]
    saves.__dict__["_background"] = type(
        "Busy", (), {"under_way": True, "wait": lambda self: None}
    )()
    assert saves.due(3, last=False) is None
    assert saves.due(4, last=False) == "shared"
    saves.wait()
    assert [saves.due(5, last) for last in (False, True)] == [None, "shared"]


def test_one_that_the_run_has_left_behind_is_abandoned(tmp_path):
    lines = (
        {"time": 10.0, "iteration": 0},
        {"time": 30.0, "iteration": 4},
        {"time": 50.0, "iteration": 8},
    )
    (tmp_path / "starts.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines) + '{"time": 70'
    )
    assert _abandoned(tmp_path, {7: 20.0, 4: 15.0, 8: 45.0, 9: 60.0, 3: 20.0}) == {7}
    assert _abandoned(tmp_path / "none", {7: 20.0}) == set()
