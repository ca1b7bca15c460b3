"""A checkpoint of any mesh goes on on any other: the same bits are loaded, and the same samples follow."""

import pytest

from tests.parity.bugs import samples_skipped
from tests.parity.run import equal, trained
from tools.common.cases import Case

BOUND = 1e-6
PAIRS = [("gpt", Case(method="none"), Case(pp=2, schedule="Interleaved1F1B", virtual=2))]
SLOW = [
    ("gpt", Case(pp=2, dp=2, cp=2, mode="zero1"), Case(tp=2)),
    ("llama", Case(pp=2, tp=2), Case(dp=2, cp=2, method="zigzag")),
    ("llama", Case(dp=2, cp=2, tp=2, copies=2), Case(method="none")),
    ("llama", Case(tp=4), Case(pp=4)),
    ("gpt", Case(pp=4), Case(dp=4, mode="zero2")),
    ("llama", Case(dp=2, mode="legacy_ddp"), Case(cp=4, method="wallfacer", team=2)),
    ("gpt", Case(dp=4, mode="zero1", copies=2), Case(pp=2, tp=2, layers=(3, 1))),
    ("llama", Case(pp=2, cp=2, tp=2, mode="zero1"), Case(dp=8, mode="ddp")),
    ("llama", Case(pp=2, cp=3, method="ring"), Case(dp=2, tp=2, mode="zero2")),
    ("gpt", Case(pp=2, dp=2, virtual=2, schedule="InterleavedZeroBubble", mode="zero1"), Case(cp=2, tp=2)),
    ("gpt", Case(tp=4), Case(pp=2, dp=2, cp=2)),
    ("transnormer", Case(cp=2, tp=2, method="lasp"), Case(pp=2, tp=2)),
]


def title(value):
    return value.title.replace(" ", "") if isinstance(value, Case) else None


@pytest.mark.parametrize(
    ("kind", "first", "second"), PAIRS + [pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW], ids=title
)
def test_a_checkpoint_goes_on_on_another_mesh(kind, first, second, default_data, tmp_path):
    went_on, resumed = both(kind, first, second, default_data, tmp_path)
    assert went_on.copies_differ == resumed.copies_differ == ()
    saved = went_on.tensors["saved"]
    assert {name.split("/")[-1] for name in saved if "/" in name} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(saved[f"{name}/exp_avg"].any() for name in saved if "/" not in name)
    assert equal(resumed.tensors["loaded"], saved)
    assert counted(resumed) == counted(went_on)[2:]
    assert losses_apart(resumed, went_on) <= BOUND


def test_other_samples_would_be_seen(default_data, tmp_path):
    """The bound on losses is one on the order of samples: two samples too late, and they are far apart."""
    went_on, resumed = both("llama", Case(dp=2), Case(method="none"), default_data, tmp_path, samples_skipped)
    assert equal(resumed.tensors["loaded"], went_on.tensors["saved"])
    assert losses_apart(resumed, went_on) > 1000 * BOUND


def both(kind, first, second, data, folder, sabotage=None):
    """5 iterations on one mesh, and from the second one's checkpoint on another."""
    went_on = trained(kind, first, data, None, "--save", str(folder), "--save-interval", "2", iterations=5)
    load = ("--load", str(folder), "--ckpt-step", "2")
    return went_on, trained(kind, second, data, sabotage, *load, iterations=5)


def losses_apart(resumed, went_on):
    pairs = zip(resumed.records, went_on.records[2:], strict=True)
    return max(abs(a["lm_loss"] - b["lm_loss"]) for a, b in pairs)


def counted(run):
    return [(record["iteration"], record["consumed_samples"], record["consumed_tokens"]) for record in run.records]
