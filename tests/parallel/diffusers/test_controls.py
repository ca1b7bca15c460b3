"""Faults of public trainers: each must be seen in the gradients; most are not in the loss."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from parallel.comparison import Float64Mode
from parallel.diffusers import hooks, shard, split
from parallel.diffusers.families import FAMILIES
from runtime.ranks import run_ranks
from tests.parallel.diffusers.cases import CASES, errors, gradients, inputs_of, loss_of, model_of

pytest.importorskip("diffusers", reason="shards the models of diffusers")

SEEN = 1e-3


class SumOfReplicas(torch.autograd.Function):
    """A cut whose backward gathers, as Megatron's scatter: replicated parts count once a rank."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def replicas_summed(monkeypatch, rank):
    """The tokens that enter the first block are summed over the ranks in the backward."""
    original = split.TokenSplit._cut

    def cut(self, name, x, tokens):
        if name == "hidden_states" and x.shape[1] == self.whole_len["image"]:
            x = SumOfReplicas.apply(x)
        return original(self, name, x, tokens)

    monkeypatch.setattr(split.TokenSplit, "_cut", cut)


def padding_attended(monkeypatch, rank):
    """The text's padding is attended."""
    monkeypatch.setattr(split.TokenSplit, "read_mask", lambda self, name, mask: None)


class SumWithoutAdjoint(torch.autograd.Function):
    """A sum over ranks whose backward is a rank's own gradient."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def own_gradient_gathered(monkeypatch, rank):
    """The gather's backward is a rank's own gradient, and gradients are averaged all the same."""
    monkeypatch.setattr(split, "SumOverRanks", SumWithoutAdjoint)


def other_noise(monkeypatch, rank):
    """A rank draws noise of its own, and nobody compares."""
    monkeypatch.setattr(hooks, "check_same", lambda arguments, group: None)


CONTROLS = {
    "none": ("hunyuan", None),
    "replicated parts summed over ranks": ("wan", replicas_summed),
    "padding attended": ("hunyuan", padding_attended),
    "a gather with a rank's own gradient as backward": ("wan", own_gradient_gathered),
    "another noise on a rank": ("wan", other_noise),
    "the loss divided twice": ("wan", None),
    "gradients summed": ("wan", None),
}


def control_errors(rank, world_size):
    """The largest error of a gradient with each fault, the number of wrong tensors, and of all."""
    results = {}
    for control, (name, plant) in CONTROLS.items():
        with Float64Mode(), pytest.MonkeyPatch.context() as monkeypatch:
            case = CASES[name]
            model = model_of(case, torch.float64)
            inputs = inputs_of(case, torch.float64)
            expected = gradients(loss_of(model, inputs), model)
            if plant is not None:
                plant(monkeypatch, rank)
            if plant is other_noise:
                inputs["hidden_states"] = inputs["hidden_states"] + 0.1 * rank
            shard(model, dist.group.WORLD, method="ring")
            loss = loss_of(model, inputs)
            if control == "the loss divided twice":
                loss = loss / world_size
            mean = gradients(loss, model, dist.group.WORLD)
            if control == "gradients summed":
                mean[1:] = [world_size * x for x in mean[1:]]
        wrong = errors(mean, expected, model, 1e-12)
        worst = max((x for tensor, x in wrong.items() if tensor != "loss"), default=0.0)
        results[control] = (worst, len(wrong), len(mean))
    return results


def test_every_fault_is_seen_in_the_gradients():
    results = run_ranks(control_errors, 3)[0]
    assert results.pop("none")[:2] == (0.0, 0)
    assert {control: worst for control, (worst, *_) in results.items() if worst < SEEN} == {}
    _, wrong, tensors = results["replicated parts summed over ranks"]
    assert 0 < wrong < tensors / 4  # the embedders alone: a check of some tensors would miss it


def ring_of_diffusers(rank, world_size):
    """Errors of out, dq, dk and dv of diffusers' own ring, whose blocks are computed naively."""
    from diffusers.models.attention_dispatch import TemplatedRingAttention
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ring",))
    settings = SimpleNamespace(
        _ring_mesh=mesh, _ring_local_rank=rank, ring_degree=world_size, convert_to_fp32=False
    )
    config = SimpleNamespace(context_parallel_config=settings)

    torch.manual_seed(0)
    whole = [torch.randn(1, 6 * world_size, 2, 4, dtype=torch.float64) for _ in range(4)]
    local = [x.chunk(world_size, 1)[rank].clone() for x in whole]
    q, k, v = (x.requires_grad_() for x in local[:3])
    out = TemplatedRingAttention.apply(
        q, k, v, None, 0.0, False, None, False, False, block_forward, block_backward, config
    )
    out.backward(local[3])

    exact = [x.clone().requires_grad_() for x in whole[:3]]
    reference = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in exact))
    reference = reference.transpose(1, 2)
    reference.backward(whole[3])
    names = ("out", "dq", "dk", "dv")
    pairs = zip((out, q.grad, k.grad, v.grad), (reference, *(x.grad for x in exact)), strict=True)
    computed = {}
    for name, (mine, expected) in zip(names, pairs, strict=True):
        part = expected.chunk(world_size, 1)[rank]
        computed[name] = float(((mine - part).norm() / part.norm()).detach())
    return computed


