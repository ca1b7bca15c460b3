"""A layer that takes its sequence in slices computes the same as one that takes it whole."""

from dataclasses import replace

import pytest
import torch

from bench.memory import watch_cpu
from model.parts.rotary import Rotary
from parallel import layer_slices
from parallel.context import context_parallel
from parallel.context.layout import ContextError
from parallel.context.plan import Plan
from parallel.context.slices import delta
from parallel.context.slices.layer import Slice, SliceMemory, SliceOrderError
from runtime.ranks import run_ranks
from tests.model.models import FAMILY, GPT, KDA, LLAMA, tied
from tests.parallel.context.slices.models import (
    PACKED,
    furthest,
    planned_bytes,
    prepared,
    recorded_outputs,
    run_again_alike,
    step,
)

EXACT = 1e-12
"""Bound relative to the largest entry, in float64; faults are 10^9 times as far and more."""
SIZES = (12, 5, 1)
"""Tokens in a slice: 2 slices, 5 with a shorter last one, 24."""


def scaled(config, **changes):
    """Return a model whose attention is far from uniform."""
    return replace(config, init_method_std=0.1, **changes)


MODELS = {
    name: scaled(config)
    for name, config in FAMILY.items()
    if config.delta_rule or not config.linear_attention
}
MODELS |= {
    "llama tied": tied(scaled(LLAMA)),
    "llama window": scaled(LLAMA, window_size="4,0"),
    "llama window of every 2nd layer": scaled(LLAMA, window_size="4,0", window_attn_skip_freq="2"),
    "llama sinks": scaled(LLAMA, softmax_type="learnable"),
    "llama sinks and windows": scaled(
        LLAMA, softmax_type="learnable", window_size="6,0", window_attn_skip_freq="2"
    ),
    "llama off by one": scaled(LLAMA, softmax_type="off-by-one"),
    "llama qk norm": scaled(LLAMA, qk_layernorm=True, add_qkv_bias=True),
    "gpt tied": tied(scaled(GPT)),
    "kimi delta attention": scaled(KDA),
}
MODELS["llama adapters of queries"] = scaled(LLAMA, lora_rank=2, lora_target=("wq",))


