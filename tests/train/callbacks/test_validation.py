"""A validation of averaged weights, which take the weights' place for as long as it lasts."""

import pytest
import torch

from tests.parallel.tiny import full, weights_of
from tests.train.runs import Samples, run_with, settings
from tests.train.test_trainer import expected_validation
from train.callbacks.validation import Validation
from train.config.entries import Config


class Averaged(Config):
    """A configuration of a language model with averages, which diffusion's alone has a flag for."""

    ema_decay = 0.5


def watched(trainer, observed):
    """Keep each validation's loss, the averages, and the weights on both sides of it."""
    (validation,) = (callback for callback in trainer.callbacks if isinstance(callback, Validation))
    (part,), plain = trainer.parts, validation.validate

    def validate(iteration):
        averages = {name: full(average) for name, average in trainer.ema.weights.items()}
        before = weights_of(part)
        figures = plain(iteration)
        observed.append((figures["validation_loss"], averages, before, weights_of(part)))
        return figures

    validation.validate = validate


def test_the_averages_are_validated_and_the_weights_are_back():
    observed = []
    config = Averaged(**vars(settings(train_iters=2)))
    _, error = run_with(0, 1, config, None, lambda trainer: watched(trainer, observed), Samples())
    assert error == ""
    ((loss, averages, before, after),) = observed
    assert loss == pytest.approx(expected_validation(4, averages), rel=1e-6)
    assert loss != pytest.approx(expected_validation(4, before), rel=1e-4), (
        "the control: weights are no averages"
    )
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
