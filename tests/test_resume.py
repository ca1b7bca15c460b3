"""A run that is stopped and goes on is the run that never stopped.

It may go on on its own mesh and on any other.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.parity.bugs import samples_skipped
from tests.parity.run import equal, trained
from tests.pretraining import curve, differences, pretrain
from tools.common.cases import case_of, cases_of
from train.callbacks.metrics import METRICS, read_metrics
from train.config.language import load_config

STRIPED = ("--context-parallel-method", "striped", "--context-parallel-size", "2")
EXACT = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "consumed_tokens",
)


class Runs(NamedTuple):
    """A run of ``last`` iterations with these flags on so many ranks.

    Another one was stopped half-way.
    """

    ranks: int
    last: int
    flags: tuple[str, ...]
    whole: Path
    stopped: Path


@pytest.fixture(scope="module", params=[(2, 4), pytest.param((4, 40), marks=pytest.mark.slow)])
def runs(request, default_data, tmp_path_factory):
    ranks, last = request.param
    flags = (*STRIPED, "--micro-batch-size", "2", "--train-iters", str(last))
    folder = tmp_path_factory.mktemp("runs")
    whole, stopped = folder / "whole", folder / "stopped"
    pretrain(ranks, default_data, whole, *flags)
    pretrain(ranks, default_data, stopped, *flags, "--exit-interval", str(last // 2))
    return Runs(ranks, last, flags, whole, stopped)


def test_stopping_after_a_half_and_again_after_three_quarters_changes_no_bit(
    runs, default_data, tmp_path
):
    save, flags = tmp_path / "run", (*runs.flags, "--load", str(tmp_path / "run"))
    shutil.copytree(runs.stopped, save)
    pretrain(runs.ranks, default_data, save, *flags, "--exit-interval", str(runs.last * 3 // 4))
    pretrain(runs.ranks, default_data, save, *flags)
    assert curve(save, *EXACT) == curve(runs.whole, *EXACT)
    assert len(curve(save)) == runs.last
    assert curve(save, "validation_loss")[-1] == curve(runs.whole, "validation_loss")[-1]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(runs.last)


ELSEWHERE = [(case, ()) for case in cases_of("cp=1")]
SLOW_MESHES = "dp=2 tp=2 zero1 none\n cp=2 dp=2 ring|zigzag|allgather\n cp=2 dp=2 striped ddp"
SLOW = [(case, pytest.mark.slow) for case in cases_of(SLOW_MESHES)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks, id=case.title) for case, marks in ELSEWHERE + SLOW]
)
def test_another_method_mesh_or_strategy_goes_on_with_the_same_samples(
    case, runs, default_data, tmp_path
):
    got = pretrain(
        case.ranks,
        default_data,
        tmp_path / "run",
        *runs.flags,
        *case.flags,
        "--load",
        str(runs.stopped),
    )
    assert differences(got, read_metrics(runs.whole / METRICS)[runs.last // 2 :]) <= 1e-5


def test_metrics_hold_every_iteration_once_after_a_crash(runs, default_data, tmp_path):
    """Iterations that were recorded but not checkpointed, and half a line, are cut away."""
    save, half = tmp_path / "run", runs.last // 2
    shutil.copytree(runs.stopped, save)
    with (save / METRICS).open("a") as file:
        file.write(
            json.dumps({"iteration": half + 1, "lm_loss": 0.0})
            + f'\n{{"iteration": {half + 2}, "lm_'
        )
    flags = ("--train-iters", str(runs.last), "--exit-interval", str(half + 2))
    pretrain(1, default_data, save, *flags, "--load", str(save))
    assert [record["iteration"] for record in read_metrics(save / METRICS)] == list(
        range(1, half + 3)
    )
    assert read_metrics(save / METRICS)[half]["lm_loss"] > 0


def test_a_finished_run_has_nothing_left_to_do_and_a_longer_one_no_jump(
    default_data, tmp_path, capsys
):
    flags = ("--min-lr", "1e-4", "--load", str(tmp_path / "run"))
    first = pretrain(1, default_data, tmp_path / "run", *flags, "--train-iters", "3")
    again = pretrain(1, default_data, tmp_path / "run", *flags, "--train-iters", "3")
    assert again == first
    assert "note:" not in capsys.readouterr().out
    flags += ("--train-iters", "5", "--weight-decay", "0", "--allow-changed", "weight_decay")
    longer = pretrain(1, default_data, tmp_path / "run", *flags)
    assert [record["learning_rate"] for record in longer[2:]] == [1e-4] * 3
    output = capsys.readouterr().out
    assert (
        "note: lr at iteration 4 is 1.000000E-04 by the checkpoint's schedule (1.000000E-04 "
        "after iteration"
    ) in output
    assert (
        " and 2.318019E-04 by this configuration's (lr_decay_iters was 3 and is 5): the "
        "checkpoint's is kept"
    ) in output
    assert "note: weight_decay was 0.1 and is 0.0; --weight-decay 0.1 keeps it\n" in output
    assert output.count("note:") == 2
    written = str(tmp_path / "run" / "config.toml")
    assert load_config(written).optimizer.lr_decay_iters is None
    overridden = ("--config", written, "--override-opt-param-scheduler")
    longest = pretrain(1, default_data, tmp_path / "run", *flags, *overridden, "--train-iters", "7")
    assert longest[5]["learning_rate"] > 1e-4
    assert "lr_decay_iters was 3 and is 7" in capsys.readouterr().out


BOUND = 1e-6
PAIRS = """
    gpt: none > pp=2 Interleaved1F1B virtual=2
    llama: tp=2 > dp=2 zero1
    transnormer: dp=2 > tp=2
