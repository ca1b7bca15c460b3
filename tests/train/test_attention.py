"""Attention of a configuration on one process: torch's kernel for a whole sequence, or the method's tiles."""

from dataclasses import replace

import pytest
import torch

from kernels import operators
from model.attention import sdpa
from model.config import ModelConfig
from parallel.context import ContextConfig
from parallel.context.api import SoftmaxAttention
from train.attention import context_of
from train.config.entries import Config, TrainConfig

LENGTH = 96
CONFIG = Config(
    model=ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2),
    train=TrainConfig(seq_length=LENGTH),
    context=ContextConfig(context_parallel_method="striped"),
)


def operands():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, LENGTH, heads, 16, generator=generator) for heads in (4, 2, 2)]


def test_without_a_method_the_attention_is_plain():
    cp, attend = context_of(replace(CONFIG, context=ContextConfig(context_parallel_method="none")), None)
    assert attend is sdpa
    assert torch.equal(cp.positions, torch.arange(LENGTH))


@pytest.mark.parametrize(
    ("change", "strips", "whole"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"train": TrainConfig(seq_length=LENGTH, bf16=True)}, False, False),
        ({"context": ContextConfig(attention_backend="reference")}, False, False),
    ],
)
def test_one_process_takes_the_kernel_where_that_is_as_fast(change, strips, whole, monkeypatch):
    monkeypatch.setattr(operators, "ONEDNN", strips)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cp, attend = context_of(replace(CONFIG, **change), None)
    assert isinstance(attend, SoftmaxAttention) != whole
    if whole:
        q, k, v = operands()
        assert torch.equal(attend(q, k, v), sdpa(q, k, v))
        seen = {"window": (7, 0)}
        assert torch.equal(attend(q, k, v, **seen), cp.attend(q, k, v, **seen)), "a window is the method's"
        other = cp.under(documents=(0, 40, LENGTH))
        assert torch.equal(attend(q, k, v, other.handle), other.attend(q, k, v)), "and so are documents"
