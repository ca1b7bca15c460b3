import json
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel import checkpoint, manifest, shards
from parallel.checkpoint import (
    CheckpointConfig,
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    load_model,
    read_manifest,
    save_checkpoint,
)
from parallel.manifest import describe, what_is_broken, write_manifest
from tests.ranks import run_ranks

VOCABULARY, WIDTH = 7, 6  # neither is divisible by 4 ranks: shards are uneven, and one rank's are empty
ARCHITECTURE = {"num_layers": 2, "sizes": (VOCABULARY, WIDTH)}


class Tiny(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)  # (B, S, D)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale[0]
        return self.head(x)  # (B, S, V)


def _build(seed: int, sharded: bool, tied: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tiny(tied)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that training depends on, by name and in full."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        named |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in named.items()
    }


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def _save(folder: Path, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    extra = {"consumed_samples": 4 * iteration}
    return save_checkpoint(folder, iteration, model, optimizer, architecture=ARCHITECTURE, extra=extra)


def _two_checkpoints(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Iterations 1 and 2 of a model in this process, without a process group."""
    model, optimizer = _build(0, sharded=False)
    for iteration in (1, 2):
        _train(model, optimizer, range(iteration, iteration + 1))
        _save(folder, iteration, model, optimizer)
    return model, optimizer


# Resharding and exactness


def _train_and_save(rank: int, size: int, folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    model, optimizer = _build(0, sharded=True, tied=tied)
    _train(model, optimizer, range(3))
    with torch.no_grad():
        _loss(model, 50)  # leaves the root's parameters unsharded, as an evaluation before a save does
    _save(folder, 3, model, optimizer)
    return _whole_tensors(model, optimizer)


def _load(rank: int, size: int, path: Path, tied: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model, optimizer = _build(1, sharded=True, tied=tied)
    extra = load_checkpoint(path, model, optimizer, ARCHITECTURE)
    return _whole_tensors(model, optimizer), extra


@pytest.mark.parametrize("tied", [False, True])
def test_saved_on_4_ranks_and_loaded_on_1_2_3_and_by_a_plain_process(tmp_path: Path, tied: bool) -> None:
    saved = run_ranks(_train_and_save, 4, tmp_path, tied)[0]
    assert saved["embedding.weight/step"].item() == 3
    path = find_checkpoint(tmp_path)
    assert path == tmp_path / "iter_0000003"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    for size in (1, 2, 3):
        for loaded, extra in run_ranks(_load, size, path, tied):
            assert extra == {"consumed_samples": 12}
            assert _equal(loaded, saved), f"on {size} ranks"

    model, optimizer = _build(1, sharded=False, tied=tied)
    assert not _equal(_whole_tensors(model, optimizer), saved), "the comparison can tell models apart"
    load_checkpoint(path, model, optimizer, ARCHITECTURE)
    assert _equal(_whole_tensors(model, optimizer), saved)
    only_weights = Tiny(tied).bfloat16()
    assert load_model(path, only_weights).iteration == 3
    assert torch.equal(only_weights.head.weight, saved["embedding.weight" if tied else "head.weight"].bfloat16())


def test_saved_by_a_plain_process_and_loaded_on_3_ranks(tmp_path: Path) -> None:
    model, optimizer = _two_checkpoints(tmp_path)
    for loaded, _ in run_ranks(_load, 3, tmp_path / "iter_0000002", False):
        assert _equal(loaded, _whole_tensors(model, optimizer))


def _interrupted(rank: int, size: int, folder: Path) -> dict[str, list[float]]:
    model, optimizer = _build(0, sharded=True)
    _save(folder, 0, model, optimizer)
    whole = _train(model, optimizer, range(9))

    pieces: list[float] = []
    for start in (0, 3, 6):
        model, optimizer = _build(7 + start, sharded=True)
        _loss(model, 99).backward()  # what was done before a load must not count
        load_checkpoint(find_checkpoint(folder, start), model, optimizer, ARCHITECTURE)
        pieces += _train(model, optimizer, range(start, start + 3))
        _save(folder, start + 3, model, optimizer)

    model, optimizer = _build(8, sharded=True)
    load_model(find_checkpoint(folder, 3), model)
    return {"whole": whole, "pieces": pieces, "without moments": _train(model, optimizer, range(3, 9))}


def test_resumed_training_is_bitwise_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    for losses in run_ranks(_interrupted, 4, tmp_path):
        assert losses["pieces"] == losses["whole"]
        # Negative control: the weights alone give the first loss and not the later ones.
        assert losses["without moments"][0] == losses["whole"][3]
        assert losses["without moments"][1:] != losses["whole"][4:]


def _wrapped(rank: int, size: int, folder: Path) -> tuple[dict[str, torch.Tensor], bool]:
    model = Tiny()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["dp", "cp"]._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _train(model, optimizer, range(2))
    compiled = torch.compile(model)  # never called: only its names matter
    path = _save(folder, 2, compiled, optimizer)
    before = _whole_tensors(model, optimizer)
    _train(model, optimizer, range(2, 3))
    load_checkpoint(path, compiled, optimizer, ARCHITECTURE)
    return model.head.weight.full_tensor().detach(), _equal(before, _whole_tensors(model, optimizer))


def test_wrappers_and_a_flattened_mesh_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    answers = run_ranks(_wrapped, 4, tmp_path)
    assert all(exact for _, exact in answers)
    plain = Tiny()
    load_model(tmp_path / "iter_0000002", plain)
    assert torch.equal(plain.head.weight, answers[0][0])


class Float32Momentum(torch.optim.Optimizer):
    """Keeps a float32 moment for bf16 weights, which torch's own optimizers would cast at load_state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
            moment.mul_(0.9).add_(parameter.grad)
            parameter.add_(moment.to(parameter.dtype), alpha=-self.param_groups[0]["lr"])


def test_float32_moments_of_bf16_weights_are_not_rounded(tmp_path: Path) -> None:
    model = Tiny().bfloat16()
    optimizer = Float32Momentum(model.parameters())
    _train(model, optimizer, range(3))
    path = _save(tmp_path, 3, model, optimizer)
    loaded = Tiny().bfloat16()
    fresh = Float32Momentum(loaded.parameters())
    load_checkpoint(path, loaded, fresh, ARCHITECTURE)
    tensors = _whole_tensors(loaded, fresh)
    assert _equal(tensors, _whole_tensors(model, optimizer))
    moment = tensors["head.weight/moment"]
    assert moment.dtype == torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())


# Crashes and refusals while saving


def _killed_while_saving(rank: int, size: int, folder: Path, stage: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    victim = {"shards": 1, "hashes": 1}.get(stage, 0)
    if rank == victim:
        module, name = {
            "shards": (torch, "save"),
            "hashes": (checkpoint, "describe"),
            "manifest": (checkpoint, "write_manifest"),
            "pointer": (checkpoint, "write_durably"),
        }[stage]
        setattr(module, name, die)
    model, optimizer = _build(0, sharded=True)
    _train(model, optimizer, range(1))
    _save(folder, 5, model, optimizer)


@pytest.mark.parametrize("stage", ["shards", "hashes", "manifest", "pointer"])
def test_kill_9_in_the_middle_of_a_save(tmp_path: Path, stage: str) -> None:
    model, optimizer = _two_checkpoints(tmp_path)
    with pytest.raises(RuntimeError, match="rank"):
        run_ranks(_killed_while_saving, 2, tmp_path, stage)
    notes: list[str] = []
    newest = find_checkpoint(tmp_path, report=notes.append)
    if stage == "pointer":
        assert newest == tmp_path / "iter_0000005", "after the rename it is there, whole"
        assert "says 2, the newest whole one is 5" in notes[0]
        return
    assert newest == tmp_path / "iter_0000002"
    # A surviving rank 0 may have cleaned up; a killed one cannot.
    if stage == "manifest":
        assert notes == [f"{tmp_path / 'iter_0000005.tmp'} was never finished; a later save removes it"]
    _save(tmp_path, 5, model, optimizer)
    assert find_checkpoint(tmp_path, 5) == tmp_path / "iter_0000005"
    assert not list(tmp_path.glob("*.tmp"))


def _out_of_space(rank: int, size: int, folder: Path, failing: int) -> tuple[str, float]:
    model, optimizer = _build(0, sharded=True)
    _train(model, optimizer, range(1))
    _save(folder, 1, model, optimizer)
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        _save(folder, 2, model, optimizer)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_refuses_one_rank_fails_all_and_leaves_nothing(tmp_path: Path, failing: int) -> None:
    answers = run_ranks(_out_of_space, 3, tmp_path, failing)
    message = answers[0][0]
    assert "iter_0000002.tmp" in message
    assert f"rank {failing}" in message
    assert "File too large" in message
    assert {answer[0] for answer in answers} == {message}
    assert max(answer[1] for answer in answers) < 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def _save_below_a_file(rank: int, size: int, file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        _save(file / "run", 1, *_build(0, sharded=True))
    return str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    first, second = run_ranks(_save_below_a_file, 2, file)
    assert first == second
    assert "Not a directory" in first


def test_a_whole_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    model, optimizer = _two_checkpoints(tmp_path)
    before = {path.name: describe(path) for path in (tmp_path / "iter_0000001").iterdir()}
    with pytest.raises(CheckpointError, match="iter_0000001 exists and is whole"):
        _save(tmp_path, 1, model, optimizer)
    assert {path.name: describe(path) for path in (tmp_path / "iter_0000001").iterdir()} == before


def test_a_broken_one_is_moved_aside_when_its_iteration_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = _two_checkpoints(tmp_path)
    _flip_a_byte(tmp_path / "iter_0000002")
    broken = describe(tmp_path / "iter_0000002" / "__0_0.distcp")
    _save(tmp_path, 2, model, optimizer)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    assert describe(tmp_path / "iter_0000002.broken-1" / "__0_0.distcp") == broken
    assert "__0_0.distcp has another SHA-256" in capsys.readouterr().err


# Broken checkpoints


def _flip_a_byte(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _rewrite_manifest(folder: Path, **changes: Any) -> None:
    """What a forger can do: a manifest whose checksums are right."""
    write_manifest(folder, manifest.Manifest(**{**vars(read_manifest(folder)), **changes}))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter_extra(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"consumed_samples": 8', '"consumed_samples": 9'))


def _newer_format(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    content["format_version"] = 2
    content["checksum"] = manifest._checksum(content)
    (folder / "manifest.json").write_text(json.dumps(content))


BREAKAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped byte": (_flip_a_byte, "__0_0.distcp has another SHA-256"),
    "truncated shard": (lambda folder: _truncate(folder / "__0_0.distcp"), "__0_0.distcp has .* bytes instead of"),
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "missing table": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "truncated manifest": (lambda folder: os.truncate(folder / "manifest.json", 200), "manifest.json cannot be read"),
    "empty manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest.json cannot be read"),
    "manifest of another kind": (
        lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
        "manifest.json cannot be read",
    ),
    "altered manifest": (_alter_extra, "manifest.json does not match its own checksum"),
    "newer format": (_newer_format, "has format 2, this version reads 1"),
    "path outside": (
        lambda folder: _rewrite_manifest(folder, files={"../secret": (1, "0" * 64)}),
        "names '../secret', which is not a file of its own folder",
    ),
    "absolute path": (lambda folder: _rewrite_manifest(folder, files={"/etc/passwd": (1, "0" * 64)}), "/etc/passwd"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_checkpoint_is_named_and_fallen_back_from(tmp_path: Path, breakage: str) -> None:
    _two_checkpoints(tmp_path)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    damage, message = BREAKAGES[breakage]
    damage(tmp_path / "iter_0000002")
    notes: list[str] = []
    assert find_checkpoint(tmp_path, report=notes.append) == tmp_path / "iter_0000001"
    assert "iter_0000002" in notes[0]
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path, 2)
    assert find_checkpoint(tmp_path, 1) == tmp_path / "iter_0000001"
    damage(tmp_path / "iter_0000001")
    # Unless an earlier one is whole, starting afresh would throw the run away.
    if breakage != "altered manifest":
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            find_checkpoint(tmp_path)


def _find(rank: int, size: int, folder: Path) -> tuple[str, list[str], str]:
    notes: list[str] = []
    found = find_checkpoint(folder, report=notes.append)
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(folder, 2)
    hashed: list[str] = []
    manifest.describe = lambda path: hashed.append(path.name) or describe(path)
    what_is_broken(found)
    return str(found), notes, str(caught.value), hashed


def test_ranks_find_the_same_checkpoint_and_share_the_hashing(tmp_path: Path) -> None:
    run_ranks(_save_twice, 3, tmp_path)
    _flip_a_byte(tmp_path / "iter_0000002")
    answers = run_ranks(_find, 2, tmp_path)
    assert {answer[0] for answer in answers} == {str(tmp_path / "iter_0000001")}
    assert "iter_0000002" in answers[0][1][0]
    assert answers[1][1] == [], "one rank reports"
    assert answers[0][2] == answers[1][2]
    assert "__0_0.distcp has another SHA-256" in answers[0][2]
    shared = [name for answer in answers for name in answer[3]]
    assert sorted(shared) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert all(len(answer[3]) == 2 for answer in answers)


def _save_twice(rank: int, size: int, folder: Path) -> None:
    model, optimizer = _build(0, sharded=True)
    _train(model, optimizer, range(1))
    for iteration in (1, 2):
        _save(folder, iteration, model, optimizer)


def test_where_there_is_none(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "not there") is None
    (tmp_path / "iter_0000007.tmp").mkdir()
    (tmp_path / "iter_7").mkdir()
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 7"):
        find_checkpoint(tmp_path, 7)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not a folder"):
        find_checkpoint(tmp_path / "file")


# Other models


def _load_another_architecture(rank: int, size: int, path: Path) -> tuple[str, bool]:
    model, optimizer = _build(5, sharded=True)
    before = _whole_tensors(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model, optimizer, {"num_layers": 3, "sizes": [VOCABULARY, WIDTH], "rotary_base": 1e4})
    return str(caught.value), _equal(before, _whole_tensors(model, optimizer))


def test_another_architecture_is_refused_with_its_fields(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    path = tmp_path / "iter_0000002"
    for message, unchanged in run_ranks(_load_another_architecture, 2, path):
        assert str(path) in message
        assert "num_layers is 2 there and 3 here" in message
        assert "rotary_base is absent there and 10000.0 here" in message
        assert "sizes" not in message
        assert unchanged


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    path = tmp_path / "iter_0000002"
    wide, fewer, more = Tiny(), Tiny(), Tiny()
    wide.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)
    fewer.layers = fewer.layers[:1]
    more.layers.append(nn.Linear(WIDTH, WIDTH))
    for model, message in (
        (wide, r"model.head.weight has shape \[7, 6\] instead of \[8, 6\]"),
        (fewer, "model.layers.1.bias is too many"),
        (more, "model.layers.2.weight is missing"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            load_model(path, model)
        assert _equal(before, model.state_dict())
    halved = Tiny().bfloat16()
    with pytest.raises(CheckpointError, match=r"is torch.float32 instead of torch.bfloat16"):
        load_checkpoint(path, halved, torch.optim.AdamW(halved.parameters()), ARCHITECTURE)


# Strangers' checkpoints


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def _forge(folder: Path, table: Any) -> None:
    """Replace DCP's table, and make the manifest agree with it."""
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    files = {name: describe(folder / name) for name in read_manifest(folder).files}
    _rewrite_manifest(folder, files=files)
    assert what_is_broken(folder) is None


def test_a_pickle_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    path, target = tmp_path / "iter_0000002", tmp_path / "exploded"
    table = pickle.loads((path / ".metadata").read_bytes())
    table.planner_data = Bomb(target)
    _forge(path, table)
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        load_model(path, Tiny())
    assert not target.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert target.exists(), "negative control: pickle itself runs it"


@pytest.mark.parametrize(
    "opcodes", [b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", b"\x80\x04\x8c\x05torch\x8c\x09Size.load\x93.", b"garbage"]
)
def test_no_other_name_of_torch_is_admitted(tmp_path: Path, opcodes: bytes) -> None:
    _two_checkpoints(tmp_path)
    path = tmp_path / "iter_0000002"
    (path / ".metadata").write_bytes(opcodes)
    with pytest.raises(CheckpointError, match=r"asks for torch\.|cannot be read"):
        load_model(path, Tiny())


def test_objects_and_outside_files_in_the_table_are_refused(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    path = tmp_path / "iter_0000002"
    intact = (path / ".metadata").read_bytes()
    table = pickle.loads(intact)
    # DCP would read such an entry with torch.load(weights_only=False).
    table.state_dict_metadata["model.head.weight"] = shards.dcp.metadata.BytesStorageMetadata()
    _forge(path, table)
    with pytest.raises(CheckpointError, match="objects besides tensors"):
        load_model(path, Tiny())
    table = pickle.loads(intact)
    next(iter(table.storage_data.values())).relative_path = "../../secret"
    _forge(path, table)
    with pytest.raises(CheckpointError, match=r"points at '\.\./\.\./secret'"):
        load_model(path, Tiny())


def test_only_tensors_are_saved(tmp_path: Path) -> None:
    model, optimizer = _build(0, sharded=False)
    _train(model, optimizer, range(1))
    optimizer.state[model.head.weight]["step"] = 1
    with pytest.raises(CheckpointError, match=r"head.weight.step is a int"):
        _save(tmp_path, 1, model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_gives_back_what_was_put_in(tmp_path: Path) -> None:
    model, optimizer = _build(0, sharded=False)
    extra = {"loss": 0.1 + 0.2, "nan": float("inf"), "nested": {10: 1, 9: [2, None]}, "name": "Größe"}
    path = save_checkpoint(tmp_path, 12345678, model, optimizer, architecture=ARCHITECTURE, extra=extra)
    assert path.name == "iter_12345678"
    assert find_checkpoint(tmp_path) == path
    found = read_manifest(path)
    assert found.extra == {**extra, "nested": {"10": 1, "9": [2, None]}}
    assert (found.iteration, found.torch_version) == (12345678, torch.__version__)
    # Saved before the first step: the optimizer starts without state, not with steps at 1.
    _train(model, optimizer, range(1))
    load_checkpoint(path, model, optimizer, ARCHITECTURE)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"save_interval": 0}, "save_interval is 0"),
        ({"ckpt_step": 5}, "--load"),
        ({"exit_on_missing_checkpoint": True}, "--load"),
    ],
)
def test_contradictions_in_the_configuration(fields: dict[str, Any], message: str) -> None:
    CheckpointConfig()
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**fields)
