"""Products of 8 bits by torchao, which emulates them on a CPU.

The tests hold what they change, and what is refused.
"""

from importlib.util import find_spec

import pytest
import torch

from kernels.loss import cross_entropy_sum
from model.registry import build_model
from runtime.ranks import run_ranks
from tests.parallel.split import config as model_config
from tests.pretraining import TINY, differences, on_rank
from train import float8
from train.callbacks.metrics import METRICS, read_metrics
from train.config.checks import validate_run
from train.config.flags import ConfigError
from train.config.language import parse_args
from train.float8 import NAMES, Float8Config

torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
CHOICES = {
    "hybrid": Float8Config(fp8_format="hybrid"),
    "e4m3": Float8Config(fp8_format="e4m3"),
    "rows": Float8Config(fp8_format="e4m3", fp8_recipe="rowwise"),
}
MODEL = model_config(hidden_size=32, ffn_hidden_size=48)
CP = "--context-parallel-size 2 --context-parallel-method striped"
RUNS = {
    "zero3": CP,
    "zero1, all recomputed, chunks": (
        f"{CP} --data-parallel-sharding-strategy zero1 --recompute-granularity full "
        f"--ffn-chunk-size 50"
    ),
    "ddp, attention recomputed, compiled": (
        f"{CP} --data-parallel-sharding-strategy ddp --recompute-granularity selective --compile"
    ),
    "pipeline": "--pipeline-model-parallel-size 2",
    "lasp": f"{CP.replace('striped', 'lasp')} --model-type transnormer --num-query-groups 4",
}


def step(chosen):
    """A model in bfloat16 and its gradients on 17 tokens, which are no multiple of 16."""
    model = build_model(MODEL)
    model.init_weights(3)
    model.cast(torch.bfloat16)
    chosen.convert(model.layers)
    tokens = torch.arange(18)[None] % 7
    cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:])[0].backward()
    return model, {
        name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None
    }


@torchao
@pytest.mark.parametrize("name", CHOICES)
def test_matrices_of_layers_alone_are_rounded(name, monkeypatch):
    monkeypatch.setattr(float8, "EMULATED", True)
    model, got = step(CHOICES[name])
    _, want = step(Float8Config())
    assert got.keys() == want.keys()
    rounded = {
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    }
    assert rounded == {
        name for name, _ in model.named_modules() if name.rpartition(".")[2] in NAMES
    }
    assert len(rounded) == 7 * MODEL.num_layers
    off = {name: ((got[name] - want[name]).norm() / want[name].norm()).item() for name in want}
    assert off["layers.0.attention.wq.weight"] > 0.005
    assert max(off.values()) < 0.2, off
    if name == "e4m3":  # two more bits of fraction, and one less of range, in gradients alone
        hybrid = step(CHOICES["hybrid"])[1]
        assert not torch.equal(got["layers.0.mlp.down.weight"], hybrid["layers.0.mlp.down.weight"])


def emulated(rank, world_size, arguments):
    float8.EMULATED = True
    return on_rank(rank, world_size, arguments)


@torchao
@pytest.mark.slow
@pytest.mark.needs("g++", "as", "ld")  # of the one that is compiled
@pytest.mark.parametrize("name", RUNS)
def test_runs_learn_as_those_in_bfloat16(name, default_data, tmp_path):
    data = (
        "--data-path",
        str(default_data),
        "--tokenizer-model",
        f"{default_data}.model",
        "--train-iters",
        "5",
    )
    metrics = []
    for more in ((), ("--fp8-format", "hybrid")):
        save = tmp_path / f"run{len(more)}"
        run_ranks(
            emulated, 2, [*TINY, *data, "--bf16", *RUNS[name].split(), "--save", str(save), *more]
        )
        metrics.append(read_metrics(save / METRICS))
    losses = [[record["lm_loss"] for record in records] for records in metrics]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert differences(metrics[1], metrics[0]) < 0.1  # of gradient norms


H100 = "--device cuda --bf16 --fp8-format e4m3"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--device cuda --fp8-format e4m3", "bf16 is not set"),
        (f"{H100} --tensor-model-parallel-size 2", "tensor_model_parallel_size is 2"),
        (f"{H100} --lora-rank 4", "lora_rank is 4"),
        (f"{H100} --pipeline-schedule InterleavedZeroBubble", "InterleavedZeroBubble"),
        (
            f"{H100} --recompute-granularity attention_boundary",
            "use recompute_granularity full or selective",
        ),
        (f"{H100} --hidden-size 72 --ffn-hidden-size 96 --kv-channels 16", "hidden_size is 72"),
        (f"{H100} --dry-run", "dry_run"),
        (f"{H100} --device cpu", "device is cpu"),
        (H100, "compute capability 8.9"),
        (f"{H100} --fp8-recipe rowwise", "pip install --no-deps torchao"),
        ("--fp8-recipe rowwise", "fp8_format is None"),
    ],
)
def test_what_has_no_products_of_8_bits_is_refused(flags, words, monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda: (8, 0) if flags == H100 else (9, 0)
    )
    with pytest.raises(ConfigError, match=words):
        validate_run(
            parse_args([*TINY, "--data-path", "x", "--tokenizer-model", "x", *flags.split()])
        )
