"""One changed bit of a run is seen, and the configurations are such as the entries take and touch what there is."""

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parity.checkouts import RunError, command_line, facts, launch, main, verdict, went_on
from parity.configurations import CONFIGURATIONS, ITERATIONS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, dict[str, torch.Tensor]]


def records() -> list[dict[str, Any]]:
    return [
        {
            "iteration": iteration,
            "lm_loss": 6.25 / iteration,
            "grad_norm": 0.75 * iteration,
            "learning_rate": 1e-3,
            "iteration_time_ms": 100.5,
            "memory_gb": 0.5,
        }
        for iteration in range(1, ITERATIONS + 1)
    ]


def tensors() -> State:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {"model": {"a.weight": weight, "b.weight": weight.bfloat16()}, "optimizer": {"step": torch.tensor(4.0)}}


def manifest() -> dict[str, Any]:
    return {
        "iteration": ITERATIONS,
        "architecture": {"model_type": "llama", "norm_epsilon": 1e-5},
        "extra": {"progress": {"iteration": ITERATIONS}, "trained_for": {}},
        "files": {"__0_0.distcp": [1, "00"]},
        "torch_version": "2.13.0",
        "checksum": "00",
    }


def write(folder: Path, lines: list[dict[str, Any]], state: State, description: dict[str, Any]) -> Path:
    checkpoint = folder / f"iter_{ITERATIONS:07d}"
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / "manifest.json").write_text(json.dumps(description))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def flip_bit(tensor: torch.Tensor) -> None:
    """The lowest one of the last element."""
    flat = tensor.view(-1).view(torch.uint8)
    flat[-tensor.element_size()] ^= 1


def nextafter(lines: list[dict[str, Any]], field: str) -> None:
    lines[2][field] = math.nextafter(lines[2][field], math.inf)


CHANGES: dict[str, tuple[Callable[[list[dict[str, Any]], State, dict[str, Any]], object], str]] = {
    "a bit of a loss": (lambda r, s, m: nextafter(r, "lm_loss"), "iteration 3, lm_loss is 2.08333"),
    "a bit of a gradient norm": (lambda r, s, m: nextafter(r, "grad_norm"), "iteration 3, grad_norm is 2.25 before"),
    "a field that is gone": (lambda r, s, m: r[0].pop("learning_rate"), "learning_rate is 0.001 before and absent"),
    "a field that is new": (lambda r, s, m: r[3].update(validation_loss=1.5), "is absent before and 1.5 after"),
    "no number": (lambda r, s, m: r[3].update(lm_loss=None), "iteration 4, lm_loss is 1.5625 before and None after"),
    "a bit of a weight": (lambda r, s, m: flip_bit(s["model"]["a.weight"]), "iter_0000004, model.a.weight is torch"),
    "a bit in bfloat16": (lambda r, s, m: flip_bit(s["model"]["b.weight"]), "iter_0000004, model.b.weight is torch"),
    "a sign of zero": (lambda r, s, m: s["model"]["a.weight"][0, 0].neg_(), "model.a.weight is torch.float32 [2, 3]"),
    "a bit of a scalar": (lambda r, s, m: flip_bit(s["optimizer"]["step"]), "optimizer.step is torch.float32 []"),
    "a dtype": (lambda r, s, m: s["optimizer"].update(step=torch.tensor(4)), "and torch.int64 []"),
    "a shape": (lambda r, s, m: s["model"].update({"a.weight": s["model"]["a.weight"].view(3, 2)}), "[3, 2]"),
    "a tensor that is gone": (lambda r, s, m: s["model"].pop("b.weight"), "and absent after"),
    "a tensor that is new": (lambda r, s, m: s.update(ema={"a": torch.ones(1)}), "ema.a is absent before"),
    "a manifest": (lambda r, s, m: m["architecture"].update(norm_epsilon=1e-6), "architecture.norm_epsilon is 1e-05"),
    "an empty table": (lambda r, s, m: m["extra"].pop("trained_for"), "extra.trained_for is {} before"),
}


