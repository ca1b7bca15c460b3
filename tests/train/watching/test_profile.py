"""Parts of a step's time, by hand and of two real ranks, and what cannot be profiled."""

import gzip
import json
import random
from functools import partial
from types import SimpleNamespace

import pytest

from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.pretraining import TINY, on_rank
from tests.starts import PATIENCE
from train.watching import DATA, SAVING
from train.watching.profile import ProfileConfig, covered, spent, table


def event(name, start, length, where="DeviceType.CPU", size=0, annotation=False):
    """Return an event of torch's profiler, as far as it is read."""
    values = {"name": name, "start_ns": start, "duration_ns": length, "device_type": where, "nbytes": size}
    values |= {"is_user_annotation": annotation}
    return SimpleNamespace(**{key: partial(lambda value: value, value) for key, value in values.items()})


def test_intervals_as_sets_of_points():
    draw = random.Random(5)
    for _ in range(200):
        first, second = ([(a, a + draw.randint(1, 9)) for a in draw.sample(range(60), 5)] for _ in range(2))
        points = [{p for a, b in spans for p in range(a, b)} for spans in (first, second)]
        lengths, (one, other) = covered([first, second])
        assert lengths[one & ~other].sum() == len(points[0] - points[1])
        assert lengths[one & other].sum() == len(points[0] & points[1])
        assert lengths[one].sum() == len(points[0])


def test_time_by_hand():
    second = 10**9
    events = [
        event(DATA, 0, 1 * second),
        event("aten::index", 0, 1 * second),  # of the data
        event("aten::mm", 1 * second, 4 * second),
        event("gloo:all_reduce", 4 * second, 3 * second),  # a second of it behind mm
        event(SAVING, 8 * second, 2 * second),
    ]
    found = spent(events, 0, 2)
    assert (found.data, found.compute, found.communication, found.exposed, found.saving) == (0.5, 2.0, 1.5, 1.0, 1.0)
    assert (found.iteration, found.other) == (5.0, 0.5)


def test_on_a_gpu_kernels_count_and_not_what_launched_them():
    events = [
        event("aten::mm", 0, 9),
        event("sm90_gemm", 2, 4, "DeviceType.CUDA"),
        event("ncclDevKernel_SendRecv", 4, 5, "DeviceType.CUDA"),
        event("FSDP::pre_forward", 0, 9, "DeviceType.CUDA", annotation=True),  # spans what it waits for too
        event("Memcpy HtoD (Pinned -> Device)", 0, 9, "DeviceType.CUDA"),  # as offload's, beside what computes or not
        event("Memcpy DtoH (Device -> Pinned)", 0, 9, "DeviceType.CUDA"),
    ]
    found = spent(events, 0, 1)
    assert [round(1e9 * x) for x in (found.compute, found.communication, found.exposed)] == [4, 5, 3]


def test_memory_is_the_most_at_once_of_the_device_that_computes():
    def memory(where, *sizes):
        return [event("[memory]", start, 0, where, size) for start, size in enumerate(sizes)]

    late, early = memory("DeviceType.CPU", 3, 4, -3, 2, -6)[::-1], [event("aten::mm", 0, 9)]
    assert spent([*late, *early], 0, 1).memory == 7  # whatever the order in which they are told
    on_gpu = [*memory("DeviceType.CUDA", 50, -50, 20), event("gemm", 0, 9, "DeviceType.CUDA")]
    found = spent([*late, *early, *on_gpu], 0, 1)
    assert found.memory == 50
    assert "| MB |" in table([found])


def test_the_slowest_rank_is_the_one_that_waits_least():
    def rank(number, exposed):
        return [event("aten::mm", 0, 100 - exposed), event("gloo:send", 100 - exposed, exposed)]

    shown = table([spent(rank(number, exposed), number, 1) for number, exposed in enumerate((40, 10, 40))])
    assert "Slowest: rank 1 on " in shown
    assert "busy 50% longer" in shown


@pytest.mark.slow
def test_two_ranks_write_their_traces_and_a_table(tmp_path, default_data):
    flags = ["--context-parallel-size", "2", "--profile", "--profile-step-start", "2", "--profile-step-end", "4"]
    data = ["--data-path", str(default_data), "--tokenizer-model", f"{default_data}.model", "--save", str(tmp_path)]
    said, _ = run_ranks(on_rank, 2, [*TINY, *data, *flags, "--train-iters", "5", "--profile-ranks", "1"])
    assert "profiled iterations 2 to 3" in said
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.json.gz", "ranks.json", "ranks.md"]
    with gzip.open(folder / "rank-1.json.gz") as file:
        assert json.load(file)["traceEvents"]
    for each in json.loads((folder / "ranks.json").read_text()):
        assert min(each["compute"], each["exposed"], each["data"], each["memory"]) > 0
        assert each["exposed"] <= each["communication"] <= each["iteration"] < PATIENCE


@pytest.mark.parametrize(("start", "end"), [(0, 2), (5, 5)])
def test_steps_that_are_none(start, end):
    with pytest.raises(UserError, match=f"profile_step_start is {start} and profile_step_end {end}"):
        ProfileConfig(profile_step_start=start, profile_step_end=end)
