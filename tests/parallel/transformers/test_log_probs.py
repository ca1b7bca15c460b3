"""Log-probabilities of whole rows over ranks against one process: values and every gradient."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kernels.loss import LOSS_CHUNK
from parallel.comparison import Float64Mode
from parallel.transformers import shard
from parallel.transformers.batch import IGNORED
from parallel.transformers.log_probs import gather_scores
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import averaged, difference, gradients, model_of

LENGTH = 23
LENGTHS = (23, 9, 16, 1)
"""Tokens of each padded row; the last has no token to score."""
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-6}
"""Bounds of log-probabilities and entropies, from those of one process in float64."""
BOUNDS_OF_LOSS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Bounds of the loss and gradients: ``loss_of`` squares sums of rows, which enlarges rounding. One
process in float32 is 1.0e-6 from float64, chunks of 3 tokens are 3.5e-6 from it on an AMD EPYC."""


def rows():
    """Rows padded at the right, but the third at the left, and labels of their later tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 40, (len(LENGTHS), LENGTH), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    mask[2] = mask[2].flip(0)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, :10] = IGNORED
    labels[1, :8] = IGNORED  # one token is scored
    labels[2, 7] = IGNORED  # transformers would predict this first token from padding
    return ids, labels, mask


def naive(model, ids, labels, mask):
    """Log-probabilities and entropies from whole logits of one process."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    log_probs = logits.log_softmax(-1)  # [B, T - 1, V]
    chosen = log_probs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    without_label = labels[:, 1:] == IGNORED
    return chosen.masked_fill(without_label, 0), entropy.masked_fill(without_label, 0)


def loss_of(log_probs, entropy):
    """A loss that is not a sum over tokens: of sums over rows, compared between rows."""
    sums = log_probs.sum(1)
    margin = 0.1 * (sums[0] - sums[2])
    weights = torch.linspace(1, 2, entropy.shape[1], dtype=entropy.dtype)
    return (
        -torch.nn.functional.logsigmoid(margin)
        + (sums[1] + 2) ** 2
        + (entropy @ weights).sin().sum()
    )


def right(model, cp):
    ids, labels, mask = rows()
    scores = cp.log_probs(model, ids, labels, attention_mask=mask)
    return [*scores, *averaged(loss_of(*scores), model)]


def in_ddp(model, cp):
    ids, labels, mask = rows()
    wrapped = DistributedDataParallel(model)
    scores = cp.log_probs(wrapped, ids, labels, attention_mask=mask)
    loss = loss_of(*scores)
    loss.backward()
    return [*scores, loss, *(x.grad for x in model.parameters())]


def fully_sharded(model, cp):
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids, labels, mask = rows()
    scores = cp.log_probs(model, ids, labels, attention_mask=mask)
    loss = loss_of(*scores)
    loss.backward()
    return [*scores, loss, *(x.grad.full_tensor() for x in model.parameters())]


def checkpointed(model, cp):
    """Layers are computed again in the backward, after another batch was made."""
    model.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64Mode())}
    )
    ids, labels, mask = rows()
    scores = cp.log_probs(model, ids, labels, attention_mask=mask)
    cp.log_probs(model, ids[:1, :9])
    return [*scores, *averaged(loss_of(*scores), model)]


def in_chunks(model, cp):
    """The logits of three tokens at a time."""
    previous = LOSS_CHUNK["cpu"]
    LOSS_CHUNK["cpu"] = 3 * 40
    try:
        return right(model, cp)
    finally:
        LOSS_CHUNK["cpu"] = previous


def summed_per_rank(model, cp):
    """Wrong: each rank has the loss of the log-probabilities of its own tokens only."""
    ids, labels, mask = rows()
    batch = cp.batch(ids, labels, attention_mask=mask)
    logits = model(**batch.inputs).logits.log_softmax(-1)
    chosen = logits.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    scores = {"log_probs": chosen.masked_fill(batch.labels == IGNORED, 0)}
    whole = gather_scores(scores, batch)["log_probs"]
    local = torch.zeros_like(batch.whole.is_token, dtype=whole.dtype)
    is_mine = torch.zeros(batch.whole.cu_seqlens[-1], dtype=whole.dtype)
    positions = batch.context.positions
    is_mine[positions[positions < len(is_mine)]] = 1
    local[batch.whole.is_token] = is_mine
    return averaged(loss_of(whole * local[:, :-1], torch.zeros_like(whole)), model)


