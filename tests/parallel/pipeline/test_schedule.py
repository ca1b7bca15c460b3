"""A model in pipeline stages is the whole model: loss and every gradient, and its checkpoints."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from model.registry import build_model
from parallel.context import ContextError
from parallel.data import DataParallelConfig, finish_gradients
from parallel.mesh import MeshConfig, distributed_mesh
from parallel.pipeline import schedule
from parallel.pipeline.schedule import PipelineRunner
from parallel.pipeline.stages import PipelineConfig
from runtime.ranks import run_ranks
from tests.parallel.split import GRADIENT, LOSS, PLAIN, config, context, data, own_batch, whole_step
from tests.parallel.test_strategies import recorded
from tests.parallel.tiny import full
from tests.train.tiny import TinyTask
from train.config.entries import Config, TrainConfig

LAYERS = 5
SEED = 3
ONE_F_ONE_B = PipelineConfig()
INTERLEAVED = PipelineConfig(
    pipeline_schedule="Interleaved1F1B", num_virtual_stages_per_pipeline_rank=2
)
SCHEDULES = {
    "1F1B": (ONE_F_ONE_B, "zero2"),
    "GPipe": (PipelineConfig(pipeline_schedule="GPipe"), "ddp"),
    "uneven": (PipelineConfig(pipeline_layers=(1, 4)), "legacy_ddp"),
    "interleaved": (INTERLEAVED, "zero3"),
    "zero bubble": (
        PipelineConfig(
            pipeline_schedule="InterleavedZeroBubble", num_virtual_stages_per_pipeline_rank=2
        ),
        "zero1",
    ),
}


def llama(tied):
    return config(tied, num_layers=LAYERS)


def gpt(tied):
    return config(tied, num_layers=LAYERS, model_type="gpt", max_position_embeddings=17)


@contextmanager
def built(model, pipeline, strategy, bf16=False, recompute=PLAIN, **sizes):
    """A mesh, this rank's parts, what runs them, and its micro-batches of one sequence each."""
    mesh_config = MeshConfig(device="cpu", **sizes)
    run = Config(
        model=model,
        mesh=mesh_config,
        pipeline=pipeline,
        data_parallel=DataParallelConfig(data_parallel_sharding_strategy=strategy),
        recompute=recompute,
        train=TrainConfig(
            seq_length=17, micro_batch_size=1, global_batch_size=4, seed=SEED, bf16=bf16
        ),
    )
    with distributed_mesh(mesh_config) as mesh:
        method = "lasp" if model.linear_attention else "zigzag"
        if recompute.layer_chunk_size:
            method = "ulysses"
        cp, attend = context(mesh, model, method, recompute=recompute)
        task = TinyTask(run, mesh, cp, attend)
        parts = task.build_parts()
        runner = task.build_runner(parts)
        assert isinstance(runner, PipelineRunner)
        tokens, labels = own_batch(mesh, cp)
        batches = [
            {"tokens": t[None], "labels": y[None]} for t, y in zip(tokens, labels, strict=True)
        ]
        yield mesh, parts, runner, batches


def step(rank, world_size, model, pipeline, strategy, sizes, recompute=PLAIN):
    """The loss of evaluation and of training summed over tokens, the weights, the gradients.

    The gradients are those of this rank's stages.
    """
    valid = int((data()[1] != -100).sum())
    with built(model, pipeline, strategy, recompute=recompute, **sizes) as run:
        mesh, parts, runner, batches = run
        weights = {name: full(p) for part in parts for name, p in part.named_parameters()}
        loss = runner.forward_backward(batches, valid)
        for part in parts:
            finish_gradients(part, mesh.dp_cp, strategy)
        gradients = {
            name: full(p.grad)
            for part in parts
            for name, p in part.named_parameters()
            if p.grad is not None
        }
        assert gradients.keys() == weights.keys()
        counted = runner.parameters().keys()
        assert counted == weights.keys() - (
            {"embedding.weight"} if runner.tied and rank >= world_size // 2 else set()
        )
        shares = torch.stack([loss.double(), runner.forward(batches) / valid])
        for part_of_mesh in (mesh.dp_cp, mesh.pp):
            torch.distributed.all_reduce(shares, group=part_of_mesh.get_group())
        return *shares.tolist(), weights, gradients


def initial(model):
    whole = build_model(model)
    whole.init_weights(SEED)
    return whole


