"""Settings hold until their block ends, however it ends, and torch's functions come back."""

import pytest
import torch
import torch.nn.functional as F

from runtime.simulation import (
    ALLOCATION_CAUSE,
    SIMULATED_DEVICE,
    allocates,
    device_type_of,
    replaced,
)


def test_a_setting_ends_with_its_block():
    x = torch.ones(1)
    assert device_type_of(x) == "cpu"
    with SIMULATED_DEVICE.set_to("cuda"):
        assert device_type_of(x) == "cuda"
        with SIMULATED_DEVICE.set_to(None):
            assert device_type_of(x) == "cpu"
        assert device_type_of(x) == "cuda"
    assert SIMULATED_DEVICE.value is None
    with pytest.raises(ZeroDivisionError), SIMULATED_DEVICE.set_to("cuda"):
        1 / 0  # noqa: B018
    assert SIMULATED_DEVICE.value is None


def test_what_a_function_allocates_has_its_cause():
    causes = []
    record = allocates("moments")(lambda count: causes.append(ALLOCATION_CAUSE.value) or count)
    assert record(3) == 3
    assert (causes, ALLOCATION_CAUSE.value) == (["moments"], None)


def test_a_function_of_torch_comes_back_own_or_inherited():
    rms_norm, inherited = F.rms_norm, torch.UntypedStorage.resize_
    with replaced(F, "rms_norm", len), replaced(torch.UntypedStorage, "resize_", len):
        assert F.rms_norm is torch.UntypedStorage.resize_ is len
    assert F.rms_norm is rms_norm
    assert torch.UntypedStorage.resize_ is inherited
    assert "resize_" not in vars(torch.UntypedStorage)