def labels_cut_otherwise(model, cp):
    """Wrong: the labels are cut into halves in order, and the tokens by the method."""
    ids, labels, mask = rows()
    batch = cp.batch(ids, labels, attention_mask=mask)
    shifted = batch.whole.tokens["labels"]
    size = batch.labels.shape[1]
    padded = torch.nn.functional.pad(
        shifted, (0, size * cp.group.size() - shifted.shape[1]), value=IGNORED
    )
    rank = dist.get_rank()
    wrong = padded[:, rank * size : (rank + 1) * size]
    logits = model(**batch.inputs).logits.log_softmax(-1)
    chosen = logits.gather(-1, wrong.clamp(min=0)[..., None])[..., 0]
    scores = {"log_probs": chosen.masked_fill(wrong == IGNORED, 0)}
    whole = gather_scores(scores, batch)["log_probs"]
    return averaged(loss_of(whole, torch.zeros_like(whole)), model)


def unscaled(model, cp):
    """Wrong: the gradient of a rank's tokens without the number of ranks."""
    loss, *local = right(model, cp)[2:]
    return [loss, *(x / cp.group.size() for x in local)]


def truth_of(family, heads, dtype, entropy=True):
    with Float64Mode() if dtype == torch.float64 else nullcontext():
        model = model_of(family, heads, dtype)
        scores = list(naive(model, *rows()))
        if not entropy:
            scores[1] = torch.zeros_like(scores[1])
        loss = loss_of(*scores)
        return [*(x.detach() for x in scores), loss.detach(), *gradients(loss, model)]


def scored(rank, world_size, cells):
    """Errors of each cell: of log-probabilities, of entropies, and of the loss and gradients."""
    errors = []
    for way, family, method, dtype in cells:
        with Float64Mode() if dtype == torch.float64 else nullcontext():
            model = model_of(family, world_size, dtype)
            cp = shard(model, dist.group.WORLD, method=method)
            log_probs, entropy, *mine = way(model, cp)
        expected = [x.double() for x in truth_of(family, world_size, torch.float64)]
        same = [torch.empty_like(mine[0]) for _ in range(world_size)]
        dist.all_gather(same, mine[0].detach())
        assert all(torch.equal(x, same[0]) for x in same)
        for x, y in ((log_probs, expected[0]), (entropy, expected[1])):
            assert x.shape == y.shape == (len(LENGTHS), LENGTH - 1)
            errors.append(float((x.detach().double() - y).norm() / y.norm()))
        errors.append(difference([x.detach() for x in mine], expected[2:]))
    return errors


CELLS = {
    2: (
        (right, "Llama", "exchange", torch.float64),
        (in_chunks, "Qwen3", "zigzag", torch.float64),
        (in_ddp, "Gemma3", "exchange", torch.float64),
        (checkpointed, "Llama", "ulysses", torch.float64),
        (fully_sharded, "Llama", "exchange", torch.float64),
        (in_chunks, "Qwen3", "zigzag", torch.float32),
    ),
    3: (
        (right, "Qwen2", "exchange", torch.float64),
        (in_chunks, "Qwen3_5", "zigzag", torch.float64),
        (right, "GptOss", "ring", torch.float64),
        (in_ddp, "Llama", "exchange", torch.float32),
    ),
}


@pytest.mark.parametrize("world_size", CELLS)
def test_log_probs_and_gradients_equal_one_process(world_size):
    cells = CELLS[world_size]
    errors = run_ranks(scored, world_size, cells)[0]
    for index, (way, family, method, dtype) in enumerate(cells):
        log_probs, entropy, loss = errors[3 * index : 3 * index + 3]
        cell = (way.__name__, family, method, dtype)
        assert max(log_probs, entropy) < BOUNDS[dtype], cell
        assert loss < BOUNDS_OF_LOSS[dtype], cell


