"""Muon's steps on every mesh are those of one process."""

import io
import logging
from contextlib import ExitStack, redirect_stdout

import pytest
import torch

from model.parts.lora import is_adapter
from model.registry import initial_weight
from parallel.data import DataParallelConfig, local_shard, to_local
from parallel.mesh import distributed_mesh
from runtime.ranks import run_ranks
from tests.endings import apart
from tests.parallel import split, tiny
from tests.parallel.test_matrices import counted_traffic
from tests.parallel.tiny import full
from tests.parity import cases
from tests.parity.run import GRADIENTS
from tools.common.cases import case_of
from tools.common.training import PEAK, build_trainer
from tools.parity.rank import _nonzero
from train.config.diffusion import parse_args as parse_dit
from train.config.language import parse_args
from train.optimizers import muon
from train.optimizers.config import OptimizerConfig, build_optimizer
from train.tasks import task

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --device cpu
    --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant
    --eval-iters 0 --log-interval 1000 --optimizer muon
""".split()
LANGUAGE = "--mock-data --vocab-size 64 --seq-length 32 "
KINDS = {
    "llama": LANGUAGE + "--num-query-groups 2",
    "one_kv_head": LANGUAGE + "--num-query-groups 1",
    "deep": LANGUAGE + "--num-query-groups 2 --num-layers 4",
    "kda": LANGUAGE + cases.KINDS["kda"]["flags"],
    "dit": cases.KINDS["dit"]["flags"],
}
"""Flags of each kind of model."""
MESHES = {
    2: ("dp=2 zero1", "dp=2 zero2", "dp=2 ddp", "dp=2 legacy_ddp", "cp=2 zero3", "tp=2", "pp=2"),
    4: ("dp=2 tp=2 zero3", "dp=4 zero2 copies=2", "pp=2 cp=2"),
}
NIGHTLY = {
    4: ("dp=2 tp=2 legacy_ddp", "pp=2 tp=2"),
    8: ("dp=2 cp=2 tp=2 zero3 copies=2", "pp=2 dp=2 tp=2 zero1", "dp=8 zero3"),
}
MODELS = {
    "kda": ("tp=2",),
    "dit": ("dp=2 zero3",),
    "one_kv_head": ("tp=2",),
    "deep": ("pp=2 virtual=2 Interleaved1F1B",),
}
"""Meshes of two ranks of each further kind."""
NIGHTLY_MODELS = {
    "kda": ("dp=2 zero3", "pp=2"),
    "dit": ("tp=2", "cp=2 ring", "pp=2"),
    "one_kv_head": ("dp=2 zero3",),
    "deep": ("dp=2 zero1",),
}
STEPS = (1, 10)
FEW_STEPS = (1, 3)
GROWN = 485 * GRADIENTS
"""Bound of an update's error: that of gradients, which Newton-Schulz grows 485 times at most."""
ZERO_GRADIENT = "attention.wk.bias"
"""Its gradient is rounding alone, which AdamW makes large: it adds the same to all of a query's
scores."""


def train_on(rank, world_size, kind, case, steps, *more):
    """Train, and return the whole weights of this rank's stage at 0 and after each step given."""
    flags = [*FLAGS, *KINDS[kind].split(), "--train-iters", str(max(steps))]
    parse = parse_dit if kind == "dit" else parse_args
    config = parse([*flags, *case_of(case).flags, *more])
    # torch warns that gathering what tp and FSDP shard is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    weights = {}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        if kind == "dit":  # modulations begin at zero, which lets no gradient through
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(task, "initial_weight", _nonzero(initial_weight))
        mesh = stack.enter_context(distributed_mesh(config.mesh))
        trainer = build_trainer(config, mesh, PEAK)
        update = trainer.optimizer.step

        def note(step):
            weights[step] = {
                name: full(parameter)
                for name, parameter in trainer.runner.parameters().items()
                if parameter.requires_grad
            }

        def step():
            update()
            if trainer.progress.iteration in steps:
                note(trainer.progress.iteration)

        note(0)
        trainer.optimizer.step = step
        trainer.train()
    return weights


def each_trained(rank, world_size, meshes, steps):
    """Return the weights of each kind of model on each of its meshes."""
    rows = [(kind, case) for kind, cases_of_kind in meshes.items() for case in cases_of_kind]
    named = {f"{kind} {case}": (kind, case) for kind, case in rows}
    return {name: train_on(rank, world_size, *named[name], steps) for name in apart(named)}


def merged(by_rank, name, step):
    """Return the weights of all stages after a step."""
    weights = {}
    for results in by_rank:
        weights |= results[name][step]
    return weights


