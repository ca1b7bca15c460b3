"""Nothing in a step waits for the host.

No number is read from the device, and no tensor is made for it anew.
"""

import traceback
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from threading import current_thread, main_thread
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._pytree import tree_leaves

from parallel.context.methods import LINEAR_METHODS, METHODS
from planner import rehearsal
from planner.recorder import Recorder
from planner.rehearsal import rehearse
from tests.parity.cases import LINEAR as LINEAR_KINDS
from tools.common.training import Records, trainer_of
from train.config import diffusion, language
from train.tasks.diffusion import DiffusionTask
from train.tasks.language import LanguageTask

SMALL = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 64 --device
    cpu
    --context-parallel-size 4
""".split()
PACKED = ("--reset-attention-mask", "--reset-position-ids")
METHOD, NODES = "--context-parallel-method", ("--context-parallel-ranks-per-node", "2")
BY = {name: (METHOD, name, *(NODES if name == "double_ring" else ())) for name in METHODS}
LINEAR = (
    "--num-layers",
    "2",
    "--model-type",
)  # the first layer of a transnormer is not like the others
CASES = {
    **BY,
    **{f"{name}, packed": (*flags, *PACKED) for name, flags in BY.items()},
    "gpt": (*("--model-type", "gpt", "--max-position-embeddings", "64"), *BY["zigzag"]),
    "tensor": ("--tensor-model-parallel-size", "2", *BY["zigzag"]),
    "full recompute": (
        "--recompute-granularity",
        "full",
        "--loss-chunk-size",
        "16",
        "--ffn-chunk-size",
        "16",
    ),
    **{
        f"{model}, {name}": (*LINEAR, model, METHOD, name)
        for model in LINEAR_KINDS
        for name in LINEAR_METHODS
    },
    **{
        f"{model}, lasp, packed": (*LINEAR, model, METHOD, "lasp", *PACKED)
        for model in LINEAR_KINDS
    },
    "hybrid": (
        *("--config", "transnormer_hybrid_tiny", "--num-layers", "2"),
        *("--softmax-every", "2", "--hybrid-softmax-layout", "zigzag"),
    ),
    "window": ("--window-size", "16,0", "--softmax-type", "learnable", *BY["zigzag"]),
}
SOME = "wallfacer", "exchange"
PACKED_SLOW = {f"{name}, packed" for name in BY if name not in SOME}
SLOW = {
    *BY,
    *PACKED_SLOW,
    "transnormer, lasp2",
    "transnormer, ulysses",
    "linear_transformer, lasp, packed",
} - {"zigzag"}
"""Every model is in the default set, and a method of each way to pass keys on.

The others run nightly.
"""
"""Methods for a diffusion transformer: its attention is a language model's, without a mask."""
DIT = """
    --config dit_tiny --device cpu --num-layers 1 --context-parallel-size 4 --hidden-size 32
    --num-attention-heads 4
    --micro-batch-size 4 --global-batch-size 4
""".split()