def behind_the_backbone(rank, world_size):
    """Largest error of a model with a dense layer and a norm between backbone and output."""
    from transformers import RobertaConfig, RobertaForCausalLM

    def model():
        torch.manual_seed(0)
        config = RobertaConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
            is_decoder=True,
            pad_token_id=1,
            attention_probs_dropout_prob=0.0,
        )
        return RobertaForCausalLM(config).double().eval()

    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    sharded, whole = model(), model()
    sharded.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    scores = shard(sharded, dist.group.WORLD).log_probs(sharded, ids)
    mine = (scores.log_probs.sum(1) ** 2).sum()
    mine.backward()
    log_probs, _ = naive(whole, ids, ids, torch.ones_like(ids))
    expected = (log_probs.sum(1) ** 2).sum()
    expected.backward()

    assert sharded.unused.grad is None
    sharded_gradients = []
    gradients_of_one = []
    for name, parameter in whole.named_parameters():
        gradient = sharded.get_parameter(name).grad
        dist.all_reduce(gradient)
        sharded_gradients.append(gradient / world_size)
        gradients_of_one.append(parameter.grad)
    return difference([mine.detach(), *sharded_gradients], [expected.detach(), *gradients_of_one])


def test_parameters_behind_the_backbone_have_gradients():
    assert max(run_ranks(behind_the_backbone, 2)) < BOUNDS[torch.float64]


def mistaken(rank, world_size):
    """Errors of deliberate mistakes."""
    errors = []
    for way in (summed_per_rank, labels_cut_otherwise, unscaled):
        with Float64Mode():
            model = model_of("Llama", world_size)
            mine = way(model, shard(model, dist.group.WORLD))
        truth = truth_of("Llama", world_size, torch.float64, entropy=way is unscaled)[2:]
        errors.append(difference([x.detach() for x in mine], truth))
    return errors


def test_mistakes_are_seen():
    assert min(run_ranks(mistaken, 2)[0]) > 1e-2


def with_dropout(rank, world_size):
    """Compare masks, the next random numbers and log-probabilities between ranks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(model_of("Llama", world_size, torch.float32), config)
    cp = shard(model, dist.group.WORLD)
    drawn = []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout) and layer.p == 0.5:
            layer.register_forward_hook(lambda module, x, out: drawn.append((out == 0)[0, :5]))
    ids = torch.full((1, 20), 7)
    first, second = (cp.log_probs(model, ids).log_probs.detach() for _ in range(2))
    assert not torch.equal(first, second)

    def equal(x):
        others = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(others, x.contiguous())
        return all(torch.equal(other, others[0]) for other in others)

    masks = torch.cat([x.flatten() for x in drawn]).byte()
    return equal(masks), equal(torch.rand(9)), equal(first)


def test_ranks_drop_other_tokens_and_draw_the_same_numbers_afterwards():
    pytest.importorskip("peft")
    assert run_ranks(with_dropout, 2) == [(False, True, True)] * 2


def test_packed_documents_are_scored_as_rows():
    """In one process: documents of one row, by their lengths, have the scores of separate rows."""
    with Float64Mode():
        model = model_of("Llama", 2)
        ids, _, _ = rows()
        cp = shard(model)
        first = cp.log_probs(model, ids[:1, :9]).log_probs
        second = cp.log_probs(model, ids[1:2, :7]).log_probs
        packed = torch.cat([ids[0, :9], ids[1, :7]])[None]
        together = cp.log_probs(model, packed, documents=(9, 7)).log_probs
    expected = torch.cat([first[0], torch.zeros(1), second[0]])[None]
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)


def test_wrong_calls_are_refused():
    model = model_of("Llama", 2)
    cp = shard(model)
    ids = torch.arange(3, 12)[None]
    with pytest.raises(UserError, match="the model given to log_probs is not the one"):
        cp.log_probs(model_of("Llama", 2), ids)
    with (
        cp.paused(),
        pytest.raises(UserError, match=r"within paused\(\), .*; call log_probs outside paused"),
    ):
        cp.log_probs(model, ids)
    cp.log_probs(model, ids)
    for others in ({"inputs_embeds": torch.ones(1)}, {"pixel_values": torch.ones(1)}):
        with pytest.raises(UserError, match="take only position_ids, attention_mask and documents"):
            model(input_ids=ids, labels=ids, fused_lm_head=True, **others)
    with pytest.raises(
        UserError, match="1 positional arguments; give input_ids, labels and others"
    ):
        model(ids, labels=ids, fused_lm_head=True)