def check_weights(by_rank, name, reference, steps, update=3e-5):
    """Check weights to 1e-6; updates to 30 roundings of float32, which Newton-Schulz may grow."""
    for step in steps:
        got = merged(by_rank, name, step)
        assert got.keys() == reference[step].keys()
        for key, weight in reference[step].items():
            if key.endswith(ZERO_GRADIENT):
                continue
            error = (got[key] - weight).norm()
            if reference[0][key].any():  # else a weight is no larger than its updates
                assert error <= 1e-6 * weight.norm(), (name, step, key)
            assert error <= update * (weight - reference[0][key]).norm(), (name, step, key)


@pytest.fixture(scope="module")
def one_process():
    """Weights at the start, and after each step that is compared, in one process."""
    return run_ranks(each_trained, 1, {"llama": ("dp=1",)}, STEPS)[0]["llama dp=1"]


CASES = [(ranks, MESHES[ranks]) for ranks in (2, 4)]
CASES += [pytest.param(*item, marks=pytest.mark.slow) for item in NIGHTLY.items()]


@pytest.mark.parametrize(("ranks", "meshes"), CASES)
def test_steps_on_every_mesh_are_those_of_one_process(ranks, meshes, one_process):
    by_rank = run_ranks(each_trained, ranks, {"llama": meshes}, STEPS)
    for mesh in meshes:
        check_weights(by_rank, f"llama {mesh}", one_process, STEPS)


@pytest.mark.parametrize(
    "meshes", [MODELS, pytest.param(NIGHTLY_MODELS, marks=pytest.mark.slow)], ids=["day", "night"]
)
def test_steps_of_other_models_are_those_of_one_process(meshes):
    """A delta rule, a diffusion transformer, fewer key heads than tp, an interleaved pipeline."""
    alone = dict.fromkeys(meshes, ("dp=1",))
    (references,) = run_ranks(each_trained, 1, alone, FEW_STEPS)
    by_rank = run_ranks(each_trained, 2, meshes, FEW_STEPS)
    for kind, cases_of_kind in meshes.items():
        reference = references[f"{kind} dp=1"]
        moved = [
            name
            for name, weight in reference[FEW_STEPS[-1]].items()
            if not torch.equal(weight, reference[0][name])
        ]
        assert len(moved) > 0.9 * len(reference[0]), kind
        for case in cases_of_kind:
            check_weights(by_rank, f"{kind} {case}", reference, FEW_STEPS, GROWN)


def adapted(rank, world_size, folder, case):
    """Train the adapters of a saved model by Muon, and return their weights."""
    flags = f"--load {folder} --finetune --lora-rank 4 --lora-alpha 6 --muon-lora"
    return {case: train_on(rank, world_size, "llama", case, FEW_STEPS, *flags.split())}


def adapted_alone(rank, world_size, folder):
    """Save a model, and do the same in one process."""
    train_on(rank, world_size, "llama", "dp=1", (1,), "--save", str(folder))
    return adapted(rank, world_size, folder, "dp=1")["dp=1"]


def test_adapters_on_two_tensor_ranks_are_those_of_one_process(tmp_path):
    (reference,) = run_ranks(adapted_alone, 1, tmp_path)
    assert all(is_adapter(name) for name in reference[0])
    for name, weight in reference[FEW_STEPS[-1]].items():
        assert not torch.equal(weight, reference[0][name])
    by_rank = run_ranks(adapted, 2, tmp_path, "tp=2")
    check_weights(by_rank, "tp=2", reference, FEW_STEPS, GROWN)


DIRECT = {
    1: ((1, 1, "ddp", 1),),
    2: ((1, 1, "zero3", 1), (1, 1, "legacy_ddp", 1), (2, 1, "zero1", 1)),
    4: ((2, 1, "zero3", 1), (2, 2, "legacy_ddp", 1), (1, 2, "zero2", 2), (4, 1, "zero3", 1)),
}
"""tp, cp, strategy and copies of meshes on which gradients are drawn instead of computed."""
CONFIG = split.config()