def compare(results, model):
    """Checks losses and weights, and returns the largest difference of a gradient."""
    want = whole_step(model, initial(model))
    names = set()
    worst = 0.0
    for trained, evaluated, weights, gradients in results:
        assert abs(trained - want.loss) < LOSS
        assert abs(evaluated - want.loss) < LOSS
        names |= weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, want.weights[name]), name
            worst = max(worst, (gradients[name] - want.gradients[name]).abs().max().item())
    assert names == want.weights.keys()
    return worst


def steps(rank, world_size, cases):
    return [step(rank, world_size, *case) for case in cases]


def over_four(cases):
    """Yield the model of each case and its steps by rank: four ranks, in one go."""
    results = run_ranks(steps, 4, cases)
    return zip((model for model, *_ in cases), zip(*results, strict=True), strict=True)


def test_every_schedule_gives_the_step_of_one_process():
    """On pp 2 x dp 2, sequences with unequal numbers of labels; tied embeddings on both ends."""
    sizes = {"pipeline_model_parallel_size": 2}
    cases = [
        ((llama, gpt)[i % 2](tied=True), *SCHEDULES[name], sizes)
        for i, name in enumerate(SCHEDULES)
    ]
    for model, results in over_four(cases):
        assert compare(results, model) < GRADIENT
        copies = [result[3]["embedding.weight"] for result in results]
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def kind(name, **changes):
    """Return the configuration of a model with linear attention."""
    return config(model_type=name, num_query_groups=None, **{"num_layers": LAYERS, **changes})


HYBRID = kind("transnormer", num_layers=4, softmax_every=2)
DELTA = config(
    model_type="olmo_hybrid", num_layers=LAYERS, softmax_every=2, linear_value_head_dim=10
)
KDA = config(model_type="qwen3_5", num_layers=LAYERS, softmax_every=2, linear_gate="per_channel")
"""Five layers, of which each second has softmax attention: numbered within a stage, others would.
"""
WINDOWED = {"num_layers": LAYERS, "window_size": "5,0", "window_attn_skip_freq": "3"}
"""Every third layer of five sees all: numbered within a stage, others would."""


GEMMA3, OLMO3 = (
    config(name == "gemma3", **WINDOWED, model_type=name, rotary_base_local=90.0)
    for name in ("gemma3", "olmo3")
)
SHARED = [
    (gpt(tied=False), "tensor_model", ONE_F_ONE_B, "zero3"),
    (config(**WINDOWED, softmax_type="learnable"), "context", *SCHEDULES["interleaved"]),
    (kind("transnormer"), "context", ONE_F_ONE_B, "zero1"),
    (DELTA, "context", *SCHEDULES["interleaved"]),
    (GEMMA3, "context", *SCHEDULES["interleaved"]),
]
"""Both ends have gemma3's tied embeddings, and the first alone scales them."""
SLOW = [
    (config(**WINDOWED, softmax_type="off-by-one"), "context", *SCHEDULES["zero bubble"]),
    (gpt(tied=False), "context", INTERLEAVED, "zero3"),
    (HYBRID, "context", ONE_F_ONE_B, "zero2"),
    (OLMO3, "context", *SCHEDULES["interleaved"]),
    (kind("linear_transformer"), "context", INTERLEAVED, "legacy_ddp"),
    (HYBRID, "tensor_model", ONE_F_ONE_B, "zero2"),
    *((KDA, inner, *SCHEDULES["zero bubble"]) for inner in ("context", "tensor_model")),
]


