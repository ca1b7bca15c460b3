"""The steps that arrange a part of a model, in the order that each of them needs."""

from types import SimpleNamespace

import pytest
import torch

from parallel import apply
from parallel.data import DataParallelConfig
from parallel.pipeline.stages import PipelineConfig
from parallel.recompute import RecomputeConfig
from parallel.tensor import split

ORDER = [
    "build",
    "keep",
    "split_model",
    "float8",
    "compile_layers",
    "recompute_layers",
    "shard_model",
]
ORDER += ["init_parameters"]
STEPS_OF_LAYERS = ("float8", "compile_layers", "recompute_layers")
LAYERS = 8
DEVICE = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch):
    """Record each step, as its name and arguments, in the place of taking it."""
    calls = []

    def spy(name):
        return lambda *arguments, **settings: calls.append((name, *arguments))

    monkeypatch.setattr(split, "split_model", spy("split_model"))
    monkeypatch.setattr(apply, "sharding_mesh", lambda mesh, config: "sharding")
    for name in ("compile_layers", "recompute_layers", "shard_model", "init_parameters"):
        monkeypatch.setattr(apply, name, spy(name))
    return calls


def arranged(steps, *, compiled):
    """Arrange both stages of the second of two ranks; return what was built."""

    def build():
        part = SimpleNamespace(layers=object(), device=torch.empty(0).device)
        part.keep = lambda layers: steps.append(("keep", part, [*layers]))
        steps.append(("build", part))
        return part

    config = SimpleNamespace(
        model=SimpleNamespace(num_layers=LAYERS),
        pipeline=PipelineConfig(
            pipeline_schedule="Interleaved1F1B", num_virtual_stages_per_pipeline_rank=2
        ),
        data_parallel=DataParallelConfig(),
        recompute=RecomputeConfig(),
        slice_len=0,
        float8=SimpleNamespace(convert=lambda layers: steps.append(("float8", layers))),
        train=SimpleNamespace(bf16=False, compile=compiled),
    )
    pp = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)
    mesh = SimpleNamespace(pp=pp, tp="tp", dp_cp="dp_cp", device=DEVICE)
    return apply.parallelize(build, mesh, config, None)


@pytest.mark.parametrize("compiled", [True, False])
def test_every_stage_takes_each_step_once_in_its_order(compiled, steps):
    parts = arranged(steps, compiled=compiled)
    order = [name for name in ORDER if compiled or name != "compile_layers"]
    assert [name for name, *_ in steps] == 2 * order

    for number, part in enumerate(parts):
        stage = steps[number * len(order) :][: len(order)]
        assert part.device.type == "meta"
        assert all(
            subject is (part.layers if name in STEPS_OF_LAYERS else part)
            for name, subject, *_ in stage
        )
        arguments = {name: others for name, _, *others in stage}
        assert arguments["keep"] == [[2, 3] if number == 0 else [6, 7]]
        assert arguments["split_model"] == ["tp"]
        assert arguments["shard_model"] == [part.layers, "sharding"]
        assert arguments["init_parameters"] == [DEVICE, None]
