"""A model split over ranks is the whole model: its weights, loss, gradients, their norm and its checkpoints."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import sdpa
from model.language import LanguageModel
from model.registry import build_model
from parallel.data import init_parameters, shard_model
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig, recompute_layers
from parallel.tensor import styles as tensor_styles
from parallel.tensor.split import split_model
from runtime.ranks import run_ranks
from tests.parallel.split import (
    BATCH,
    GRADIENT,
    LENGTH,
    PLAIN,
    check_step,
    config,
    data,
    difference,
    keep_parts,
    mesh_config,
    split_step,
    train_and_save,
    weight_of,
    whole_step,
)
from tests.parallel.tiny import equal
from tests.parallel.unequal import gradient_norm_of
from train.optim import gradient_norm

# [ranks, tp, cp]; the rest is data parallel. Both key-value heads fit on tp 2; on tp 4 two ranks share each.
MESHES = {"tp2": (2, 2, 1), "tp2 cp2": (4, 2, 2), "tp2 dp2": (4, 2, 1), "tp4": (4, 4, 1)}


LEARNED = {"model_type": "gpt", "max_position_embeddings": LENGTH}
ROPE = {"model_type": "gpt", "position_embedding_type": "rope"}
ODD = {"hidden_size": 22, "kv_channels": 6}
"""A width that 4 ranks cannot share evenly."""
CHUNKS = RecomputeConfig(loss_chunk_size=5, ffn_chunk_size=7, recompute_granularity="full")
"""They divide neither the tokens of a rank nor those of a sequence."""
SUNK = config(window_size="5,0", window_attn_skip_freq="2", softmax_type="learnable")
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_scaling_original_max_position_embeddings": 8}
QWEN = config(add_qkv_bias=True, qk_layernorm=True, **YARN)
"""With all that Qwen2 and Qwen3 add to a LLaMA."""
LLAMAS = [config(), config(tied=True), SUNK, QWEN]
GPTS = [config(**LEARNED), config(tied=True, **LEARNED, **ODD), config(**ROPE), config(tied=True, **ROPE)]


def steps(rank, world_size, tp, cp, models, recompute):
    """A step of each model and its gradient norm."""
    found = []
    with distributed_mesh(mesh_config(tp, cp)) as mesh:
        for model_config in models:
            model, step = split_step(mesh, model_config, recompute)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            found.append((step, gradient_norm(model.parameters()).item()))
    return found


def check(mesh, models, recompute=PLAIN):
    ranks, tp, cp = MESHES[mesh]
    results = run_ranks(steps, ranks, tp, cp, models, recompute)
    for index, model_config in enumerate(models):
        want = whole_step(model_config)
        assert want.weights.keys() == want.gradients.keys()
        for step, found in (result[index] for result in results):
            check_step(step, want, model_config)
            assert found == pytest.approx(gradient_norm_of(want.gradients), rel=1e-6)


@pytest.mark.parametrize("mesh", ["tp2", "tp2 cp2", pytest.param("tp2 dp2", marks=pytest.mark.slow), "tp4"])
def test_one_step_is_that_of_one_process(mesh):
    check(mesh, [*LLAMAS, *GPTS])


@pytest.mark.parametrize("mesh", ["tp4", pytest.param("tp2 cp2", marks=pytest.mark.slow)])
def test_chunks_of_the_loss_and_of_the_feed_forward_are_the_same_step(mesh):
    check(mesh, [*LLAMAS[:2], *GPTS[:2]], CHUNKS)


@pytest.mark.slow
def test_what_is_kept_in_host_memory_comes_back_as_it_was_split():
    """Layers' inputs are DTensors here; of 4 layers, 2 are read from host memory."""
    check("tp2", [config(num_layers=4)], RecomputeConfig(recompute_granularity="full", recompute_offload=True))


def masks_seen(rank, world_size, granularity):
    """True for each attention of a step in bfloat16, recomputed ones too, that has the mask itself."""
    given, seen = object(), list[bool]()

    def attend(q, k, v, mask):
        seen.append(mask is given)
        return sdpa(q, k, v)

    with distributed_mesh(mesh_config(tp=2)) as mesh:
        with torch.device("meta"):
            model = build_model(config(), attend)
        split_model(model, mesh.tp, head_dim=config().head_dim, kv_heads=config().query_groups)
        recompute_layers(model.layers, RecomputeConfig(recompute_granularity=granularity))
        shard_model(model, model.layers, mesh.dp_cp, bf16=True)
        init_parameters(model, mesh.device, lambda name, shape, part: weight_of(config(), name, shape, part))
        model(data()[0][:, :16], None, None, given).to_local().float().logsumexp(-1).sum().backward()
    return seen


