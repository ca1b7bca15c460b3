"""A run's records: cut back, read, drawn and sent on."""

import json
import os
import struct
import sys

import pytest

from tests import starts
from train.callbacks.metrics import (
    METRICS,
    LoggingConfig,
    RunLog,
    check_services,
    plot_loss,
    read_metrics,
)
from train.checkpoint.manifest import STARTS
from train.config.flags import ConfigError


def record(iteration, **more):
    return {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "consumed_tokens": 1024 * iteration,
        "skipped_iterations": 1,
        "lm_loss": 8.0 / iteration,
        "grad_norm": 0.5 * iteration,
        "learning_rate": 1e-3 * iteration,
        "iteration_time_ms": 100.0 * iteration,
        "tokens_per_second": 1000.0 * iteration,
        "tflops_per_gpu": 0.25,
        "mfu": 0.125,
        "memory_gb": 1.5,
        **more,
    }


def write(path, iterations, end=""):
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in iterations) + end)


@pytest.mark.parametrize("end", ["", '{"iteration": 7, "lm_lo', '{"iteration": 7}', "\0\0\0\0"])
def test_half_a_last_line_is_no_record(end, tmp_path):
    write(tmp_path / METRICS, range(1, 7), end)
    assert read_metrics(tmp_path / METRICS) == [record(i) for i in range(1, 7)]


@pytest.mark.parametrize(
    "line", [b'{"iteration": 2, "lm_lo', b"", b"5", b"{}", b'{"iteration": null}', b"\xff\xfe\x00"]
)
def test_a_corrupt_line_before_the_last_is_named(line, tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(
        b"%b\n%b\n%b\n" % (json.dumps(record(1)).encode(), line, json.dumps(record(3)).encode())
    )
    before = path.read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"metrics\.jsonl, line 2 is not the record .*; remove the line or the file",
    ):
        going_on(tmp_path, 10)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def going_on(folder, iteration):
    """The records that a run goes on with."""
    return RunLog(folder, LoggingConfig(), {}, iteration).records


def test_a_run_keeps_the_records_that_its_checkpoint_knows(tmp_path):
    path = tmp_path / METRICS
    write(path, range(1, 10), '{"iteration": 10')
    assert going_on(tmp_path, 6) == [record(i) for i in range(1, 7)]
    assert read_metrics(path) == [record(i) for i in range(1, 7)]
    assert path.read_text().endswith("\n")
    resumed = RunLog(tmp_path, LoggingConfig(), {}, 3)
    resumed.write(record(4, lm_loss=1.25))
    assert read_metrics(path) == [*(record(i) for i in range(1, 4)), record(4, lm_loss=1.25)]
    assert going_on(tmp_path, 0) == []
    assert path.read_text() == ""
    assert going_on(tmp_path / "new", 3) == []
    assert {entry.name for entry in (tmp_path / "new").iterdir()} == {METRICS, STARTS}


def test_numbers_come_back_exactly(tmp_path):
    odd = record(1, lm_loss=0.1 + 0.2, grad_norm=float("inf"))
    log = RunLog(tmp_path, LoggingConfig(), {}, 0)
    log.write(odd)
    assert read_metrics(tmp_path / METRICS) == [
        {**odd, "grad_norm": None}
    ]  # JSON knows no infinity


def test_a_log_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = RunLog(None, LoggingConfig(), {}, 0)
    log.write(record(1))
    log.sync()
    plot_loss([], tmp_path / "loss.png")
    assert not list(tmp_path.iterdir()), "nor does a curve of no records"


@pytest.mark.parametrize(
    "records",
    [
        [record(1)],
        [
            record(1),
            record(2, validation_loss=3.0, unigram_entropy=5.0),
            record(3, lm_loss=float("nan")),
        ],
        [{"iteration": i, "diffusion_loss": 0.5 * i} for i in (1, 2)],
    ],
)
def test_the_loss_curve_is_a_picture(records, tmp_path):
    from matplotlib import image

    plot_loss(records, tmp_path / "loss.png")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (480, 840)
    assert pixels.std() > 0.01  # it is not blank


