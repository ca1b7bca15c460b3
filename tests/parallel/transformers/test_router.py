"""The router's loss of models with experts over ranks, against transformers in one process.

One process runs transformers' own forward, loss and router's loss on the whole batch.
"""

from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from parallel.comparison import Float64Mode, mean_loss
from parallel.transformers import router, shard
from parallel.transformers.batch import IGNORED
from parallel.transformers.router import RouterTerm, load_of
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import (
    EXPERTS,
    averaged,
    data_parallel,
    errors,
    fully_sharded,
    gradients,
    model_of,
    tokens,
)

WEIGHT = 0.2
"""Weight of the router's loss, so large that an error in it is one of every gradient."""
SPREAD = 0.2
"""Standard deviation of the numbers that are added to the routers' weights, to unbalance them."""
FAMILIES = {
    "Qwen3Moe": {},
    "GptOss": {},
    "Mixtral": {**EXPERTS, "experts_implementation": "eager"},
}
LENGTH, LENGTHS = 47, (9, 1, 20, 17)
"""Tokens and documents of a packed sequence; no number of ranks divides it without padding."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


def precision(dtype):
    return Float64Mode() if dtype == torch.float64 else nullcontext()


def routed(family, heads, dtype=torch.float64):
    """A model with a router's loss, whose routers are far from balanced."""
    model = model_of(
        family,
        heads,
        dtype,
        output_router_logits=True,
        router_aux_loss_coef=WEIGHT,
        **FAMILIES[family],
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.bias")):
                parameter += SPREAD * torch.randn(parameter.shape, generator=generator)
    return model


def packed():
    """A packed batch as transformers takes it: positions restart in each document.

    A document's first token has no loss.
    """
    ids, labels = tokens(LENGTH)
    lengths = torch.tensor(LENGTHS)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(LENGTH) - starts.repeat_interleave(lengths)
    return {
        "input_ids": ids,
        "labels": labels.masked_fill(positions == 0, IGNORED),
        "position_ids": positions[None],
    }


def padded(seed=3):
    """Three rows of which two have padding, as a collator makes them."""
    lengths = torch.tensor([[17], [9], [4]])
    ids, labels = (x.view(3, 17) for x in tokens(51, seed))
    mask = (torch.arange(17) < lengths).long()
    return {
        "input_ids": ids * mask,
        "labels": labels.masked_fill(mask == 0, IGNORED),
        "attention_mask": mask,
    }


def each_alone(family, heads, batch, lengths, dtype=torch.float64):
    """The naive twin of a packed batch: each document alone, and all their routers' logits.

    Of transformers' models, some ignore where documents begin, unless they have flash attention.
    """
    with precision(dtype):
        model = routed(family, heads, dtype)
        logits, labels, router_logits = [], [], []
        for ids, targets in zip(
            batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True
        ):
            output = model(ids, use_cache=False)
            logits.append(output.logits[0, :-1])
            labels.append(targets[0, 1:])
            router_logits.append(output.router_logits)
        gathered = tuple(torch.cat(layer) for layer in zip(*router_logits, strict=True))
        balance = import_module(type(model).__module__).load_balancing_loss_func
        loss = F.cross_entropy(torch.cat(logits), torch.cat(labels), ignore_index=IGNORED)
        loss = loss + WEIGHT * balance(gathered, model.num_experts, model.num_experts_per_tok)
        return [x.double() for x in (loss.detach(), *gradients(loss, model))]


def one_process(family, heads, micro_batches, dtype=torch.float64):
    """The loss and gradients of transformers for micro-batches in sequence, as its trainer has."""
    count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in micro_batches)
    with precision(dtype):
        model = routed(family, heads, dtype)
        loss = sum(
            model(**batch, use_cache=False, num_items_in_batch=count).loss
            for batch in micro_batches
        )
        return [x.double() for x in (loss.detach(), *gradients(loss, model))]


def in_both(twin, dtype):
    """A twin's loss and gradients in a dtype, and in float64."""
    return [twin(x) for x in sorted({dtype, torch.float64}, key=str)]


def relative_error(mine, truths):
    """The largest error of a tensor; each is its error against the truth that is nearest."""
    return max(map(min, zip(*(errors(mine, truth) for truth in truths), strict=True)))


