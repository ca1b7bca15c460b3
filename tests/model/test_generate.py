from dataclasses import replace

import pytest
import torch

from kernels.cache import KVCache, States
from model.generate import DivergedError, Draw
from tests.model.models import (
    FAMILY,
    HYBRID,
    KDA,
    LINEAR,
    LLAMA,
    TRANSNORMER,
    built,
    generate,
    model_config,
)

PROMPT = [[1, 2, 3], [7, 8, 9]]


class Table(torch.nn.Module):
    """Logits that depend on the last token alone.

    The distribution that generate draws from is known.
    """

    config = model_config(num_layers=1)

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def hidden(self, tokens, positions=None, mask=None, states=None):
        return self.logits[tokens]

    def project(self, hidden):
        return hidden


@pytest.fixture
def llama():
    return built(replace(LLAMA, num_query_groups=None, vocab_size=20), seed=0)


def likeliest(model, prompt, count):
    """From a forward over all tokens for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_takes_the_likeliest_of_a_full_forward(llama):
    out = generate(llama, PROMPT, 5)
    assert out == [likeliest(llama, prompt, 5) for prompt in PROMPT]
    assert out == generate(llama, PROMPT, 5, temperature=1e-30)
    assert out == generate(llama, PROMPT, 5, temperature=5e-324)
    assert out == generate(llama, PROMPT, 5, temperature=7.0, top_k=1)
    assert out == generate(llama, PROMPT, 5, temperature=7.0, top_p=1e-9)


def test_a_text_ends_before_its_first_stop_token(llama):
    def texts(stop):
        return generate(
            llama,
            PROMPT,
            12,
            temperature=9.0,
            stop=stop,
            generator=torch.Generator().manual_seed(0),
        )

    whole = texts([])
    stop = [whole[0][4], whole[1][7]]
    ends = [
        min((text.index(token) for token in stop if token in text), default=12) for text in whole
    ]
    assert 0 < max(ends) < 12
    assert texts(stop) == [text[:end] for text, end in zip(whole, ends, strict=True)]


def test_generator_makes_samples_repeatable(llama):
    sample, same, other = (
        generate(llama, PROMPT, 20, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert sample == same
    assert sample != other


def frequencies(logits, temperature, **limits):
    """The share of each token in 20,000 draws."""
    draw = Draw(temperature=temperature, generator=torch.Generator().manual_seed(0), **limits)
    return (
        draw(torch.ones(20_000, 1), logits.expand(20_000, -1)).bincount(minlength=len(logits))
        / 20_000
    )


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 99)])
def test_frequencies_are_those_of_the_distribution(temperature, top_k):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    allowed_logits = logits.where(
        logits >= logits.sort(descending=True).values[min(top_k or 5, 5) - 1], float("-inf")
    )
    expected = (allowed_logits / temperature).softmax(-1)
    shares = frequencies(logits, temperature, top_k=top_k)
    assert (shares - expected).abs().max() < 0.015  # four standard deviations of a frequency of 1/2
    assert (shares[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("limits", "num_allowed"),
    [
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.79}, [0, 1, 2]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.01}, [0]),
        ({"top_p": 0.9, "top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.86, "top_k": 3}, [0, 1]),  # 70 of these 80.5 % are 86.96 %
    ],
)
def test_top_p_keeps_the_fewest_tokens_of_that_probability(limits, num_allowed):
    """Five tokens have 40, 30, 10.5, 10 and 9.5 %, in another order."""
    shares, order = torch.tensor([0.4, 0.3, 0.105, 0.1, 0.095]), torch.tensor([3, 0, 4, 2, 1])
    logits = torch.empty(5)
    logits[order] = shares.log()
    expected = torch.zeros(5)
    expected[order[num_allowed]] = shares[num_allowed] / shares[num_allowed].sum()
    assert (frequencies(logits, 1.0, **limits) - expected).abs().max() < 0.015
    assert (frequencies(logits, 1.0, **limits)[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 2 has no tokens"),
        (PROMPT, {"temperature": -1.0}, "temperature is -1.0"),
        (PROMPT, {"temperature": float("nan")}, "temperature is nan"),
        (PROMPT, {"top_k": 0}, "top_k is 0"),
        (PROMPT, {"top_p": 0.0}, "top_p is 0.0"),
        (PROMPT, {"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_arguments(llama, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(llama, prompts, 1, **options)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        generate(llama, PROMPT, 0)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_named(temperature, value):
    logits = torch.ones(5, 5)
    logits[2, 1] = value
    with pytest.raises(DivergedError, match="logits of the next token are not finite"):
        generate(Table(logits), [[0], [2]], 1, temperature=temperature)
    assert [
        len(text) for text in generate(Table(logits), [[0], [1]], 1, temperature=temperature)
    ] == [1, 1]


KINDS = {
    "transnormer": TRANSNORMER,
    "linear_transformer": LINEAR,
    "hybrid": HYBRID,
    "hybrid, window and sinks": replace(HYBRID, window_size="40,0", softmax_type="learnable"),
}
KINDS = {name: replace(config, num_layers=3) for name, config in KINDS.items()}
KINDS |= {**{name: config for name, config in FAMILY.items() if config.delta_rule}, "kda": KDA}


@pytest.fixture(params=KINDS)
def recurrent(request):
    return built(replace(KINDS[request.param], vocab_size=20), seed=0).double()


def test_a_state_goes_on_where_the_parallel_form_is(recurrent):
    """Prompts and continuations of any length, in double precision.

    A state holds no more for it, a cache does.
    """
    tokens = torch.randint(20, (2, 150), generator=torch.Generator().manual_seed(1))
    want = recurrent.hidden(tokens)
    count = recurrent.config.num_layers
    states, parts, start, sizes = States(count), [], 0, []
    window = recurrent.config.window(
        1
    )  # the hybrids' softmax layer; its cache holds no more than the next token sees
    max_seen = 150 if window is None else window[0]
    for stop in (1, 70, 71, 72, 150):
        states.read(torch.arange(start, stop)[None], torch.full((2,), stop))
        parts.append(
            recurrent.hidden(tokens[:, start:stop], torch.arange(start, stop), states=states)
        )
        cache_sizes = [
            state.numel() for state in states.layers if isinstance(state, torch.Tensor)
        ]  # of linear attention
        sizes = sizes or cache_sizes
        assert sizes == cache_sizes
        caches = [state for state in states.layers if isinstance(state, KVCache)]
        assert [len(cache) for cache in caches] == [min(stop, max_seen)] * len(caches)
        start = stop
    assert (torch.cat(parts, 1) - want).norm() < 1e-12 * want.norm()
    assert len(caches) == (0 if recurrent.config.softmax_period is None else 1)
    states = States(count)
    states.read(torch.arange(1, 2)[None], torch.full((2,), 2))
    wrong = recurrent.hidden(tokens[:, 1:2], torch.arange(1, 2), states=states)
    assert (wrong - want[:, 1:2]).norm() > 1e-3 * want[
        :, 1:2
    ].norm()  # negative control: without what came before


@pytest.mark.parametrize("scale", [1e200, float("nan")])
def test_weights_that_overflow_are_named(recurrent, scale):
    """With the first, the norms of a TransNormer divide by infinity, and leave noughts behind."""
    with torch.no_grad():
        recurrent.embedding.weight.mul_(scale)
    with pytest.raises(DivergedError, match=r"not finite|all 0, since a norm overflowed"):
        generate(recurrent, PROMPT, 1)


def test_each_token_is_read_once(recurrent, llama, monkeypatch):
    for model in (recurrent, llama):
        read, hidden = [], model.hidden

        def counted(tokens, positions=None, mask=None, states=None, read=read, hidden=hidden):
            read.append(tokens.shape[1])
            return hidden(tokens, positions, mask, states)

        monkeypatch.setattr(model, "hidden", counted)
        out = generate(model, PROMPT, 40)
        assert read == [3] + 39 * [1]
        monkeypatch.undo()
        whole = torch.tensor([[*prompt, *text] for prompt, text in zip(PROMPT, out, strict=True)])
        assert torch.equal(whole[:, 3:], model(whole).argmax(-1)[:, 2:-1])


def test_prompts_of_any_length_are_written_on_as_each_alone(recurrent, llama):
    """States of linear attention see no padding."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [3, 3, 8, 1, 1], [2, 19, 4]]
    for model in (recurrent, llama):
        assert generate(model, prompts, 6) == [
            generate(model, [prompt], 6)[0] for prompt in prompts
        ]
    assert generate(llama, [], 6) == []