@pytest.mark.parametrize("documents", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_slices_is_the_whole_model(name, documents):
    whole, _ = step(MODELS[name], documents=documents, granularity="none")
    for size in SIZES:
        in_slices, _ = step(MODELS[name], size, documents=documents)
        assert furthest(in_slices, whole) < EXACT, size


def test_several_sequences_of_a_micro_batch():
    whole, _ = step(MODELS["llama"], sequences=3, granularity="none")
    in_slices, _ = step(MODELS["llama"], 5, sequences=3)
    assert furthest(in_slices, whole) < EXACT


def test_adapters_of_a_frozen_model():
    for targets in (("wq",), ("wk", "down")):
        config = scaled(LLAMA, lora_rank=2, lora_target=targets)
        whole, _ = step(config, granularity="none")
        assert all("lora" in name for name in whole if name != "loss")
        assert furthest(step(config, 5)[0], whole) < EXACT


def on_ranks(rank, world_size, name, documents, sizes):
    """Return the largest difference from one process, and the bytes sent, of each size."""
    config = MODELS[name]
    group = torch.distributed.group.WORLD
    whole, _ = step(config, documents=documents, granularity="none")
    _, sent_whole = step(config, documents=documents, group=group)
    results = []
    for size in sizes:
        in_slices, sent = step(config, size, documents=documents, group=group)
        if not config.delta_rule and config.lora_rank is None:
            planned = planned_bytes(
                config, rank, world_size, documents, method="ulysses", slice_len=size
            )
            assert sent == planned
        results.append((furthest(in_slices, whole), sent / sent_whole))
    return results


RANKED = [
    ("llama", None),
    ("llama", PACKED),
    ("llama sinks and windows", PACKED),
    ("gemma3", None),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_split_the_heads_share_every_slice_and_send_no_more(ranks):
    """Each key travels once in each pass, as without slices and with full recomputation."""
    for name, documents in RANKED:
        for results in run_ranks(on_ranks, ranks, name, documents, (6, 4, 1)):
            for difference, ratio in results:
                assert difference < EXACT, (name, documents)
                assert ratio == 1


DELTA_RANKED = [
    ("qwen3_5", None),
    ("qwen3_5", PACKED),
    ("olmo_hybrid", PACKED),
    ("kimi delta attention", PACKED),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_split_the_heads_of_a_delta_rule(ranks):
    for name, documents in DELTA_RANKED:
        for results in run_ranks(on_ranks, ranks, name, documents, (6, 4, 1)):
            assert all(difference < EXACT for difference, _ in results), (name, documents)


def test_ranks_that_split_the_heads_of_a_frozen_model():
    for results in run_ranks(on_ranks, 2, "llama adapters of queries", None, (6, 4, 1)):
        assert all(difference < EXACT for difference, _ in results)


def without_rows_of_ranks(rank, world_size):
    """Return the difference if the convolution's rows give other ranks no gradient: a fault."""
    group = torch.distributed.group.WORLD
    whole, _ = step(MODELS["qwen3_5"], granularity="none")
    zero = staticmethod(lambda ctx, gradient: (torch.zeros_like(gradient[0]), None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta._RowsOfRanks, "backward", zero)
        return furthest(step(MODELS["qwen3_5"], 6, group=group)[0], whole)


def test_a_fault_between_ranks_is_noticed():
    assert min(run_ranks(without_rows_of_ranks, 2)) > 1e-3


def zero_gradients(name):
    """Return a fault: the gradients of one kind of state do not reach the slice before."""

    def return_gradients(piece, gradients):
        for key, gradient in zip(piece.incoming_states, gradients, strict=True):
            dropped = torch.zeros_like(gradient) if key == name else gradient
            piece.memory.state_gradients[piece.number, key] = dropped

    return return_gradients


def without_later(monkeypatch):
    """Gradients of keys have no part of later slices."""
    monkeypatch.setattr(
        SliceMemory, "check_order", lambda memory, *_: setattr(memory, "key_gradients", None)
    )


def without_earlier_keys(monkeypatch):
    """A slice frees the keys of earlier ones."""
    store = SliceMemory.store_keys

    def forgetful(memory, first, k, v, total):
        if memory.keys is not None:
            memory.keys.k[:, :first] = 0
            memory.keys.v[:, :first] = 0
        store(memory, first, k, v, total)

    monkeypatch.setattr(SliceMemory, "store_keys", forgetful)


def without_state_gradient(monkeypatch):
    monkeypatch.setattr(Slice, "return_gradients", zero_gradients(delta.STATE))


def without_row_gradient(monkeypatch):
    monkeypatch.setattr(Slice, "return_gradients", zero_gradients(delta.ROWS))


def with_rows_of_other_documents(monkeypatch):
    monkeypatch.setattr(delta, "_of_document", lambda rows, count: rows)


def with_positions_one_off(monkeypatch):
    """Slices but the first rotate by the angles of the next position."""
    take_part = Rotary.of

    def shifted(rotary, take):
        is_first = take(rotary.positions, -1)[0] == 0
        return take_part(rotary, take if is_first else lambda x, dim: take(x.roll(-1, dim), dim))

    monkeypatch.setattr(Rotary, "of", shifted)


def in_forward_order(monkeypatch):
    """The slices run back in forward order, and nothing notices."""
    monkeypatch.setattr(layer_slices, "reversed", iter, raising=False)
    monkeypatch.setattr(SliceMemory, "check_order", lambda *_: None)


FAULTS = [
    (without_later, "llama", None),
    (without_earlier_keys, "llama", None),
    (without_state_gradient, "qwen3_5", None),
    (without_row_gradient, "qwen3_5", None),
    (with_rows_of_other_documents, "qwen3_5", PACKED),
    (with_positions_one_off, "llama", None),
    (in_forward_order, "llama", None),
]


@pytest.mark.parametrize(
    ("fault", "name", "documents"), FAULTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_fault_is_noticed(fault, name, documents, monkeypatch):
    whole, _ = step(MODELS[name], documents=documents, granularity="none")
    fault(monkeypatch)
    assert furthest(step(MODELS[name], 6, documents=documents)[0], whole) > 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_slices_that_run_back_too_early_are_refused(name, monkeypatch):
    monkeypatch.setattr(layer_slices, "reversed", iter, raising=False)
    with pytest.raises(SliceOrderError, match="from the last to the first"):
        step(MODELS[name], 6)


@pytest.mark.parametrize("name", ["llama sinks and windows", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_that_runs_again_computes_the_same_bits(name, dtype, monkeypatch):
    outputs = recorded_outputs(monkeypatch)
    step(MODELS[name], 7, documents=PACKED, dtype=dtype)
    assert run_again_alike(outputs)


def test_gradients_of_keys_are_summed_in_float32(monkeypatch):
    """In bfloat16 each of 24 additions would round the sum."""
    truth, _ = step(MODELS["llama"], granularity="none")
    dtypes = set()
    sums = SliceMemory.gradient_sums

    def recorded(memory):
        totals = sums(memory)
        dtypes.update(x.dtype for x in totals)
        return totals

    monkeypatch.setattr(SliceMemory, "gradient_sums", recorded)

    def error(results):
        name = "layers.1.attention.wk.weight"
        return ((results[name].double() - truth[name]).norm() / truth[name].norm()).item()

    whole = error(step(MODELS["llama"], dtype=torch.bfloat16, granularity="none")[0])
    in_slices = error(step(MODELS["llama"], 1, dtype=torch.bfloat16)[0])
    assert dtypes == {torch.float32}
    assert in_slices < 2 * whole

    # 24 additions hardly show in this model's error, so the control asks for the dtype alone.
    dtypes.clear()
    monkeypatch.setattr("parallel.context.slices.layer.accum_dtype", lambda dtype: dtype)
    step(MODELS["llama"], 1, dtype=torch.bfloat16)
    assert dtypes == {torch.bfloat16}


def test_without_gradients_the_layers_run_in_slices_too(monkeypatch):
    whole, _ = step(MODELS["qwen3_5"], granularity="none")
    counts = []
    run = layer_slices.LayerPass.run
    monkeypatch.setattr(
        layer_slices.LayerPass, "run", lambda *a: counts.append(a[2].number) or run(*a)
    )
    with torch.no_grad():
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
        in_slices, _ = step(MODELS["qwen3_5"], 7)
    assert counts == [0, 1, 2, 3] * MODELS["qwen3_5"].num_layers
    assert abs(in_slices["loss"] - whole["loss"]) < EXACT * whole["loss"]


def test_an_error_in_a_backward_pass_leaves_no_keys_or_states(monkeypatch):
    slices = []
    run = layer_slices.LayerPass.run

    def failing(layer_pass, chunk, piece):
        out = run(layer_pass, chunk, piece)
        if torch.is_grad_enabled():
            slices.append(piece)
            if len(slices) == 3:
                raise ArithmeticError
        return out

    monkeypatch.setattr(layer_slices.LayerPass, "run", failing)
    with pytest.raises(ArithmeticError):
        step(MODELS["qwen3_5"], 5)
    for piece in slices:
        memory = piece.memory
        tensors = (memory.keys, memory.key_gradients, memory.states, memory.state_gradients)
        assert not any(tensors)


def test_a_call_without_a_slice_is_refused_where_slices_order_the_tokens():
    """Two tensor-parallel ranks of one process: positions 0, 1, 4, 5, 2, 3, 6, 7."""
    cp = context_parallel("ulysses", seq_len=8, group=None, slice_len=4, multiple=2)
    assert cp.positions.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    x = torch.randn(1, 8, 2, 16)
    assert torch.equal(cp.unshard(cp.shard(x, 1), 1), x)
    rule = cp.delta_of_slices(lambda *_: pytest.fail("the rule of whole sequences"))
    gates = x[..., 0]
    for call in (
        lambda: cp.attend(x, x, x),
        lambda: cp.attend.prefetch_kv(x, x)(x),
        lambda: rule(x, x, x, gates, gates),
    ):
        with pytest.raises(ContextError, match="pass a Slice"):
            call()
    with pytest.raises(ContextError, match="linear attention takes whole sequences"):
        cp.attend_linear(x, x, x, (0.0, 0.0))


def peak_bytes(length, size, **changes):
    """Return the peak of a step in bytes, beyond the weights and their gradients."""
    changes = {"ffn_hidden_size": 256, **changes}
    config = scaled(LLAMA, num_layers=2, hidden_size=32, vocab_size=8, **changes)
    _, _, loss_sum = prepared(
        config,
        size,
        documents=None,
        sequences=1,
        length=length,
        group=None,
        dtype=torch.float32,
        granularity="full",
    )
    loss_sum().backward()  # allocates the gradients
    return watch_cpu(lambda: loss_sum().backward(), [])["peak"]


def test_inner_memory_grows_with_the_slice_not_with_the_sequence():
    """Only inputs, keys and values, and gradients of these exist for the whole sequence."""
    lengths = (512, 1024, 1536, 2048)
    in_slices = [peak_bytes(length, 128) for length in lengths]
    whole = [peak_bytes(length, 0) for length in lengths]
    tokens = lengths[-1] - lengths[0]
    assert (in_slices[-1] - in_slices[0]) / tokens < 0.2 * (whole[-1] - whole[0]) / tokens
    assert in_slices[-1] < in_slices[0] * lengths[-1] / lengths[0]

    larger = [peak_bytes(lengths[-1], size) for size in (256, 512)]
    assert in_slices[-1] < larger[0] < larger[1] < whole[-1]
    assert larger[1] - larger[0] > 1.5 * (larger[0] - in_slices[-1])


def slope_of_peak():
    """Return the bytes of each further token, with wide keys and slices of 128 tokens."""
    widths = {"num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 16}
    peaks = [peak_bytes(length, 128, ffn_hidden_size=64, **widths) for length in (1024, 2048)]
    return (peaks[1] - peaks[0]) / 1024


def test_bytes_of_a_token_are_those_of_the_pages_table(monkeypatch):
    """In float32, of width 32 with 8 heads of 16; tables of angles, and the other layer's input."""
    table = 4 * (3 * 32 + 2 * 8 * 16 + 2 * 8 * 16)
    others = 4 * (32 + 16)
    assert slope_of_peak() == pytest.approx(table + others, rel=0.05)
    # A tile of all earlier keys would have their gradients at once.
    tiles = Plan.slice_tiles
    monkeypatch.setattr(
        Plan, "slice_tiles", lambda plan, rank, *bounds: tiles(plan, rank, *bounds[:2])
    )
    assert slope_of_peak() > 1.3 * (table + others)


def test_a_single_slice_computes_its_keys_no_more_often_than_full_recomputation(monkeypatch):
    stored = []
    store = SliceMemory.store_keys
    monkeypatch.setattr(
        SliceMemory, "store_keys", lambda memory, *a: stored.append(a) or store(memory, *a)
    )
    whole, _ = step(MODELS["llama"], granularity="none")
    in_one, _ = step(MODELS["llama"], 24)
    assert furthest(in_one, whole) < EXACT
    assert len(stored) == 2 * MODELS["llama"].num_layers
