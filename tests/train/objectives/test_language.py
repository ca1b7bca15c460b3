"""Next-token prediction over context-parallel ranks: every token once, padding never."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.loader import IGNORE_INDEX
from data.text.config import DataConfig
from kernels.loss import cross_entropy_sum
from model.config import ModelConfig
from model.registry import build_model
from parallel.context import METHODS, context_parallel, make_plan
from parallel.context.config import ContextConfig
from parallel.mesh import MeshConfig
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.data.text.corpora import write_documents
from train.attention import context_of
from train.config.entries import Config, TrainConfig
from train.objectives.language import NextToken, corpus_entropy

LENGTH = 13  # of which neither 2 nor 3 ranks have equal parts
LLAMA = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=29)
GPT = replace(LLAMA, model_type="gpt", max_position_embeddings=LENGTH)


def whole_batch():
    tokens = torch.randint(29, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 4:9] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "labels": labels}


def share(rank, world_size, method, shape):
    import torch.distributed as dist

    config = Config(
        context=ContextConfig(context_parallel_method=method),
        mesh=MeshConfig(device="cpu", context_parallel_size=world_size),
        train=TrainConfig(seq_length=LENGTH),
    )
    cp, attend = context_of(config, dist.group.WORLD)
    model = build_model(shape, attend)
    model.init_weights(3)
    objective = NextToken(cp, torch.device("cpu"))
    local = objective.local(whole_batch())
    return local, cp.positions, int(local["count"]), objective.loss_sum(model, local).item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "shape"), [(1, LLAMA), (3, LLAMA), (3, GPT)], ids=["1", "3", "3-gpt"])
def test_shares_make_up_the_batch_and_its_loss(method, size, shape):
    size = min(size, 2) if method == "ulysses" else size  # as many as the heads
    shares = run_ranks(share, size, method, shape)
    whole = whole_batch()
    seen = []
    for rank, (local, positions, _, _) in enumerate(shares):
        assert torch.equal(positions, make_plan(method, seq_len=LENGTH, size=size).positions(rank))
        for column, position in enumerate(positions.tolist()):
            if position < LENGTH:
                seen.append(position)
                assert torch.equal(local["tokens"][:, column], whole["tokens"][:, position])
                assert torch.equal(local["labels"][:, column], whole["labels"][:, position])
            else:
                assert (local["labels"][:, column] == IGNORE_INDEX).all(), "padding carries no loss"
    assert sorted(seen) == list(range(LENGTH))
    assert sum(count for _, _, count, _ in shares) == 2 * LENGTH - 5
    model = build_model(shape)
    model.init_weights(3)
    want = cross_entropy_sum(model(whole["tokens"]), whole["labels"])[0].item()
    assert sum(loss for *_, loss in shares) == pytest.approx(want, rel=1e-6)


def test_positions_of_padding_have_no_entry_of_their_own_in_a_table():
    """Negative control: the plan's positions as they are, where NextToken has those of the sequence alone."""
    model = build_model(GPT)
    model.init_weights(3)
    positions = make_plan("striped", seq_len=LENGTH, size=3).positions(1)
    tokens = torch.zeros(1, len(positions), dtype=torch.int64)
    assert positions.max() >= LENGTH
    with pytest.raises(IndexError):
        model(tokens, positions)


class Largest(TorchDispatchMode):
    """The most elements that any operator returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_loss_in_chunks_is_the_loss_and_never_has_all_logits(size, untied):
    vocabulary = 500  # logits of all tokens are by far the largest tensor, those of a few are not
    config = replace(LLAMA, vocab_size=vocabulary, untie_embeddings_and_output_weights=untied)
    model = build_model(config).double()
    model.init_weights(3)
    found, largest = [], []
    for chunk in (0, size):
        objective = NextToken(context_parallel("ring", seq_len=LENGTH), torch.device("cpu"), chunk)
        with Largest() as seen:
            loss = objective.loss_sum(model, objective.local(whole_batch()))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), *gradients])
        largest.append(seen.elements)
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()
    assert largest[0] == 2 * LENGTH * vocabulary
    assert largest[1] == max(min(size, 2 * LENGTH) * vocabulary, vocabulary * LLAMA.hidden_size)


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_linear_attention_of_the_backend_that_is_named(backend):
    shape = replace(LLAMA, model_type="transnormer", num_layers=2)
    train = TrainConfig(seq_length=LENGTH)
    config = Config(model=shape, context=ContextConfig(attention_backend=backend), train=train)
    cp, attend = context_of(config, None)
    assert torch.equal(cp.positions, torch.arange(LENGTH))
    found = []
    for model in (build_model(shape, attend), build_model(shape)):
        model.init_weights(3)
        found.append(model(whole_batch()["tokens"]))
    assert (found[0] - found[1]).abs().max() < 1e-6


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_a_backend_without_linear_attention_here_is_a_user_error(backend):
    context = ContextConfig(attention_backend=backend)
    config = Config(model=replace(LLAMA, model_type="transnormer"), context=context, mesh=MeshConfig(device="cpu"))
    with pytest.raises(UserError, match=backend):
        context_of(config, None)


def test_a_backend_that_the_device_lacks_is_a_user_error():
    context = ContextConfig(attention_backend="flash_attn_3")
    config = Config(context=context, mesh=MeshConfig(device="cpu"), train=TrainConfig(bf16=True))
    with pytest.raises(UserError, match="flash_attn_3"):
        context_of(config, None)


def test_entropy_of_one_corpus_and_of_no_blend(tmp_path):
    prefix = write_documents(tmp_path / "even", [[0, 1, 2, 3], [0, 1, 2, 3]])
    one = DataConfig(data_path=(prefix,))
    assert corpus_entropy(one)["unigram_entropy"] == pytest.approx(torch.tensor(4.0).log().item(), rel=1e-6)
    assert corpus_entropy(replace(one, data_path=("0.5", prefix, "0.5", prefix))) == {}


def test_validation_line_tells_what_frequencies_alone_would_give():
    objective = NextToken(context_parallel("ring", seq_len=LENGTH), torch.device("cpu"))
    line = objective.validation_line({"iteration": 50, "validation_loss": 2.0, "unigram_entropy": 5.5})
    assert line == (
        "validation loss at iteration 50: 2.0000 | perplexity: 7.39 | unigram entropy of the corpus: 5.5000"
    )
    assert "unigram" not in objective.validation_line({"iteration": 50, "validation_loss": 2.0})
    assert "perplexity" in objective.validation_line({"iteration": 1, "validation_loss": 1e6}), "no overflow"
