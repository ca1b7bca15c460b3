import io
import os
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata
from torch.distributed.tensor import DTensor

from runtime.ranks import run_ranks
from runtime.together import gather_results
from tests.parallel.tiny import (
    ARCHITECTURE,
    VOCABULARY,
    WIDTH,
    Tiny,
    build,
    equal,
    rewrite_manifest,
    save,
    train,
    two_checkpoints,
)
from train.checkpoint.api import load_checkpoint, load_model
from train.checkpoint.manifest import CheckpointError, describe, read_manifest
from train.checkpoint.metadata import _DataUnpickler
from train.checkpoint.shards import Shards
from train.checkpoint.tensors import spread_copies, tensors_of
from train.checkpoint.verify import find_damage


@pytest.fixture
def path(tmp_path):
    """The newer one of two checkpoints."""
    two_checkpoints(tmp_path)
    return tmp_path / "iter_0000002"


def test_tensors_that_do_not_fit_are_named(path):
    wider, fewer, more = Tiny(), Tiny(), Tiny()
    wider.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)
    fewer.layers = fewer.layers[:1]
    more.layers.append(nn.Linear(WIDTH, WIDTH))
    for model, message in (
        (wider, r"model.head.weight has shape \[7, 6\] instead of \[8, 6\]"),
        (fewer, "model.layers.1.bias is not in this run"),
        (more, "model.layers.2.weight is not in the checkpoint"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            load_model(path, model, ARCHITECTURE)
        assert equal(before, model.state_dict())
    halved = Tiny().bfloat16()
    with pytest.raises(CheckpointError, match=r"is torch.float32 instead of torch.bfloat16"):
        load_checkpoint(path, halved, torch.optim.AdamW(halved.parameters()), ARCHITECTURE)


def test_both_copies_of_a_tied_weight_have_the_moments_that_were_read():
    """A rank holds two where it has the first stage and the last, as with virtual stages."""
    torch.manual_seed(0)
    first, last = Tiny(), Tiny()
    optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters()], lr=0.1)
    for parameter in [*first.parameters(), *last.parameters()]:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert not equal(first.state_dict(), last.state_dict())

    with torch.no_grad():
        spread_copies([first, last], optimizer)

    assert equal(first.state_dict(), last.state_dict())
    for copy, source in zip(first.parameters(), last.parameters(), strict=True):
        assert equal(optimizer.state[copy], optimizer.state[source])


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def _forge(folder, change):
    """Change DCP's table, and make the manifest agree with it."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    change(table)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    files = {name: describe(folder / name) for name in read_manifest(folder).files}
    rewrite_manifest(folder, files=files)
    problem = find_damage(folder)
    assert str(folder) in problem or "do not trust it" in problem


def test_a_pickle_does_not_run_and_an_enumeration_is_read_as_every_python_writes_it(path, tmp_path):
    target = tmp_path / "exploded"
    _forge(path, lambda table: setattr(table, "planner_data", Bomb(target)))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        load_model(path, Tiny(), ARCHITECTURE)
    assert not target.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert target.exists(), "negative control: pickle itself runs it"
    written = ATTRIBUTE % (b"_MEM_FORMAT_ENCODING", b"TORCH_CONTIGUOUS_FORMAT")
    assert (
        _DataUnpickler(io.BytesIO(written)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    )


ATTRIBUTE = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n%b\nS'%b'\ntR."


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x09Size.load\x93.",
        b"garbage",
        ATTRIBUTE % (b"_MEM_FORMAT_ENCODING", b"__init__"),
        ATTRIBUTE % (b"TensorProperties", b"__init__"),
    ],
)
def test_no_other_name_of_torch_is_admitted(path, opcodes):
    (path / ".metadata").write_bytes(opcodes)
    with pytest.raises(
        CheckpointError, match=r"asks for torch\.|asks for __init__ of|cannot be read"
    ):
        load_model(path, Tiny(), ARCHITECTURE)


def _first_place(table):
    return next(iter(table.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # DCP would read such an entry with torch.load(weights_only=False).
        (
            lambda table: table.state_dict_metadata.update(
                {"model.head.weight": BytesStorageMetadata()}
            ),
            "objects besides tensors",
        ),
        (
            lambda table: setattr(_first_place(table), "relative_path", "../../secret"),
            r"points at '\.\./\.\./secret'",
        ),
        (
            lambda table: setattr(_first_place(table), "offset", 2**70),
            "tensors larger than its files, or offsets outside of any file",
        ),
        (
            lambda table: setattr(
                table.state_dict_metadata["model.head.weight"], "size", torch.Size([1 << 52, 1])
            ),
            "tensors larger than its files, or offsets outside of any file",
        ),
    ],
    ids=["an object", "a file outside", "a place outside", "a large tensor"],
)
def test_what_a_forged_table_may_not_say(path, change, message):
    _forge(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(path, Tiny(), ARCHITECTURE)


def test_only_tensors_are_saved(tmp_path):
    model, optimizer = build(0, sharded=False)
    train(model, optimizer, range(1))
    optimizer.state[model.head.weight]["step"] = 1
    with pytest.raises(CheckpointError, match=r"head.weight.step is a int"):
        save(tmp_path, 1, model, optimizer)
    assert list(tmp_path.iterdir()) == []


def _bytes(rank, size, sharded):
    model, optimizer = build(0, sharded=sharded)
    train(model, optimizer, range(1))
    state = tensors_of(model, optimizer)
    shards = Shards(None)
    needed = shards.agree(gather_results(lambda: shards.plan(state)))
    whole = [x for values in state.values() for x in values.values()]
    assert any(isinstance(x, DTensor) for x in whole) == sharded
    return needed, sum(x.numel() * x.element_size() for x in whole if isinstance(x, torch.Tensor))


def test_the_bytes_of_a_save_are_those_of_each_tensor_once():
    for sharded in (True, False):
        for needed, whole in run_ranks(_bytes, 2, sharded):
            assert needed == whole
