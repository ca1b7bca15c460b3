"""Parts of a step's time, by hand and of real ranks, and ranks that stay behind."""

import gzip
import io
import json
import random
import socket
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.pretraining import TINY, on_rank
from tests.starts import PATIENCE
from tests.train.runs import run_with, settings
from train.callbacks import DATA, SAVING
from train.callbacks.metrics import METRICS, LoggingConfig, read_metrics
from train.callbacks.profile import ProfileConfig, covered, rank_times, table
from train.callbacks.stragglers import PHASES, slowest


def event(name, start, length, where="DeviceType.CPU", size=0, annotation=False):
    """Return an event of torch's profiler, as far as it is read."""
    values = {
        "name": name,
        "start_ns": start,
        "duration_ns": length,
        "device_type": where,
        "nbytes": size,
    }
    values |= {"is_user_annotation": annotation}
    return SimpleNamespace(
        **{key: partial(lambda value: value, value) for key, value in values.items()}
    )


def test_intervals_as_sets_of_points():
    draw = random.Random(5)
    for _ in range(200):
        first, second = (
            [(a, a + draw.randint(1, 9)) for a in draw.sample(range(60), 5)] for _ in range(2)
        )
        points = [{p for a, b in spans for p in range(a, b)} for spans in (first, second)]
        lengths, (in_first, other) = covered([first, second])
        assert lengths[in_first & ~other].sum() == len(points[0] - points[1])
        assert lengths[in_first & other].sum() == len(points[0] & points[1])
        assert lengths[in_first].sum() == len(points[0])


def test_time_by_hand():
    second = 10**9
    events = [
        event(DATA, 0, 1 * second),
        event("aten::index", 0, 1 * second),  # of the data
        event("aten::mm", 1 * second, 4 * second),
        event("gloo:all_reduce", 4 * second, 3 * second),  # a second of it behind mm
        event(SAVING, 8 * second, 2 * second),
    ]
    times = rank_times(events, 0, 2)
    assert (times.data, times.compute, times.communication, times.exposed, times.saving) == (
        0.5,
        2.0,
        1.5,
        1.0,
        1.0,
    )
    assert (times.iteration, times.other) == (5.0, 0.5)


def test_on_a_gpu_kernels_count_and_not_what_launched_them():
    events = [
        event("aten::mm", 0, 9),
        event("sm90_gemm", 2, 4, "DeviceType.CUDA"),
        event("ncclDevKernel_SendRecv", 4, 5, "DeviceType.CUDA"),
        event(
            "FSDP::pre_forward", 0, 9, "DeviceType.CUDA", annotation=True
        ),  # spans what it waits for too
        event(
            "Memcpy HtoD (Pinned -> Device)", 0, 9, "DeviceType.CUDA"
        ),  # as offload's, beside what computes or not
        event("Memcpy DtoH (Device -> Pinned)", 0, 9, "DeviceType.CUDA"),
    ]
    times = rank_times(events, 0, 1)
    assert [round(1e9 * x) for x in (times.compute, times.communication, times.exposed)] == [
        4,
        5,
        3,
    ]


def test_memory_is_the_most_at_once_of_the_device_that_computes():
    def memory(where, *sizes):
        return [event("[memory]", start, 0, where, size) for start, size in enumerate(sizes)]

    late, early = memory("DeviceType.CPU", 3, 4, -3, 2, -6)[::-1], [event("aten::mm", 0, 9)]
    assert (
        rank_times([*late, *early], 0, 1).memory == 7
    )  # whatever the order in which they are told
    on_gpu = [*memory("DeviceType.CUDA", 50, -50, 20), event("gemm", 0, 9, "DeviceType.CUDA")]
    times = rank_times([*late, *early, *on_gpu], 0, 1)
    assert times.memory == 50
    assert "| MB |" in table([times])


def test_the_slowest_rank_is_the_one_that_waits_least():
    def rank(number, exposed):
        return [event("aten::mm", 0, 100 - exposed), event("gloo:send", 100 - exposed, exposed)]

    shown = table(
        [
            rank_times(rank(number, exposed), number, 1)
            for number, exposed in enumerate((40, 10, 40))
        ]
    )
    assert "Slowest: rank 1 on " in shown
    assert "busy 50% longer" in shown