def on_ranks(family, heads, micro_batches, dtype=torch.float64, group=None, loss_of=None):
    """The same over the ranks of a group."""
    with precision(dtype):
        model = routed(family, heads, dtype)
        cp = shard(model, group or dist.group.WORLD)
        batches = [cp.batch(**batch) for batch in micro_batches]
        count = torch.tensor([int((x.labels != IGNORED).sum()) for x in batches]).sum()
        dist.all_reduce(count)
        losses = []
        for batch in batches:
            output = model(**batch.inputs)
            losses.append((loss_of or plain_loss)(cp, output, batch, count))
        return averaged(sum(losses), model)


def plain_loss(cp, output, batch, count):
    return cp.loss(output, batch, count)


def mean_of_products(cp, output, batch, count):
    """Wrong: the mean of the ranks' own router's losses, as transformers has them."""
    without = cp.loss(output, batch, count, router_aux_loss_coef=0.0)
    return without + WEIGHT * mean_loss(output.aux_loss, 1, dist.group.WORLD)


def padding_counted(cp, output, batch, count):
    """Wrong: the tokens that the layout adds are counted."""
    with patch.object(router, "real_tokens", lambda context: len(context.positions)):
        return cp.loss(output, batch, count)


def compared(world_size):
    """The errors of all families; rank 0 computes the twins."""
    results = {}
    for family, dtype in product(FAMILIES, BOUNDS):
        of_packed = partial(each_alone, family, world_size, packed(), LENGTHS)
        of_padded = partial(one_process, family, world_size, [padded()])
        of_two = partial(one_process, family, world_size, [padded(), padded(seed=4)])
        cases = {
            "packed": ([packed()], of_packed),
            "padded": ([padded()], of_padded),
            "micro-batches": ([padded(), padded(seed=4)], of_two),
        }
        for name, (micro_batches, twin) in cases.items():
            mine = on_ranks(family, world_size, micro_batches, dtype)
            if dist.get_rank() == 0:
                results[family, name, dtype] = relative_error(mine, in_both(twin, dtype))
    return results


def controls(world_size):
    """The errors of wrong losses."""
    results = {}
    truth = each_alone("Qwen3Moe", world_size, packed(), LENGTHS)
    for loss_of in (mean_of_products, padding_counted):
        mine = on_ranks("Qwen3Moe", world_size, [packed()], loss_of=loss_of)
        results[loss_of.__name__] = relative_error(mine, [truth])
    return results


def checkpointed(model, cp, batch):
    """Layers are computed again in the backward, whose routers are not recorded again."""
    model.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64Mode())}
    )
    return averaged(cp.loss(model(**batch.inputs), batch), model)


def wrapped(world_size):
    """The errors of models that are wrapped."""
    results = {}
    for family, way in product(
        ("Qwen3Moe", "GptOss"), (checkpointed, data_parallel, fully_sharded)
    ):
        truth = each_alone(family, world_size, packed(), LENGTHS)
        with Float64Mode():
            model = routed(family, world_size)
            cp = shard(model, dist.group.WORLD)
            mine = way(model, cp, cp.batch(**packed()))
        results[family, way.__name__] = relative_error(mine, [truth])
    return results


def checked(world_size):
    """Reports of the model's own check, the last with the ranks' loads not added up."""
    reports = []
    for dtype in BOUNDS:
        with precision(dtype):
            model = routed("Qwen3Moe", world_size, dtype)
            cp = shard(model, dist.group.WORLD)
            batch = cp.batch(**packed())
            reports.append(cp.check(model, batch))
            if dtype == torch.float64:
                loss = float(cp.loss(model(**batch.inputs), batch))
                without = float(cp.loss(model(**batch.inputs), batch, router_aux_loss_coef=0))
    with patch.object(RouterTerm, "_measure", measured_alone):
        reports.append(cp.check(model, batch))
    return reports, loss, without


def measured_alone(term, model):
    """Wrong: the load of this rank's tokens only."""
    with torch.no_grad():
        return sum(term._router.load(model(**x), term._tokens) for x in term._forwards)


def everything(rank, world_size):
    return {
        "compared": compared(world_size),
        "controls": controls(world_size),
        "wrapped": wrapped(world_size) if world_size == 2 else {},
        "checked": checked(world_size) if world_size == 2 else None,
    }


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return run_ranks(everything, request.param)[0]


