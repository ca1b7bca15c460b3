"""Rows of a cache, in parts and on ranks, against attention to all tokens at once."""

import pytest
import torch

from kernels import cache
from kernels.blocks import merged
from kernels.cache import KVCache, States
from model.parts.attention import sdpa

TOKENS, HEADS, GROUPS, WIDTH = 40, 4, 2, 8


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(cache, "PART", 8)
    monkeypatch.setattr(cache, "ROWS_PER_STEP", 5)


@pytest.fixture
def leaves():
    torch.manual_seed(0)
    sizes = (
        (2, TOKENS, HEADS, WIDTH),
        (2, TOKENS, GROUPS, WIDTH),
        (2, TOKENS, GROUPS, WIDTH),
        (HEADS,),
    )
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("window", [None, (4, 0), (50, 0)])
@pytest.mark.parametrize("sunk", [False, True])
def test_a_cache_goes_on_under_a_window_and_with_sinks(window, sunk, leaves):
    """And keeps of the tokens so far what the next one sees."""
    q, k, v, sinks = leaves
    settings = {"window": window} | ({"sinks": sinks} if sunk else {})
    left, states, outputs, start = window and window[0], States(1), [], 0
    for stop in (1, 9, 10, 30, TOKENS):
        states.read(torch.arange(start, stop)[None], torch.full((2,), stop))
        attention = states.attention(
            0, k[:, start:stop], v[:, start:stop], left, settings.get("sinks")
        )
        assert (attention is None) == (start == 0)
        outputs.append(
            sdpa(q[:, :1], k[:, :1], v[:, :1], **settings)
            if start == 0
            else attention(q[:, start:stop])
        )
        assert len(states.layers[0]) == (stop if left is None else min(stop, left))
        start = stop
    torch.testing.assert_close(torch.cat(outputs, 1), sdpa(q, k, v, **settings), rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, (6, 0)])
def test_padding_is_not_seen_and_rows_lie_on_several_ranks(window, leaves):
    """Sequences of 20 and 7 tokens, read as 20, go on by two tokens, of three ranks' rows."""
    q, k, v, _ = leaves
    lengths, left = torch.tensor([20, 7]), window and window[0]
    parts = []
    for rank in range(3):
        states = States(1, lambda out, lse: parts[-1].append((out, lse)) or (out, lse))
        rows_of_rank = torch.arange(20)[rank::3]
        states.read(rows_of_rank[None], lengths)
        assert states.attention(0, k[:, rows_of_rank], v[:, rows_of_rank], left, None) is None
        parts.append([])
        for step in range(2):
            new = torch.arange(2), lengths + step
            states.read(new[1][:, None], lengths + step + 1, keep=rank == step)
            attention = states.attention(0, k[new][:, None], v[new][:, None], left, None)
            attention(q[new][:, None])
    for step in range(2):
        out, _ = merged(*(torch.stack([part[step][side] for part in parts]) for side in (0, 1)))
        for row, length in enumerate((20, 7)):
            end = length + step + 1
            alone = (x[row : row + 1, :end] for x in (q, k, v))
            expected = sdpa(*alone, **({} if window is None else {"window": window}))[0, -1]
            torch.testing.assert_close(out[row, 0], expected, rtol=0, atol=1e-13)


def test_a_query_that_sees_no_row():
    rows = (
        torch.randn(1, 1, 3, WIDTH),
        torch.randn(1, 1, 3, WIDTH),
        torch.tensor([[4, 5, cache.NO_POSITION]]),
    )
    none = rows[0][:, :, :0], rows[1][:, :, :0], rows[2][:, :0]
    for cache_tensors in (none, rows):
        out, lse = KVCache(*cache_tensors).attend(
            torch.randn(1, 2, 2, WIDTH), torch.tensor([[2, 3]]), None, 1.0
        )
        assert (out == 0).all()
        assert (lse == float("-inf")).all()
    out, lse = KVCache(*rows).attend(torch.randn(1, 1, 2, WIDTH), torch.tensor([[4]]), None, 1.0)
    assert torch.equal(out[0, 0], rows[1][0, 0, :1].expand(2, WIDTH))


def test_bfloat16_is_merged_in_float32():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 50, WIDTH) for _ in range(3))
    q = q[:, :, -1:].transpose(1, 2)
    narrow, positions = (
        KVCache(k.bfloat16(), v.bfloat16(), torch.arange(50)[None]),
        torch.tensor([[49]]),
    )
    out, _ = narrow.attend(q.bfloat16(), positions, None, 0.5)
    assert out.dtype == torch.float32
    expected, _ = KVCache(k, v, torch.arange(50)[None]).attend(q, positions, None, 0.5)
    assert (out - expected).norm() < 0.01 * expected.norm()
