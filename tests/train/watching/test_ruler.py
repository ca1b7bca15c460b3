"""The curve of RULER in a run: wrong tokens by example, and settings."""

import pytest
import torch

from data.ruler.config import RulerConfig
from train.objectives.language import count_wrong


def test_wrong_tokens_are_counted_by_example():
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 6, 4), torch.randn(9, 4)
    likeliest = (hidden @ weight.T).argmax(-1)
    labels = torch.where(torch.arange(6) < 3, -100, likeliest)
    labels[0, 4] = (labels[0, 4] + 1) % 9
    examples = torch.tensor([[1] * 6, [0] * 6])
    wrong = torch.zeros(3, dtype=torch.int64)
    assert count_wrong(hidden, weight, labels, examples, wrong) == 1
    assert wrong.tolist() == [0, 1, 0]
    count_wrong(hidden, weight, labels, examples, wrong)
    assert wrong.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ruler_interval": 0}, "ruler_interval is 0; it must be 1 or more"),
        ({"ruler_lengths": (0,)}, "ruler_lengths is 0; each must be 1 or more"),
        ({"ruler_tasks": ("qa_1",)}, "ruler_tasks is qa_1; there are niah_single_1"),
        ({"ruler_tasks": ()}, "ruler_tasks is ; name at least one"),
        ({"ruler_tasks": ("vt", "vt")}, "ruler_tasks is vt vt; name each task once"),
        ({"ruler_samples": 3}, "ruler_samples is 3; it must be at least 1 for each of the 4 ruler_tasks"),
        ({"ruler_samples": 9}, "ruler_samples is 9; it is of a curve that ruler_interval asks for; give --ruler-inte"),
        ({"ruler_lengths": (512,)}, "ruler_lengths is 512; it is of a curve"),
        ({"ruler_tasks": ("vt",)}, "ruler_tasks is vt; it is of a curve"),
    ],
)
def test_wrong_settings_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        RulerConfig(**given)


def test_lengths_are_those_of_the_model_or_less():
    assert RulerConfig().lengths(4096) == [1024, 2048, 4096]
    assert RulerConfig().lengths(1024) == [512, 1024]
    assert RulerConfig(ruler_interval=1, ruler_lengths=(512, 256)).lengths(512) == [256, 512]
    with pytest.raises(ValueError, match="ruler_lengths names 512 and seq_length is 256, so that prompts would be cut"):
        RulerConfig(ruler_interval=1, ruler_lengths=(512,)).lengths(256)