class Made(Recorder):
    """Note the host's tensors that meet those of the device, or are copied to it.

    They are noted in a second pass alone.

    What is cached there was in the first pass.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.passes, self.known, self.anew = 0, dict[int, Tensor](), list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) and not x.is_meta for x in tensors):
            for x in tensors:
                if type(x) is Tensor and not x.is_meta and x.dim() and x.numel():
                    self._met(x, func)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if any(type(x) is Tensor and x.untyped_storage().data_ptr() in self.known for x in tensors):
            self.know(out)
        return out

    def know(self, tree):
        """Take what is there for granted; it is kept, so that its place is not given to another."""
        self.known |= {
            x.untyped_storage().data_ptr(): x for x in tree_leaves(tree) if type(x) is Tensor
        }

    def _met(self, x, func):
        place = x.untyped_storage().data_ptr()
        if place not in self.known:
            self.know(x)
            self._note(f"{func.name()} {list(x.shape)}")

    def _note(self, what):
        if self.passes:
            frames = [
                frame
                for frame in traceback.extract_stack()
                if "/site-packages/" not in frame.filename
            ]
            call_frames = [
                f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-12:-2]
            ]
            self.anew.append(f"{what} at {' < '.join(reversed(call_frames))}")

    def to(self, plain, x, *args, **kwargs):
        """Do as Tensor.to, which says nothing to the dispatcher where the device is the host."""
        if (
            type(x) is Tensor
            and x.dim()
            and any(isinstance(to, torch.device) for to in (*args, *kwargs.values()))
        ):
            self._note(f"to {list(x.shape)}")
        return plain(x, *args, **kwargs)


def made_anew(parse, build, flags, change=None):
    """Return the host's tensors that the second micro-batch takes into its layers.

    They were made for it.
    """
    recorders = []

    def recorder(*args):
        recorders.append(Made(*args))
        return recorders[-1]

    def twice(plain, part, batch):
        local_recorder = recorders[-1]
        batch = {
            name: x if name == "plan" else local_recorder._fake.from_tensor(x)
            for name, x in batch.items()
        }
        # The objective's own, made once.
        local_recorder.know(vars(plain.__self__))  # type: ignore[attr-defined]
        to = Tensor.to
        stack.enter_context(
            patch.object(
                Tensor, "to", lambda *args, **kwargs: local_recorder.to(to, *args, **kwargs)
            )
        )
        out = plain(part, batch)
        out.backward(torch.ones_like(out))
        local_recorder.passes = 1  # and stays so in its backward, which is the rehearsal's
        return plain(part, batch)

    def stop(*_):
        raise StopIteration  # the optimizer is not watched

    def built(config, mesh):
        task = build(config, mesh)
        task.objective.loss_sum = partial(twice, task.objective.loss_sum)
        plain = task.build_model

        def changed():
            fresh_batch = plain()
            for layer in fresh_batch.layers if change else []:
                layer.register_forward_hook(change)
            return fresh_batch

        task.build_model = changed
        return task

    config = parse([*flags])
    world_size = config.mesh.context_parallel_size * config.mesh.tensor_model_parallel_size
    with (
        ExitStack() as stack,
        suppress(StopIteration),
        patch.object(rehearsal, "Recorder", recorder),
        patch.object(rehearsal, "_gradients", stop),
    ):
        rehearse(config, built, 1, world_size, per_node=2)
    assert recorders[-1].passes == 1
    return recorders[-1].anew


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_layers_make_and_read_nothing(name):
    assert made_anew(language.parse_args, LanguageTask, [*SMALL, *CASES[name]]) == []


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        *(
            pytest.param(name, "ddpm", marks=() if name in SOME else pytest.mark.slow)
            for name in METHODS
        ),
        ("ring", "rectified_flow"),
    ],
)
def test_those_of_a_diffusion_transformer_neither(method, objective):
    flags = [*DIT, *BY[method], "--objective", objective]
    assert made_anew(diffusion.parse_args, DiffusionTask, flags) == []


def reads_of_a_step(monkeypatch, data, more):
    """Count what the training thread reads in a step, but for the CPU's attention.

    ``more`` is called in each.
    """
    counts = []

    class Steps(Records):
        def write(self, record):
            super().write(record)
            counts.append(len(reads))

    reads = []

    def counting(name, plain):
        def read(*args):
            reads.extend([name] * (current_thread() is main_thread()))
            return plain(*args)

        return read

    for name in ("item", "tolist", "cpu", "__float__"):
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    flags = (
        "--config llama_tiny --num-layers 1 --hidden-size 32 --seq-length 32 "
        "--context-parallel-size 1 "
    )
    flags += "--train-iters 4 --save none --save-interval none --eval-iters 0"
    data_flags = ["--data-path", str(data), "--tokenizer-model", f"{data}.model"]
    with trainer_of(LanguageTask, [*flags.split(), *data_flags], Steps()) as trainer:
        plain = trainer.optimizer.step
        monkeypatch.setattr(trainer.optimizer, "step", lambda: (more(), plain()))
        trainer.train()
    (step_reads,) = {after - before for before, after in pairwise(counts[:3])}
    return step_reads


def test_a_step_reads_the_device_once(default_data, monkeypatch):
    """Loss and norm.

    Two more lists are what the hosts agree on, on the CPU: counts and requests, and health.
    """
    assert reads_of_a_step(monkeypatch, default_data, lambda: None) == 3
    monkeypatch.undo()
    assert (
        reads_of_a_step(monkeypatch, default_data, lambda: torch.ones(()).item()) == 4
    )  # negative control


def test_what_waits_is_found():
    gpt = partial(made_anew, language.parse_args, LanguageTask, [*SMALL, *CASES["zigzag"]])
    (line,) = gpt(
        change=lambda module, inputs, out: out.index_select(1, torch.tensor([*range(out.shape[1])]))
    )
    assert "test_waits.py" in line
    with pytest.raises(DataDependentOutputException):
        gpt(change=lambda module, inputs, out: out * out.sum().item())
