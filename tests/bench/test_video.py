"""The bench of long videos: every process grows by less when there are more, and the loss is the same."""

from pathlib import Path

import pytest

from bench.video import Shape, main, measure

TINY = Shape(num_layers=1, hidden_size=16, num_attention_heads=1, train_iters=2)


def test_more_processes_have_the_same_loss_of_the_same_video(tmp_path: Path) -> None:
    one, two = (measure(tmp_path, 1, processes, "ring", TINY) for processes in (1, 2))
    assert one.patches == two.patches == 1024
    assert one.loss == pytest.approx(two.loss, abs=2e-6)
    assert one.seconds > 0
    assert "| 1,024 | 2 | 512 |" in str(two)


@pytest.mark.parametrize("flags", ["--train-iters 1", "--frames 0", "--processes 0", "--num-attention-heads 3"])
def test_bad_input_is_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags.split(), *(() if "frames" in flags else ("--frames", "1"))]) == 1
    assert capsys.readouterr().err.startswith("error: ")