def block_forward(ctx, q, k, v, *args, _save_ctx=True, **kwargs):
    """One block of attention and its log-sum-exp, as diffusers' operators return them."""
    if _save_ctx:
        ctx.save_for_backward(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)  # [B, T, H]
    return torch.einsum("bqhk,bkhd->bqhd", (scores - lse[..., None]).exp(), v), lse


def block_backward(ctx, grad_out, *, query, key, value, out, lse):
    """The block's gradients under the whole softmax's log-sum-exp."""
    scale = query.shape[-1] ** -0.5
    scores = torch.einsum("bqhd,bkhd->bqhk", query, key) * scale
    weights = (scores - lse[..., None]).exp()
    grad_weights = torch.einsum("bqhd,bkhd->bqhk", grad_out, value)
    grad_scores = weights * (grad_weights - (grad_out * out).sum(-1)[..., None])
    grad_query = scale * torch.einsum("bqhk,bkhd->bqhd", grad_scores, key)
    grad_key = scale * torch.einsum("bqhk,bqhd->bkhd", grad_scores, query)
    grad_value = torch.einsum("bqhk,bqhd->bkhd", weights, grad_out)
    return grad_query, grad_key, grad_value


def test_the_ring_of_diffusers_is_wrong_from_three_ranks_on():
    """If this fails, a release of diffusers has mended it: take the claim from the page."""
    two, three = (run_ranks(ring_of_diffusers, ranks) for ranks in (2, 3))
    assert all(error < 1e-12 for result in two for error in result.values())
    assert all(result["out"] < 1e-12 and result["dq"] < 1e-12 for result in three)
    assert min(max(result["dk"], result["dv"]) for result in three) > 0.5


def test_families_name_arguments_that_the_blocks_have():
    """A renamed argument of a later release would be given whole."""
    import inspect

    import diffusers

    blocks_have: dict[int, set[str]] = {}
    for name, case in CASES.items():
        model = case.build()
        family = FAMILIES[type(model).__name__]
        assert hasattr(diffusers, type(model).__name__)
        for blocks, arguments in family.blocks.items():
            for block in getattr(model, blocks):
                parameters = inspect.signature(block.forward).parameters
                assert "hidden_states" in parameters, name
                blocks_have.setdefault(id(arguments), set()).update(parameters)
        inputs = inspect.signature(type(model).forward).parameters
        assert {*family.inputs, *family.refused} <= set(inputs), name

    # Kinds of blocks share a table, so each argument is one of at least one kind.
    for family in FAMILIES.values():
        for arguments in family.blocks.values():
            assert set(arguments) <= blocks_have[id(arguments)]
