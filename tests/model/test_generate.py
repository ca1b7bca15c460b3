import pytest
import torch

from model.config import ModelConfig
from model.generate import DivergedError, generate
from model.llama import Llama
from model.registry import build_model

PROMPT = torch.tensor([[1, 2, 3], [7, 8, 9]])


class Table(torch.nn.Module):
    """Logits that depend on the last token alone: the distribution that generate draws from is known."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def hidden(self, tokens, positions=None):
        return self.logits[tokens]

    def project(self, hidden):
        return hidden


@pytest.fixture
def llama():
    model = Llama(ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=20))
    model.init_weights(0)
    return model


def test_greedy_takes_the_likeliest_of_a_full_forward(llama):
    out = generate(llama, PROMPT, 5, temperature=0)
    assert out.shape == (2, 8)
    assert torch.equal(out[:, :3], PROMPT)
    assert torch.equal(out[:, 3:], llama(out).argmax(-1)[:, 2:-1])
    assert torch.equal(out, generate(llama, PROMPT, 5, temperature=1e-30))
    assert torch.equal(out, generate(llama, PROMPT, 5, temperature=7.0, top_k=1))


def test_generator_makes_samples_repeatable(llama):
    one, same, other = (
        generate(llama, PROMPT, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 99)])
def test_frequencies_are_those_of_the_distribution(temperature, top_k):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    kept = logits.where(logits >= logits.sort(descending=True).values[min(top_k or 5, 5) - 1], float("-inf"))
    expected = (kept / temperature).softmax(-1)
    draws = generate(
        Table(logits.expand(5, 5)),
        torch.zeros(20_000, 1, dtype=torch.long),
        1,
        temperature,
        top_k,
        torch.Generator().manual_seed(0),
    )[:, 1]
    found = draws.bincount(minlength=5) / len(draws)
    assert (found - expected).abs().max() < 0.015  # four standard deviations of a frequency of 1/2
    assert (found[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PROMPT[:, :0], {}, "no tokens"),
        (PROMPT, {"temperature": -1.0}, "temperature is -1.0"),
        (PROMPT, {"top_k": 0}, "top_k is 0"),
    ],
)
def test_bad_arguments(llama, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(llama, prompt, 1, **options)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_named(temperature, value):
    logits = torch.ones(5, 5)
    logits[2, 1] = value
    with pytest.raises(DivergedError, match="logits of the next token are not finite"):
        generate(Table(logits), torch.tensor([[0], [2]]), 1, temperature)
    assert generate(Table(logits), torch.tensor([[0], [1]]), 1, temperature).shape == (2, 2)


KINDS = {
    "transnormer": {"model_type": "transnormer"},
    "linear_transformer": {"model_type": "linear_transformer"},
    "hybrid": {"model_type": "transnormer", "softmax_every": 2},
    "hybrid, window and sinks": {
        "model_type": "transnormer",
        "softmax_every": 2,
        "window_size": "40,0",
        "softmax_type": "learnable",
    },
}


@pytest.fixture(params=KINDS)
def recurrent(request):
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 20}
    config = ModelConfig(**sizes, **KINDS[request.param])
    model = build_model(config).double()
    model.init_weights(0)
    return model


def test_a_state_goes_on_where_the_parallel_form_is(recurrent):
    """Prompts and continuations of any length, in double precision; a state holds no more for it, a cache does."""
    tokens = torch.randint(20, (2, 150), generator=torch.Generator().manual_seed(1))
    want = recurrent.hidden(tokens)
    states, parts, start, sizes = [None] * 3, [], 0, []
    window = recurrent.config.window(1)  # the hybrids' softmax layer; its cache holds no more than the next token sees
    seen = 150 if window is None else window[0]
    for stop in (1, 70, 71, 72, 150):
        parts.append(recurrent.hidden(tokens[:, start:stop], torch.arange(start, stop), states=states))
        found = [state.numel() for state in states if state.ndim == 4]  # of linear attention
        sizes = sizes or found
        assert sizes == found
        assert all(state.shape == (2, 2, min(stop, seen), 4, 8) for state in states if state.ndim == 5)
        start = stop
    assert (torch.cat(parts, 1) - want).norm() < 1e-12 * want.norm()
    assert len(sizes) == (3 if recurrent.config.softmax_every is None else 2)
    wrong = recurrent.hidden(tokens[:, 1:2], torch.arange(1, 2), states=[None] * 3)
    assert (wrong - want[:, 1:2]).norm() > 1e-3 * want[:, 1:2].norm()  # negative control: without what came before


@pytest.mark.parametrize("scale", [1e200, float("nan")])
def test_weights_that_overflow_are_named(recurrent, scale):
    """With the first, the norms of a TransNormer divide by infinity, and leave noughts behind."""
    with torch.no_grad():
        recurrent.embedding.weight.mul_(scale)
    with pytest.raises(DivergedError, match=r"not finite|all 0, since a norm overflowed"):
        generate(recurrent, PROMPT, 1)


def test_recurrent_generation_reads_each_token_once_and_takes_what_the_parallel_form_would(recurrent, monkeypatch):
    read, hidden = [], recurrent.hidden

    def counted(tokens, positions=None, states=None):
        read.append(tokens.shape[1])
        return hidden(tokens, positions, states=states)

    monkeypatch.setattr(recurrent, "hidden", counted)
    out = generate(recurrent, PROMPT, 40, temperature=0)
    assert read == [3] + 39 * [1]
    monkeypatch.undo()
    assert torch.equal(out[:, 3:], recurrent(out).argmax(-1)[:, 2:-1])