@pytest.mark.parametrize(("change", "found"), CHANGES.values(), ids=CHANGES)
def test_one_change_is_seen(change, found, tmp_path):
    want = facts(write(tmp_path / "before", records(), tensors(), manifest()))
    lines, state, description = records(), tensors(), manifest()
    change(lines, state, description)
    said = verdict(facts(write(tmp_path / "after", lines, state, description)), want)
    assert said.startswith("no: ")
    assert found in said
    assert "more differ" not in said


def test_times_and_the_files_of_shards_may_differ(tmp_path):
    want = facts(write(tmp_path / "before", records(), tensors(), manifest()))
    lines = [{**record, "iteration_time_ms": 7.0, "memory_gb": 2.0} for record in records()]
    description = {**manifest(), "files": {}, "checksum": "11", "torch_version": "2.11.0"}
    got = facts(write(tmp_path / "after", lines, tensors(), description))
    assert verdict(got, want) == "yes"
    assert len(want) > ITERATIONS * 3 + 3


def test_further_differences_are_counted():
    assert verdict({"a": "1", "b": "2"}, {"a": "0", "c": "2"}) == "no: a is 0 before and 1 after, and 2 more differ"


def test_half_a_run_is_not_compared(tmp_path):
    with pytest.raises(RunError, match="lacks records"):
        facts(write(tmp_path / "short", records()[:-1], tensors(), manifest()))
    folder = write(tmp_path / "no checkpoint", records(), tensors(), manifest())
    (folder / "iter_0000004").rename(folder / "iter_0000002")
    with pytest.raises(RunError, match="checkpoint of iteration 4"):
        facts(folder)
    with pytest.raises(RunError, match="holds no tensors"):
        facts(write(tmp_path / "empty", records(), {}, manifest()))


def test_a_run_that_begins_afresh_has_not_gone_on(tmp_path):
    before = write(tmp_path / "before", records(), tensors(), manifest())
    lines = records()
    lines[3]["iteration_time_ms"] = 7.0
    assert went_on(write(tmp_path / "resumed", lines, tensors(), manifest()), before)
    lines[0]["iteration_time_ms"] = 7.0
    assert not went_on(write(tmp_path / "afresh", lines, tensors(), manifest()), before)


def test_a_failed_run_is_told(tmp_path, capsys):
    with pytest.raises(RunError, match=r"dit-ema, after failed with status 3: error: no room$"):
        launch(tmp_path, ["-c", "print('what it said\\nerror: no room\\nend'); raise SystemExit(3)"], "dit-ema, after")
    assert "what it said" in capsys.readouterr().err


def test_no_checkout_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} holds no pretrain_gpt.py; name the folder of a checkout\n"


def test_the_configurations_touch_every_choice(tmp_path):
    """And their flags are such as the entries take."""
    seen: dict[str, set[Any]] = {}
    choices: dict[str, set[Any]] = {}
    for one in CONFIGURATIONS:
        entry = import_module(one.entry.removesuffix(".py"))
        config = entry.parse_args(command_line(one, tmp_path / "text", tmp_path / one.name))
        entry.validate(config, one.ranks)
        for part in (config.model, config.mesh, config.context, config.recompute, config.data_parallel):
            for name, hint in get_type_hints(type(part)).items():
                seen.setdefault(name, set()).add(getattr(part, name))
                choices.setdefault(name, set()).update(get_args(hint))
    for name in ("model_type", "context_parallel_method", "recompute_granularity", "data_parallel_sharding_strategy"):
        assert seen[name] >= choices[name] - {"none"}
    for name in ("tensor", "pipeline"):
        assert seen[f"{name}_model_parallel_size"] == {1, 2}
    assert len(CONFIGURATIONS) == len({one.name for one in CONFIGURATIONS}) == 13