def scalars(folder):
    """Return (step, value) of the losses that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(e.step, round(e.value, 4)) for e in events.Scalars(name)]
        for name in ("lm_loss", "validation_loss")
    }


def test_tensorboard_shows_each_iteration_once_after_rollbacks_resumes_and_figures_that_come_later(
    tmp_path,
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(tensorboard_dir=str(tmp_path / "events"))
    log = RunLog(tmp_path / "run", config, {}, 0)
    for again in range(3):  # two rollbacks, of less than a second
        for i in range(4 if again else 1, 7):
            log.write(
                record(
                    i,
                    lm_loss=1.0 + again,
                    **({"validation_loss": 5.0} if i == 6 and again < 2 else {}),
                )
            )
        if again < 2:
            log.rewind(3)
    log.amend({"validation_loss": 4.0})
    truth = read_metrics(tmp_path / "run" / METRICS)
    expected = [(r["iteration"], r["lm_loss"]) for r in truth]
    assert expected == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 3.0), (5, 3.0), (6, 3.0)]
    assert scalars(tmp_path / "events") == {"lm_loss": expected, "validation_loss": [(6, 4.0)]}
    shown = EventAccumulator(str(tmp_path / "events")).Reload().Tags()["scalars"]
    assert set(shown) == set(record(1)) - {"iteration"} | {"validation_loss"}
    resumed = RunLog(tmp_path / "run", config, {}, 2)  # from an earlier checkpoint
    for i in range(3, 5):
        resumed.write(record(i, lm_loss=7.0, validation_loss=6.0))
    assert scalars(tmp_path / "events") == {
        "lm_loss": [(1, 1.0), (2, 1.0), (3, 7.0), (4, 7.0)],
        "validation_loss": [(3, 6.0), (4, 6.0)],
    }


def in_a_process_of_its_own(code, folder, **environment):
    """wandb ends its service with the process, as in a real run.

    Nothing of this machine's settings is seen.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    homes = {
        name: str(folder / "home")
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    }
    command = [sys.executable, "-c", code, str(folder / "run")]
    return starts.ended(command, inherited=clean | homes, **environment)


ROLLED_BACK = """
import sys
from pathlib import Path
from tests.train.callbacks.test_metrics import record
from train.callbacks.metrics import LoggingConfig, RunLog
config = LoggingConfig(wandb_project="longmesh-test", wandb_exp_name="offline")
log = RunLog(Path(sys.argv[1]), config, {"train": {"seed": 7}}, 0)
for i in range(1, 7):
    log.write(record(i, lm_loss=1.0))
log.rewind(3)
for i in range(4, 6):
    log.write(record(i, lm_loss=2.0))
log.amend({"validation_loss": 4.0})
log.sync()
"""


def wandb_records(file):
    """Yield the records of a file that wandb wrote offline.

    It is LevelDB's log of protobuf messages, after 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    place, message = 7, b""
    while place + 7 <= len(content):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:  # a block's end without room for a header
            place += left
        length, kind = struct.unpack_from("<HB", content, place + 4)
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or a last part
            row = Record()
            row.ParseFromString(message)
            yield row
            message = b""


@pytest.mark.slow
def test_wandb_has_the_records_and_settings_of_a_run_rolled_back_over_an_axis_of_iterations(
    tmp_path,
):
    """It cannot take rows back: the later row of an iteration is the run's."""
    pytest.importorskip("wandb")
    ended = in_a_process_of_its_own(ROLLED_BACK, tmp_path, WANDB_MODE="offline")
    assert ended.returncode == 0, ended.stderr
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert all(word in file.read_bytes() for word in (b"longmesh-test", b"seed"))
    rows = list(wandb_records(file))
    logged = []
    for row in rows:
        items = {
            item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.history.item
        }
        if items:
            logged.append(items)
    assert [row["iteration"] for row in logged] == [1, 2, 3, 4, 5, 6, 4, 5, 5]
    last = {}
    for row in logged:
        last[row["iteration"]] = last.get(row["iteration"], {}) | row
    for expected in read_metrics(tmp_path / "run" / METRICS):
        assert expected == {name: last[expected["iteration"]][name] for name in expected}
    axes = {row.metric.glob_name: row.metric.step_metric for row in rows if row.HasField("metric")}
    assert axes["*"] == "iteration"


@pytest.mark.slow
def test_wandb_without_a_key_is_one_message(tmp_path):
    pytest.importorskip("wandb")
    write_first = "from train.callbacks.metrics import *; from pathlib import Path; import sys\n"
    code = (
        write_first
        + "try:\n    RunLog(Path(sys.argv[1]), LoggingConfig(wandb_project='p'), {}, 0)\n"
        "except ConfigError as error:\n    print('MESSAGE', error)"
    )
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / METRICS, range(1, 4))
    before = (tmp_path / "run" / METRICS).read_bytes()
    ended = in_a_process_of_its_own(code, tmp_path)
    assert "MESSAGE wandb_project is p, but wandb cannot start" in ended.stdout, ended.stderr
    assert "WANDB_MODE=offline" in ended.stdout
    assert (tmp_path / "run" / METRICS).read_bytes() == before


@pytest.mark.parametrize(
    ("field", "module"),
    [("wandb_project", "wandb"), ("tensorboard_dir", "torch.utils.tensorboard")],
)
def test_a_missing_service_is_told_only_where_it_is_asked_for(field, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    check_services(LoggingConfig())
    with pytest.raises(
        ConfigError, match=rf"{field} is set, but (\w+) .*pip install \1.*EXTRAS=logging"
    ):
        check_services(LoggingConfig(**{field: "x"}))