"""
SLOW_PAIRS = """
    gpt: pp=2 dp=2 cp=2 zero1 > tp=2
    llama: pp=2 tp=2 > dp=2 cp=2 zigzag
    llama: dp=2 cp=2 tp=2 copies=2 > none
    llama: tp=4 > pp=4
    gpt: pp=4 > dp=4 zero2
    llama: dp=2 legacy_ddp > cp=4 wallfacer team=2
    gpt: dp=4 zero1 copies=2 > pp=2 tp=2 layers=3+1
    llama: pp=2 cp=2 tp=2 zero1 > dp=8 ddp
    llama: pp=2 cp=3 ring > dp=2 tp=2 zero2
    gpt: pp=2 dp=2 virtual=2 InterleavedZeroBubble zero1 > cp=2 tp=2
    gpt: tp=4 > pp=2 dp=2 cp=2
    transnormer: cp=2 tp=2 lasp > pp=2 tp=2
"""


def rows(lines, marks=()):
    """A kind of model, the mesh that saves and the one that goes on, of each line."""
    for line in lines.strip().splitlines():
        kind, _, meshes = line.strip().partition(": ")
        yield pytest.param(
            kind, *(case_of(mesh) for mesh in meshes.split(" > ")), marks=marks, id=line.strip()
        )


@pytest.mark.parametrize(
    ("kind", "first", "second"), [*rows(PAIRS), *rows(SLOW_PAIRS, pytest.mark.slow)]
)
def test_the_same_bits_are_loaded_on_another_mesh(kind, first, second, default_data, tmp_path):
    went_on, resumed = both(kind, first, second, default_data, tmp_path)
    assert went_on.copies_differ == resumed.copies_differ == ()
    saved = went_on.tensors["saved"]
    assert {name.split("/")[-1] for name in saved if "/" in name} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert all(saved[f"{name}/exp_avg"].any() for name in saved if "/" not in name)
    assert equal(resumed.tensors["loaded"], saved)
    assert counted(resumed) == counted(went_on)[2:]
    assert losses_apart(resumed, went_on) <= BOUND


def test_other_samples_would_be_seen(default_data, tmp_path):
    """The bound on losses is one on the order of samples.

    With eight samples too late, they are far apart.
    """
    late = partial(samples_skipped, 8)
    went_on, resumed = both("llama", case_of("dp=2"), case_of("none"), default_data, tmp_path, late)
    assert equal(resumed.tensors["loaded"], went_on.tensors["saved"])
    assert losses_apart(resumed, went_on) > 1000 * BOUND


def both(kind, first, second, data, folder, sabotage=None):
    """4 iterations on one mesh, and from the second one's checkpoint on another.

    Micro-batches of 2 where they fit.
    """
    more = ("--micro-batch-size", "1" if 8 in (first.dp, second.dp) else "2")
    went_on = trained(
        kind, first, data, None, *more, "--save", str(folder), "--save-interval", "2", iterations=4
    )
    more += ("--load", str(folder), "--ckpt-step", "2")
    return went_on, trained(kind, second, data, sabotage, *more, iterations=4)


def losses_apart(resumed, went_on):
    pairs = zip(resumed.records, went_on.records[2:], strict=True)
    return max(abs(a["lm_loss"] - b["lm_loss"]) for a, b in pairs)


def counted(run):
    return [
        (record["iteration"], record["consumed_samples"], record["consumed_tokens"])
        for record in run.records
    ]
