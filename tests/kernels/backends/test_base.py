"""The table of backends: each has the kernels that it states, and all lists of names follow."""

from typing import get_args, get_type_hints

import pytest

from kernels.backends import BACKENDS, LINEAR, RATED, SOFTMAX, listed
from kernels.backends.base import Backend
from parallel.context.config import ContextConfig, FullContextConfig
from planner.cluster import Cluster, load_cluster


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_the_kernels_that_it_states(name):
    backend = BACKENDS[name]
    assert backend.name == name
    for stated, methods in (
        ("softmax", ["softmax_kernel"]),
        ("linear", ["linear_scan", "delta_slab"]),
    ):
        overridden = [
            getattr(type(backend), method) is not getattr(Backend, method) for method in methods
        ]
        assert overridden == [getattr(backend, stated)] * len(methods), stated
    assert backend.softmax or backend.linear


def test_choices_are_the_tables():
    every, softmax = (
        get_type_hints(config)["attention_backend"] for config in (ContextConfig, FullContextConfig)
    )
    assert get_args(every) == ("auto", *BACKENDS)
    assert get_args(softmax) == ("auto", *SOFTMAX)
    assert listed(LINEAR) == "auto, chunked, triton or reference"


def test_a_backend_without_a_rate_in_the_file_has_its_share(monkeypatch):
    class Another(Backend):
        name, title, shares = "another", "Another", {"hopper": 0.4}

    monkeypatch.setitem(BACKENDS, "another", Another())
    monkeypatch.setitem(RATED, "another", BACKENDS["another"])
    hopper: Cluster = load_cluster("h100")
    assert hopper.running("another").attention_fraction == 0.4
    assert load_cluster("b200").running("another").attention_kernel == ""