@pytest.mark.parametrize(("granularity", "forwards"), [("none", 1), ("selective", 2), ("full", 2)])
def test_the_mask_passes_tensor_parallelism_sharding_and_recomputation(granularity, forwards):
    layers = config().num_layers
    assert run_ranks(masks_seen, 2, granularity) == [[True] * forwards * layers] * 2


def a_bias_of_every_rank():
    """A row-parallel layer's bias is added up over tp."""
    tensor_styles.own_entries = DTensor.full_tensor


def parts_for_wholes():
    """Each rank's part of a gradient is taken for the whole, where every rank holds the value whole."""
    to_local = DTensor.to_local
    DTensor.to_local = lambda self, **_: to_local(self)


def broken_step(rank, world_size, fault, model, settings):
    if fault:
        fault()
    with distributed_mesh(mesh_config(tp=2)) as mesh:
        return split_step(mesh, model, **settings)[1]


@pytest.mark.parametrize(
    ("fault", "model", "ranks", "settings"),
    [
        (keep_parts, LLAMAS[0], 2, {}),
        (None, LLAMAS[0], 4, {"local_mean": True}),
        (a_bias_of_every_rank, GPTS[0], 2, {}),
        (parts_for_wholes, GPTS[0], 2, {}),
        (parts_for_wholes, GPTS[0], 2, {"recompute": CHUNKS}),
    ],
)
def test_what_is_summed_wrongly_over_tp_or_a_local_mean_would_be_seen(fault, model, ranks, settings):
    found = run_ranks(broken_step, ranks, fault, model, settings)[0]
    assert difference(found, whole_step(model)) > 1000 * GRADIENT


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
                self.tokens, self.seen = max(self.tokens, shape[:-1].numel()), max(self.seen, shape[-1])
        return out


def largest_logits(rank, world_size, size):
    with distributed_mesh(mesh_config(tp=2)) as mesh, Logits((500, 250)) as logits:
        split_step(mesh, config(vocab_size=500), RecomputeConfig(loss_chunk_size=size))
    return logits.tokens, logits.seen


def test_chunks_of_the_loss_never_have_the_logits_of_all_tokens_or_of_the_whole_vocabulary():
    tokens = BATCH * (LENGTH + 1)
    assert run_ranks(largest_logits, 2, 0) == 2 * [(tokens, 250)]
    assert run_ranks(largest_logits, 2, 30) == 2 * [(30, 250)]


def of_another_kind(rank, world_size):
    with distributed_mesh(mesh_config(tp=2)) as mesh, torch.device("meta"):
        model = LanguageModel(GPTS[0])
        model.layers[1].mlp.router = torch.nn.Linear(24, 2)
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.router\.weight, layers\.1\.mlp\.router\.bias;"):
            split_model(model, mesh.tp, head_dim=6, kv_heads=2)


def test_a_module_that_the_plan_does_not_know_is_refused():
    run_ranks(of_another_kind, 2)


@pytest.mark.parametrize(
    ("kind", "method", "trained"),
    [
        ("llama", "zigzag", "norm.weight"),
        ("transnormer", "lasp", "layers.0.attention.lrpe.theta"),
        pytest.param("linear_transformer", "lasp", "norm.weight", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_from_one_mesh_to_another_bit_for_bit(kind, method, trained, tmp_path):
    """From tp 2 x dp 2, where both shard one dimension, over tp 1 x cp 2 to tp 4, moments and all.

    LRPE's angles are one vector of all heads.
    """
    folders = [tmp_path / name for name in "abc"]
    model = config(model_type=kind, num_query_groups=2 if kind == "llama" else None)
    of_kind = partial(train_and_save, model_config=model, method=method)
    first = run_ranks(of_kind, 4, folders[0], 2, 1, None)[0]
    assert first["embedding.weight"].shape[0] == 37, "no padding is in it"
    second = run_ranks(of_kind, 2, folders[1], 1, 2, folders[0] / "iter_0000001")[0]
    third = run_ranks(of_kind, 4, folders[2], 4, 1, folders[1] / "iter_0000001")
    assert equal(first, second)
    assert all(equal(first, result) for result in third)
    assert first[f"{trained}/exp_avg"].all()
