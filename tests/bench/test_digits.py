import numpy as np
import pytest
import torch

from bench.digits import LEAST_ACCURACY, LEAST_AGREEMENT, agreement, learnt, main, report
from data.latents.dataset import Digits
from train.sampling import by_class


@pytest.fixture(scope="module")
def classifier():
    return learnt()


def real(count):
    """So many real digits of each kind, as a perfect model would draw them."""
    digits = Digits()
    rows = np.concatenate([np.flatnonzero(digits.labels == digit)[:count] for digit in range(10)])
    return torch.from_numpy(digits.images[rows])


def test_the_classifier_reads_real_digits(classifier):
    assert classifier[1] >= LEAST_ACCURACY
    assert agreement(classifier[0], real(20).numpy(), by_class(range(10), 20)) >= LEAST_ACCURACY


def test_digits_that_were_not_asked_for_agree_by_chance(classifier):
    labels = np.random.RandomState(0).permutation(by_class(range(10), 100))
    assert 0.05 < agreement(classifier[0], real(100).numpy(), labels) < 0.15
    noise = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert agreement(classifier[0], noise.numpy(), by_class(range(10), 20)) < 0.3


def test_report_states_both_shares_and_draws(tmp_path, capsys):
    labels = by_class(range(10), 2)
    assert report(real(2), labels, tmp_path / "digits.png")
    assert "20 drawn digits" in capsys.readouterr().out
    assert (tmp_path / "digits.png").stat().st_size > 500
    assert not report(real(2).flip(0), labels, tmp_path / "digits.png")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_run_learns_digits(tmp_path, capsys):
    """`make dit` in one process; on four, sharing the machine's cores, it computes the same."""
    from pretrain_dit import main as pretrain

    pretrain(["--config", "configs/dit_tiny.toml", "--context-parallel-size", "1", "--save", str(tmp_path)])
    main(["--load", str(tmp_path), "--picture", str(tmp_path / "digits.png")])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("it takes"))
    assert float(line.split()[2].rstrip("%")) >= 100 * LEAST_AGREEMENT
