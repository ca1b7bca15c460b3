"""What each recompute policy keeps and needs, to the byte: every allocation and release of a step, added up."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from model.config import ModelConfig
from model.llama import Llama
from parallel.context import context_parallel
from parallel.recompute import ATTENTION, RecomputeConfig, recompute_layers
from train.objectives.language import NextToken

LENGTH, LAYERS, WIDTH, WORDS, CHUNK = 256, 3, 64, 1024, 32  # one head
IN_CHUNKS = {"loss_chunk_size": CHUNK}
CASES = {
    "none": RecomputeConfig(),
    "none, loss": RecomputeConfig(**IN_CHUNKS),
    "selective, loss": RecomputeConfig(recompute_granularity="selective", **IN_CHUNKS),
    "attention_boundary, loss": RecomputeConfig(recompute_granularity="attention_boundary", **IN_CHUNKS),
    "full, loss": RecomputeConfig(recompute_granularity="full", **IN_CHUNKS),
    "full, both": RecomputeConfig(recompute_granularity="full", ffn_chunk_size=CHUNK, **IN_CHUNKS),
}
"""Policies, and what is computed in chunks."""


class Watch:
    """Bytes that torch's allocator has handed out, ``now`` and at most, while parts run."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def after(self, part: Callable[[], Any]) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            result = part()
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                self.now += event.nbytes()
                self.peak = max(self.peak, self.now)
        return result


class Attentions(TorchDispatchMode):
    """Count the attention forwards."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ATTENTION
        return func(*args, **(kwargs or {}))


class Measured(NamedTuple):
    kept: int
    peak: int
    forwards: float
    loss: float


def step(chosen: RecomputeConfig) -> tuple[Callable[[], None], Callable[[], float]]:
    """The forward and backward of a step, with gradients allocated; the backward returns the loss."""
    cp = context_parallel("ring", seq_len=LENGTH)
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 1, "vocab_size": WORDS}
    model = Llama(ModelConfig(**sizes), cp.attend)
    model.init_weights(0)
    recompute_layers(model.layers, chosen)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    objective = NextToken(cp, torch.device("cpu"), chosen.loss_chunk_size)
    tokens = torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    local = objective.local({"tokens": tokens, "labels": tokens.roll(-1)})
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(objective.loss_sum(model, local) / LENGTH)

    def backward() -> float:
        losses[0].backward()
        return losses.pop().item()

    return forward, backward


def measure(chosen: RecomputeConfig) -> Measured:
    for part in step(chosen):  # what a first step loads and keeps is not the policy's
        part()
    (forward, backward), watch = step(chosen), Watch()
    watch.after(forward)
    kept = watch.now
    with Attentions() as again:
        loss = watch.after(backward)
    assert watch.now == 0, "left after the step"
    return Measured(kept, watch.peak, 1 + again.count / LAYERS, loss)


def test_allocations_are_counted_to_the_byte() -> None:
    held: list[Tensor] = []
    watch = Watch()
    watch.after(lambda: held.append(torch.empty(1 << 20)))
    assert (watch.now, watch.peak) == (4 << 20, 4 << 20)
    watch.after(lambda: torch.empty(1 << 19).sum().item())
    assert watch.now == 4 << 20
    assert 6 << 20 <= watch.peak < (6 << 20) + 256  # the sum's result too
    watch.after(held.clear)
    assert watch.now == 0


def test_policies_keep_and_need_less_and_less() -> None:
    found = {name: measure(chosen) for name, chosen in CASES.items()}
    kept = {name: numbers.kept for name, numbers in found.items()}
    one = LENGTH * WIDTH * 4
    outside = 5 * one  # of the layers: the last norm, the hidden states, rotary angles
    assert LAYERS * one <= kept["full, both"] < LAYERS * one + outside
    out_and_lse = LAYERS * LENGTH * (WIDTH + 1) * 4
    assert abs(kept["attention_boundary, loss"] - kept["full, loss"] - out_and_lse) < 4096
    assert kept["none"] - kept["none, loss"] >= LENGTH * WORDS * 4
    peaks = [found[name].peak for name in ("none", "none, loss", "attention_boundary, loss")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
    forwards = {name.split(",")[0]: numbers.forwards for name, numbers in found.items()}
    assert forwards == {"none": 1, "selective": 2, "attention_boundary": 1, "full": 2}
    assert max(one.loss for one in found.values()) - min(one.loss for one in found.values()) < 1e-5


def test_what_a_step_leaves_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    left: list[Tensor] = []
    whole = step

    def leaking(chosen: RecomputeConfig) -> tuple[Callable[[], None], Callable[[], float]]:
        forward, backward = whole(chosen)
        return lambda: (left.append(torch.empty(10)), forward())[1], backward

    monkeypatch.setitem(globals(), "step", leaking)
    with pytest.raises(AssertionError, match="left after the step"):
        measure(CASES["none"])
