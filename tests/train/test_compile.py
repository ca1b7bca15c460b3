"""--compile changes no result on any mesh, and compiles each kind of layer once.

It refuses what it cannot do.

Inductor takes 15 s of a core for one kind of layer on one rank, so that its code is compared by
slow tests alone. By default some meshes are traced and differentiated as for it, and the graphs run
as they are: recompilations and breaks of graphs are the same.
"""

import io
from contextlib import redirect_stdout
from functools import partial
from unittest.mock import patch

import pytest
import torch

from pretrain_gpt import main
from runtime.ranks import run_ranks
from tests.pretraining import DIT, TINY, differences, dit_on_rank
from tools.common.training import PEAK
from train.callbacks.metrics import METRICS, read_metrics
from train.config.checks import validate_run
from train.config.flags import ConfigError
from train.config.language import parse_args

BOUND = 2e-6
COMPILED_AFTER = 2
"""Iterations after which nothing is compiled: the first has the forward and the backward."""
CP = "--context-parallel-size 2 --context-parallel-method"
LASP = f"{CP} lasp --model-type transnormer --num-query-groups 4"
MESHES = {
    "alone": (1, "--context-parallel-method none"),
    "striped": (2, f"{CP} striped"),
    "bf16": (2, f"{CP} striped --bf16"),
    "ring, zero3, all recomputed": (
        2, f"{CP} ring --data-parallel-sharding-strategy zero3 --recompute-granularity full"
    ),
    "zigzag, attention recomputed": (2, f"{CP} zigzag --recompute-granularity selective"),
    "ulysses, chunks": (2, f"{CP} ulysses --ffn-chunk-size 64 --loss-chunk-size 64"),
    "exchange, documents": (2, f"{CP} exchange --reset-attention-mask --reset-position-ids"),
    "windows and sinks": (
        2, f"{CP} zigzag --window-size 50,0 --softmax-type learnable --window-attn-skip-freq 2"
    ),
    "wallfacer": (4, "--context-parallel-size 4 --context-parallel-method wallfacer"),
    "tensor": (2, "--tensor-model-parallel-size 2"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "lasp": (2, LASP),
    "lasp, a chunk for each": (2, f"{LASP} --seq-length 128"),
    "ten decays, one chunk": (
        1, "--model-type transnormer --num-query-groups 4 --num-layers 10 --seq-length 64"
    ),
    ("all "
    "four"): (8, f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {CP} striped"),
}  # fmt: skip


def compiled_graphs(rank, world_size, arguments):
    """Train, and return how many graphs had been compiled after each iteration.

    Return the breaks in them, too.
    """
    from torch._dynamo.utils import counters

    from train.trainer import Trainer

    graph_counts, take = list[int](), Trainer.train_step

    def iteration(*args):
        record = take(*args)
        graph_counts.append(counters["stats"]["unique_graphs"])
        return record

    Trainer.train_step = iteration
    with redirect_stdout(io.StringIO()):
        main(arguments, PEAK)
    return graph_counts, sum(counters["graph_break"].values())


def traced_graphs(rank, world_size, arguments):
    """Do the same without Inductor."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return compiled_graphs(rank, world_size, arguments)


def compare(train, mesh, data, folder, *smaller):
    """Train with and without compiled layers.

    Assert that results are the same, and that nothing is compiled late.
    """
    ranks, flags = MESHES[mesh]
    base_flags = [
        *TINY,
        "--data-path",
        str(data),
        "--tokenizer-model",
        f"{data}.model",
        "--train-iters",
        "5",
    ]
    metrics = []
    for more in ((), ("--compile",)):
        save = folder / f"run{len(more)}"
        graphs = run_ranks(
            train, ranks, [*base_flags, *flags.split(), *smaller, "--save", str(save), *more]
        )
        metrics.append(read_metrics(save / METRICS))
    bound = 2e-2 if mesh == "bf16" else BOUND  # a compiled layer rounds fewer values in between
    assert differences(metrics[1], metrics[0]) <= bound
    for rank, breaks in graphs:
        assert rank[0] > 0
        assert rank[COMPILED_AFTER] == rank[-1]
        assert (breaks > 0) == ("chunks" in mesh)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    "mesh", ["exchange, documents", pytest.param("lasp", marks=pytest.mark.slow)]
)
def test_traced_layers_compute_the_same(mesh, default_data, tmp_path):
    smaller = (
        "--num-layers",
        "1",
        "--global-batch-size",
        "2",
        "--save-interval",
        "none",
        "--eval-iters",
        "0",
    )
    compare(traced_graphs, mesh, default_data, tmp_path, *smaller)


@pytest.mark.slow
@pytest.mark.needs("g++", "as", "ld")
@pytest.mark.parametrize("mesh", MESHES)
def test_compiled_layers_compute_the_same(mesh, default_data, tmp_path):
    compare(compiled_graphs, mesh, default_data, tmp_path)


@pytest.mark.slow
@pytest.mark.needs("g++", "as", "ld")
def test_a_diffusion_transformer_is_compiled_too(tmp_path):
    losses = []
    for more in ((), ("--compile",)):
        save = tmp_path / f"run{len(more)}"
        words = (
            "--train-iters",
            "3",
            "--context-parallel-size",
            "2",
            "--context-parallel-method",
            "ring",
        )
        run_ranks(dit_on_rank, 2, [*DIT, "--save", str(save), *words, *more])
        losses.append([record["diffusion_loss"] for record in read_metrics(save / METRICS)])
    assert losses[1] == pytest.approx(losses[0], rel=BOUND)


def test_without_a_compiler_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"compile is set, but no C[+][+] compiler is installed"):
        validate_run(parse_args(["--device", "cpu", "--compile"]))
