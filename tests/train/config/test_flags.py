"""How a command line is read, whatever the fields are."""

import pytest

from train.config.flags import spelled
from train.config.language import parse_args


def test_megatrons_spelling_of_a_flag_and_underscores_are_taken() -> None:
    flags = "--override-opt_param-scheduler --lr_decay_style=inverse-square-root --train_iters 7 --save a_b --load=c_d"
    config = parse_args(flags.split())
    assert config.optimizer.override_opt_param_scheduler
    assert (config.optimizer.lr_decay_style, config.train.train_iters) == ("inverse-square-root", 7)
    assert (config.checkpoint.save, config.checkpoint.load) == ("a_b", "c_d")
    assert parse_args(["--no-use-checkpoint-opt_param-scheduler"]) == parse_args([])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bf16", True, "--bf16"),
        ("bf16", False, "--no-bf16"),
        ("data_path", ["0.3", "a"], "--data-path 0.3 a"),
        ("save_interval", None, "--save-interval none"),
        ("adam_eps", 1e-8, "--adam-eps 1e-08"),
    ],
)
def test_a_field_is_spelled_as_a_command_line_has_it(name: str, value: object, words: str) -> None:
    assert spelled(name, value) == words
