"""A model split over ranks is the whole model.

Its weights, loss, gradients, their norm and its checkpoints.
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.decoder import Decoder
from model.dit import DiT
from model.parts.attention import Attention, sdpa
from model.parts.weights import Split
from model.registry import build_model
from parallel.data import init_parameters, shard_model
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig, recompute_layers
from parallel.tensor import styles as tensor_styles
from parallel.tensor.split import WORDS, split_model, split_words
from runtime.ranks import run_ranks
from tests.model.models import FAMILY, IMAGE, KDA
from tests.parallel.split import (
    BATCH,
    GRADIENT,
    LENGTH,
    PLAIN,
    check_step,
    config,
    data,
    difference,
    mesh_config,
    partly_redistributed,
    split_step,
    weight_of,
    whole_step,
)
from tests.parallel.unequal import gradient_norm_of
from tools.common.cases import case_of
from train.gradients import gradient_norm

LEARNED = {"model_type": "gpt", "max_position_embeddings": LENGTH}
ROPE = {"model_type": "gpt", "position_embedding_type": "rope"}
ODD = {"hidden_size": 22, "kv_channels": 6}
"""A width that 4 ranks cannot share evenly."""
CHUNKS = RecomputeConfig(loss_chunk_size=5, ffn_chunk_size=7, recompute_granularity="full")
"""They divide neither the tokens of a rank nor those of a sequence."""
OFFLOADED = RecomputeConfig(recompute_granularity="full", recompute_offload=True)
SUNK = config(window_size="5,0", window_attn_skip_freq="2", softmax_type="learnable")
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 8,
}
QWEN = config(add_qkv_bias=True, qk_layernorm=True, **YARN)
"""With all that Qwen2 and Qwen3 add to a LLaMA."""
LLAMAS = [config(), config(tied=True), SUNK, QWEN]
GPTS = [
    config(**LEARNED),
    config(tied=True, **LEARNED, **ODD),
    config(**ROPE),
    config(tied=True, **ROPE),
]


def steps(rank, world_size, case, models, recompute):
    """A step of each model and its gradient norm."""
    results = []
    with distributed_mesh(mesh_config(case.tp, case.cp)) as mesh:
        for model_config in models:
            model, step = split_step(mesh, model_config, recompute)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            results.append((step, gradient_norm(model.parameters()).item()))
    return results


def check(mesh, models, recompute=PLAIN):
    case = case_of(mesh)
    results = run_ranks(steps, case.ranks, case, models, recompute)
    for index, model_config in enumerate(models):
        want = whole_step(model_config)
        assert want.weights.keys() == want.gradients.keys()
        for step, norm in (result[index] for result in results):
            check_step(step, want, model_config)
            assert norm == pytest.approx(gradient_norm_of(want.gradients), rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "models", "recompute"),
    [
        ("tp=2", [*LLAMAS, *GPTS], PLAIN),
        ("tp=2 cp=2", [LLAMAS[0], SUNK, GPTS[1]], PLAIN),
        ("tp=4", [LLAMAS[1], QWEN, GPTS[1]], PLAIN),  # two ranks share each key-value head
        ("tp=2", [LLAMAS[0], GPTS[0]], CHUNKS),
        *(
            pytest.param(mesh, [*LLAMAS, *GPTS], recompute, marks=pytest.mark.slow)
            for recompute in (PLAIN, CHUNKS)
            for mesh in ("tp=2 cp=2", "tp=2 dp=2", "tp=4")
        ),
        # layers' inputs are DTensors here; of 4 layers, 2 are read from host memory
        pytest.param("tp=2", [config(num_layers=4)], OFFLOADED, marks=pytest.mark.slow),
    ],
)
def test_one_step_is_that_of_one_process(mesh, models, recompute):
    check(mesh, models, recompute)


def masks_seen(rank, world_size):
    """By policy, True for each attention of a step in bfloat16 that has the mask itself.

    Recomputed ones count too.
    """
    mask_given, tokens, masks_by_layer = object(), data()[0][:, :16], []

    def attend(q, k, v, mask):
        masks_by_layer[-1].append(mask is mask_given)
        return sdpa(q, k, v)

    with distributed_mesh(mesh_config(tp=2)) as mesh:
        for granularity in ("none", "selective", "full"):
            masks_by_layer.append([])
            with torch.device("meta"):
                model = build_model(config(), attend)
            split_model(model, mesh.tp)
            recompute_layers(model.layers, RecomputeConfig(recompute_granularity=granularity))
            shard_model(model, model.layers, mesh.dp_cp, bf16=True)
            init_parameters(
                model, mesh.device, lambda name, shape, part: weight_of(config(), name, shape, part)
            )
            model(tokens, None, None, mask_given).to_local().float().logsumexp(-1).sum().backward()
    return masks_by_layer


def test_the_mask_passes_tensor_parallelism_sharding_and_recomputation():
    """Layers attend twice in a step if they are computed again."""
    assert (
        run_ranks(masks_seen, 2)
        == [[[True] * forwards * config().num_layers for forwards in (1, 2, 2)]] * 2
    )


def parts_kept(patch):
    """Gradients of what is whole on every tp rank are left as each rank's part."""
    patch.setattr(DTensor, "redistribute", partly_redistributed(DTensor.redistribute))