def test_loss_and_every_gradient_equal_one_process(results):
    assert len(results["compared"]) == 18
    wrong = {case: x for case, x in results["compared"].items() if not x < BOUNDS[case[2]]}
    assert wrong == {}


def test_a_mean_of_the_ranks_losses_and_counted_padding_are_seen(results):
    assert min(results["controls"].values()) > 1e-2


def test_checkpointed_and_wrapped_models_equal_one_process(results):
    assert {case: x for case, x in results["wrapped"].items() if not x < 1e-12} == {}


def test_a_models_own_check_has_the_routers_loss(results):
    if results["checked"] is None:
        return
    (exact, right, wrong), loss, without = results["checked"]
    assert exact.right
    assert max(row.ranks for row in exact.rows) < 1e-12
    assert exact.sharded == pytest.approx(loss, rel=1e-12)
    assert loss - without > WEIGHT  # a balanced router has its number of choices, 2
    assert right.right
    assert not wrong.right


def two_groups(rank, world_size):
    """Two micro-batches of each of two groups of two ranks; one process has both groups' rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    micro_batches = [padded(seed=5 + 2 * i + rank // 2) for i in range(2)]
    whole = []
    for i in range(2):
        rows = [padded(seed=5 + 2 * i + group) for group in range(2)]
        whole.append({name: torch.cat([x[name] for x in rows]) for name in rows[0]})

    results = {}
    for family in ("Qwen3Moe", "GptOss"):
        truth = one_process(family, 2, whole)
        for loss_of in (plain_loss, mean_of_products):
            mine = on_ranks(family, 2, micro_batches, group=mesh["cp"].get_group(), loss_of=loss_of)
            results[family, loss_of.__name__] = relative_error(mine, [truth])
    return results


def test_groups_have_the_loss_of_one_process_with_all_their_rows():
    for (family, name), error in run_ranks(two_groups, 4)[0].items():
        assert (error < 1e-12) == (name == "plain_loss"), family
        assert error < 1e-12 or error > 1e-2


def test_outputs_without_the_routers_loss_are_refused():
    model = routed("Qwen3Moe", 2, torch.float32).eval()
    cp = shard(model)
    batch = cp.batch(**packed())
    output = model(**batch.inputs)
    with pytest.raises(UserError, match=r"give loss the model's whole output instead of its log"):
        cp.loss(output.logits, batch)

    model.config.output_router_logits = False
    without = model(**batch.inputs)
    assert without.router_logits is None
    expected = cp.loss(output, batch) - WEIGHT * cp.router_loss(output, batch)
    torch.testing.assert_close(cp.loss(without, batch), expected.to(without.logits.dtype))

    output.router_logits = tuple(x[None] for x in output.router_logits)
    with pytest.raises(UserError, match=r"^router_logits have the shape \(1, 47, 4\), but"):
        cp.loss(output, batch)


def test_reentrant_checkpointing_without_a_gradient_is_refused():
    model = routed("Qwen3Moe", 2, torch.float32).train()
    cp = shard(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    batch = cp.batch(**packed())
    output = model(**batch.inputs)
    with pytest.raises(UserError, match=r"give gradient_checkpointing_kwargs={'use_reentrant': F"):
        cp.loss(output, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cp.loss(model(**batch.inputs), batch).backward()


def test_another_formula_is_refused():
    model = routed("Qwen3Moe", 2, torch.float32)
    cp = shard(model)
    batch = cp.batch(**packed())
    output = model(**batch.inputs)
    output.aux_loss = output.aux_loss * 1.05
    with pytest.raises(UserError, match=r"^Qwen3MoeForCausalLM's router has the loss 2\.\d+, but"):
        cp.loss(output, batch)


def test_the_first_choices_of_equal_probabilities_are_those_of_transformers():
    """In bfloat16, where many probabilities are equal."""
    balance = import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    logits = torch.randn(300, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    layers = (logits, logits.flip(0) / 8)
    choices, sums = load_of(layers, 2)
    assert choices.sum() == 2 * 600
    loss = 8 * (choices * sums).sum() / 600**2
    assert float(loss) == pytest.approx(float(balance(layers, 8, 2)), rel=1e-6)