@pytest.mark.slow
def test_two_ranks_write_their_traces_and_a_table(tmp_path, default_data):
    flags = [
        "--context-parallel-size",
        "2",
        "--profile",
        "--profile-step-start",
        "2",
        "--profile-step-end",
        "4",
    ]
    data = [
        "--data-path",
        str(default_data),
        "--tokenizer-model",
        f"{default_data}.model",
        "--save",
        str(tmp_path),
    ]
    output, _ = run_ranks(
        on_rank, 2, [*TINY, *data, *flags, "--train-iters", "5", "--profile-ranks", "1"]
    )
    assert "profiled iterations 2 to 3" in output
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-1.json.gz",
        "ranks.json",
        "ranks.md",
    ]
    with gzip.open(folder / "rank-1.json.gz") as file:
        assert json.load(file)["traceEvents"]
    for each in json.loads((folder / "ranks.json").read_text()):
        assert min(each["compute"], each["exposed"], each["data"], each["memory"]) > 0
        assert each["exposed"] <= each["communication"] <= each["iteration"] < PATIENCE


@pytest.mark.parametrize(("start", "end"), [(0, 2), (5, 5)])
def test_steps_that_are_none(start, end):
    with pytest.raises(
        UserError, match=f"profile_step_start is {start} and profile_step_end {end}"
    ):
        ProfileConfig(profile_step_start=start, profile_step_end=end)


def slowed(trainer):
    """Let this rank take longer there, even for a loaded machine."""

    def late(*_):
        time.sleep(0.4)

    trainer.runner.parts[0].layers[0].mlp.down.register_forward_pre_hook(late)


def said_of_a_run(rank, size, config, folder):
    with redirect_stdout(io.StringIO()) as output:
        run_with(rank, size, config, folder, slowed if rank == 1 else None)
    return output.getvalue()


def test_a_slowed_rank_is_named_with_its_host(tmp_path):
    output, _ = run_ranks(
        said_of_a_run,
        2,
        replace(settings(train_iters=4), logging=LoggingConfig(log_interval=2)),
        tmp_path / "slow",
    )
    first, second, _, last = read_metrics(tmp_path / "slow" / METRICS)
    assert "slowest_rank" not in first, "only at an interval's end"
    assert second["slowest_rank"] == 1
    assert last["slowest_rank"] == 1
    assert last["slowest_behind"] > 0.2
    assert last["mlp_ms"][1] > 200 > last["mlp_ms"][0]
    assert min(last["data_ms"] + last["update_ms"]) > 0
    assert f"warning: rank 1 on {socket.gethostname()} is " in output
    assert output.count("% behind the median: mlp_ms ") == 1
    assert all(len(last[name]) == 2 for name in PHASES)


def test_who_is_behind_and_in_what():
    alike = {"data_ms": [1.0, 1.0, 1.0], "update_ms": [5.0, 5.0, 5.0], "mlp_ms": [2.0, 2.0, 2.0]}
    assert slowest(alike, 100.0, 40)[:2] == (0, 0.0)
    layer = alike | {"mlp_ms": [2.0, 2.0, 2.5]}
    assert slowest(layer, 100.0, 40) == (2, 0.25, "mlp_ms", True), (
        "40 layers of 0.5 ms are 20 ms of a step"
    )
    assert slowest(layer, 100.0, 39) == (2, 0.25, "mlp_ms", False), "too little to warn of"
    assert slowest(layer | {"data_ms": [1.0, 31.0, 2.0]}, 200.0, 4) == (
        1,
        0.145,
        "data_ms",
        True,
    ), "before the layer"
    assert slowest(alike | {"data_ms": [1.0, 31.0, 2.0]}, 100.0, 40) == (1, 0.29, "data_ms", True)
    assert slowest(alike | {"data_ms": [1.0, 3.0, 1.0]}, 100.0, 40)[1] == 0.02, (
        "of a step, not of the median"
    )
    assert slowest(alike | {"mlp_ms": [0.0, 2.0, 2.0]}, 100.0, 40)[1] == 0, (
        "a fast one is not slow, nor are the others"
    )