def a_bias_of_every_rank(patch):
    """A row-parallel layer's bias is added up over tp."""
    patch.setattr(tensor_styles, "local_entries", DTensor.full_tensor)


def parts_for_wholes(patch):
    """Each rank's part of a gradient is taken for the whole.

    Every rank holds the value whole there.
    """
    to_local = DTensor.to_local
    patch.setattr(DTensor, "to_local", lambda tensor, **_: to_local(tensor))


def a_wrong_word(patch):
    """Keys and values are stated to be whole on every rank.

    Queries so attend to those of other heads.
    """
    patch.setitem(Attention.SPLIT, "wk", "whole")
    patch.setitem(Attention.SPLIT, "wv", "whole")


def a_local_mean(patch):
    """Each rank divides by its number of labels: a setting of the step."""


FAULTS = {
    2: [
        (parts_kept, LLAMAS[0], {}),
        (a_bias_of_every_rank, GPTS[0], {}),
        (parts_for_wholes, GPTS[0], {}),
        (parts_for_wholes, GPTS[0], {"recompute": CHUNKS}),
        (a_wrong_word, LLAMAS[0], {}),
    ],
    4: [(a_local_mean, LLAMAS[0], {"local_mean": True})],
}


def broken_steps(rank, world_size, faults):
    steps = []
    for fault, model, settings in faults:
        with pytest.MonkeyPatch.context() as patch, distributed_mesh(mesh_config(tp=2)) as mesh:
            fault(patch)
            steps.append(split_step(mesh, model, **settings)[1])
    return steps


@pytest.mark.parametrize("ranks", FAULTS)
def test_what_is_summed_wrongly_over_tp_or_a_local_mean_would_be_seen(ranks):
    for (fault, model, _), step in zip(
        FAULTS[ranks], run_ranks(broken_steps, ranks, FAULTS[ranks])[0], strict=True
    ):
        assert difference(step, whole_step(model)) > 1000 * GRADIENT, fault


class Logits(TorchDispatchMode):
    """The most tokens, and the most vocabulary entries, of any tensor of logits on this rank."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.tokens, self.seen = entries, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            shape = (out.to_local() if isinstance(out, DTensor) else out).shape
            if shape and shape[-1] in self.entries:
                self.tokens, self.seen = (
                    max(self.tokens, shape[:-1].numel()),
                    max(self.seen, shape[-1]),
                )
        return out


def largest_logits(rank, world_size):
    """The largest of a step without chunks, and with chunks of 30 tokens."""
    results = []
    for size in (0, 30):
        with distributed_mesh(mesh_config(tp=2)) as mesh, Logits((500, 250)) as logits:
            split_step(mesh, config(vocab_size=500), RecomputeConfig(loss_chunk_size=size))
        results.append((logits.tokens, logits.seen))
    return results


def test_chunks_of_the_loss_never_have_the_logits_of_all_tokens_or_of_the_whole_vocabulary():
    assert run_ranks(largest_logits, 2) == 2 * [[(BATCH * (LENGTH + 1), 250), (30, 250)]]


def of_another_kind(rank, world_size):
    with distributed_mesh(mesh_config(tp=2)) as mesh, torch.device("meta"):
        model = Decoder(GPTS[0])
        model.layers[1].mlp.router = torch.nn.Linear(24, 2)
        message = (
            r"split layers\.1\.mlp\.router\.weight, since MLP \(model/parts/feed_forward\.py\)"
        )
        with pytest.raises(ValueError, match=message):
            split_model(model, mesh.tp)


def test_a_module_whose_part_states_no_split_is_refused():
    run_ranks(of_another_kind, 2)


class Scaled(torch.nn.Module):
    """A part whose author forgot its words."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(3))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({}, r"mlp\.scale, since Scaled \(tests/parallel/tensor/test_split\.py\) has no entry"),
        ({"scale": "diagonals"}, r"gives scale the unknown word diagonals; use one of columns, "),
    ],
)
def test_a_part_without_a_word_or_with_an_unknown_one_is_refused(monkeypatch, splits, message):
    monkeypatch.setattr(Scaled, "SPLIT", splits, raising=False)
    with pytest.raises(ValueError, match=message):
        split_words(torch.nn.ModuleDict({"mlp": Scaled()}))


@pytest.mark.parametrize("model", [*FAMILY.values(), KDA, IMAGE])
def test_every_part_states_its_split_in_words_that_have_a_style(model):
    with torch.device("meta"):
        built = DiT(model) if model is IMAGE else build_model(replace(model, lora_rank=2))
    words = {word for part in split_words(built).values() for word in part.values()}
    assert words <= set(WORDS) == set(get_args(Split))