def drawn_step(model, optimizer, number):
    """Take a step with the same whole gradients on every mesh."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + index)
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = torch.zeros_like(parameter)
        to_local(parameter.grad).copy_(gradient[local_shard(parameter)[1]])
    optimizer.step()


def direct(rank, world_size, case, dtype, precision, control=None):
    """Return the whole weights and state after three steps, and the bytes sent in each."""
    tp, cp, strategy, copies = case
    data_parallel = DataParallelConfig(
        data_parallel_sharding_strategy=strategy, num_distributed_optimizer_instances=copies
    )
    config = OptimizerConfig(optimizer="muon", lr=0.02, muon_fp32_matmul_prec=precision)
    torch.set_default_dtype(dtype)
    with pytest.MonkeyPatch.context() as patch, distributed_mesh(split.mesh_config(tp, cp)) as mesh:
        if control == "shards":
            patch.setattr(muon, "WholeMatrices", Shards)
        model, _ = split.build(mesh, CONFIG, data_parallel=data_parallel)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        optimizer = build_optimizer(config, model, mesh=mesh)
        with counted_traffic() as sent:
            drawn_step(model, optimizer, 0)
        assert control or sum(sent) == optimizer.sent_bytes
        drawn_step(model, optimizer, 1)
        if control == "reset":
            optimizer.state.clear()
        drawn_step(model, optimizer, 2)
        tensors = tiny.whole_tensors(model, optimizer)
    torch.set_default_dtype(torch.float32)
    return tensors, optimizer.sent_bytes


class Shards(muon.WholeMatrices):
    """Each rank computes on its shards as if they were the matrices."""

    def __init__(self, parameters, group=None, *, dtype):
        super().__init__([to_local(parameter) for parameter in parameters], dtype=dtype)


WIDTHS = ((torch.float32, "low"), (torch.float32, "high"), (torch.float64, "high"))


def each_direct(rank, world_size, cases):
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    return {
        (case, *width): direct(rank, world_size, case, *width)
        for case in apart(cases)
        for width in WIDTHS
    }


@pytest.fixture(scope="module")
def equal_gradients():
    """Weights, momenta and AdamW's states of one process, keyed by dtype and precision."""
    (results,) = run_ranks(each_direct, 1, DIRECT[1])
    return {
        width: tensors for (_, *width), (tensors, _) in results.items() for width in [(*width,)]
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_equal_gradients_every_mesh_has_the_bits_of_one_process(ranks, equal_gradients):
    """In float32 torch's AdamW rounds the ends of shards otherwise, so norms are near only."""
    for results in run_ranks(each_direct, ranks, DIRECT[ranks]):
        for key, (tensors, sent_bytes) in results.items():
            want = equal_gradients[key[1:]]
            assert tensors.keys() == want.keys()
            assert sent_bytes > 0
            for name, value in want.items():
                is_exact = value.ndim == 2 or value.dtype == torch.float64
                bound = 0.0 if is_exact else 1e-6
                torch.testing.assert_close(tensors[name], value, rtol=bound, atol=0.0)
        for case in DIRECT[ranks]:
            high = results[case, torch.float32, "high"][1]
            assert results[case, torch.float32, "low"][1] == high / 2


def each_control(rank, world_size):
    case = DIRECT[2][0]
    return {
        control: direct(rank, world_size, case, *WIDTHS[2], control=control)[0]
        for control in ("shards", "reset")
    }


def test_orthogonalized_shards_and_a_momentum_that_begins_anew_would_be_seen(equal_gradients):
    want = equal_gradients[WIDTHS[2]]
    name = "layers.0.mlp.up.weight"
    for results in run_ranks(each_control, 2):
        for control, tensors in results.items():
            error = (tensors[name] - want[name]).norm()
            assert error > 1e-3 * want[name].norm(), control


def resumed(rank, world_size, folder, case, stop):
    """Train to a step, or go on from there to the fourth; return the weights of this stage."""
    more = ["--save", str(folder), "--load", str(folder), "--exit-interval", str(stop)]
    return train_on(rank, world_size, "llama", case, (4,), *more).get(4)


def test_a_run_goes_on_from_its_checkpoint_on_the_same_mesh_and_on_another(tmp_path):
    case = "dp=2 zero3"
    through = run_ranks(resumed, 2, tmp_path / "through", case, 4)[0]
    for name, ranks, other in (("same", 2, case), ("tp", 2, "tp=2"), ("one", 1, "dp=1")):
        run_ranks(resumed, 2, tmp_path / name, case, 2)
        weights = run_ranks(resumed, ranks, tmp_path / name, other, 4)[0]
        for key, weight in through.items():
            error = (weights[key] - weight).norm()
            assert error <= (0.0 if name == "same" else 1e-6) * weight.norm(), (name, key)


def with_a_bad_step(rank, world_size):
    """Return if a step with an infinite loss left weights and state as they were."""
    config = parse_args([*FLAGS, *KINDS["llama"].split(), "--train-iters", "3"])
    with redirect_stdout(io.StringIO()), distributed_mesh(config.mesh) as mesh:
        trainer = build_trainer(config, mesh, PEAK)
        plain, before, after = trainer.runner.forward_backward, {}, {}

        def forward_backward(micro_batches, valid):
            loss = plain(micro_batches, valid)
            (part,) = trainer.parts
            if trainer.progress.iteration == 2:
                before.update(tiny.whole_tensors(part, trainer.optimizer))
                return loss * float("inf")
            if trainer.progress.iteration == 3:
                after.update(tiny.whole_tensors(part, trainer.optimizer))
            return loss

        trainer.runner.forward_backward = forward_backward
        trainer.train()
    assert before
    assert before.keys() == after.keys()
    return tiny.equal(before, after), trainer.progress.skipped_iterations


def test_a_bad_step_leaves_the_momentum_as_it_was():
    assert run_ranks(with_a_bad_step, 2) == [(True, 1)] * 2