@pytest.mark.parametrize(
    "cases", [SHARED, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_a_pipeline_over_tensor_or_context_parallel_ranks(cases):
    """Layers with a delta rule or a rope of their own have larger gradients.

    The bound is a share of these.
    """
    shared = {
        inner: {"pipeline_model_parallel_size": 2, f"{inner}_parallel_size": 2}
        for _, inner, *_ in cases
    }
    pipeline_cases = [
        (model, pipeline, strategy, shared[inner]) for model, inner, pipeline, strategy in cases
    ]
    for model, results in over_four(pipeline_cases):
        largest = max(
            x.abs().max().item() for x in whole_step(model, initial(model)).gradients.values()
        )
        share = {"olmo_hybrid": 1e-6, "qwen3_5": 1e-6, "gemma3": 2e-6, "olmo3": 2e-6}.get(
            model.model_type
        )
        assert compare(results, model) < (share * largest if share else GRADIENT), model


def reductions(rank, world_size):
    """Reductions of gradients over dp in a step of four micro-batches, by zero1 and by zero2."""
    counts = []
    for strategy in ("zero1", "zero2"):
        with built(llama(tied=False), ONE_F_ONE_B, strategy, pipeline_model_parallel_size=2) as (
            _,
            _,
            runner,
            batches,
        ):
            runner.forward_backward(batches, 60)
            with recorded() as calls:
                runner.forward_backward(batches, 60)
            counts.append(sum(name in ("reduce_scatter", "all_reduce") for name, _ in calls))
    return counts


def test_a_stage_reduces_gradients_as_often_as_its_strategy_says():
    """Two micro-batches on each rank.

    A stage has its layers and what goes round them, each a group of parameters.
    """
    assert run_ranks(reductions, 4) == [[groups, 2 * groups] for groups in (4, 4, 3, 3)]


def inputs_kept(rank, world_size, graphs):
    """The most received inputs that are still there after a backward of a stage.

    It is with or without the losses' graphs.
    """
    received = []
    counts = []

    class Watched(schedule._Stage):
        def forward_one_chunk(self, fwd_chunk_id, *arguments, **named):
            received.extend(
                weakref.ref(info.buffer) for info in self._buffers("forward").get(fwd_chunk_id, [])
            )
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

        def backward_one_chunk(self, bwd_chunk_id, loss=None, *how, **named):
            super().backward_one_chunk(
                bwd_chunk_id, 1 * loss if graphs and loss is not None else loss, *how, **named
            )
            counts.append(sum(reference() is not None for reference in received))

    schedule._Stage = Watched  # in this process alone
    with built(llama(tied=False), ONE_F_ONE_B, "zero1", pipeline_model_parallel_size=2) as (
        _,
        _,
        runner,
        batches,
    ):
        runner.forward_backward(batches, 60)
    return max(counts)


@pytest.mark.parametrize(("graphs", "max_kept"), [(False, 1), (True, 4)])
def test_a_last_stage_lets_go_of_its_inputs(graphs, max_kept):
    """torch keeps the losses of a step, whose graphs would keep what they are of.

    Here 4 micro-batches.
    """
    assert run_ranks(inputs_kept, 2, graphs)[1] == max_kept


def in_bfloat16(rank, world_size, widened):
    """The largest difference of a gradient between a split backward and a whole one.

    It is relative to the gradient's norm.
    """
    if not widened:
        schedule.widen_gradients = lambda model: None
    results = []
    for pipeline in (INTERLEAVED, SCHEDULES["zero bubble"][0]):
        with built(llama(tied=False), pipeline, "zero1", True, pipeline_model_parallel_size=2) as (
            _,
            parts,
            runner,
            batches,
        ):
            runner.forward_backward(batches, 60)
            results.append(
                {name: full(p.grad) for part in parts for name, p in part.named_parameters()}
            )
    whole, split = results
    return max(((split[name] - whole[name]).norm() / whole[name].norm()).item() for name in whole)


def test_a_split_backward_sums_gradients_in_float32_too():
    """Over four micro-batches in bfloat16, whose own gradients are the same."""
    assert max(run_ranks(in_bfloat16, 2, True)) < 1e-6
    if hasattr(
        FSDPParam, "accumulate_unsharded_grad_if_needed"
    ):  # from torch 2.15 on autograd sums so without us
        assert max(run_ranks(in_bfloat16, 2, False)) > 1e-4


def test_what_a_user_can_mend_keeps_its_kind_in_a_stage():
    """torch wraps every error of a stage."""
    runner = object.__new__(PipelineRunner)
    runner.name, runner.stage_numbers = "tokens", (1,)

    def step(*_, **__):
        raise RuntimeError("[Stage 1] failed to run forward") from ContextError("mend it")

    with pytest.raises(ContextError, match="mend it"):
        runner._run(step, [{"tokens": torch.zeros(1, 1)}])


def without_the_other_copy(rank, world_size, *arguments):
    PipelineRunner._sum_copies = lambda *_: None
    return step(rank, world_size, *arguments)


def test_tied_embeddings_that_do_not_meet_would_be_seen():
    model = llama(tied=True)
    results = run_ranks(
        without_the_other_copy, 2, model, ONE_F_ONE_B, "zero3", {"pipeline_model_parallel_size": 2}
    )
    assert compare(results, model) > 1000 * GRADIENT
