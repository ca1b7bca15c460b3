"""The command: what it prints, its status, and errors in one line."""

from pathlib import Path

import pytest

from tools.parity import __main__ as parity
from tools.parity.__main__ import main
from tools.parity.own import Difference

TINY = str(Path(__file__).parents[2] / "configs" / "models" / "llama_tiny.toml")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["none.toml"], "none.toml: cannot be read"),
        ([f"--config={TINY}", "--no-such-flag"], "unknown argument --no-such-flag"),
        (
            ["--world-size", "3", "--config", TINY],
            "world_size is 3, but the mesh needs a multiple of 2",
        ),
        (["lama_tiny"], "there is no model lama_tiny; name one of llama_tiny"),
        (
            ["llama_tiny", "--num-layers", "1", "--pipeline-model-parallel-size", "2"],
            "num_layers is 1",
        ),
    ],
)
def test_what_is_wrong_is_one_line(argv, words, capsys):
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_the_status_says_whether_all_is_equal(monkeypatch, tmp_path, capsys):
    differences = [Difference("layers.0", 1.0, 1.0, 1.0)]
    monkeypatch.setattr(parity, "compared", lambda words, *_, **more: differences)
    (tmp_path / "config.toml").write_text(Path(TINY).read_text())
    assert main([str(tmp_path), "--seq-length", "64"]) == 0
    differences.append(Difference("layers.1", float("nan"), 1.0, 1.0))
    with pytest.raises(SystemExit) as ended:
        main([TINY])
    assert ended.value.code == 1
    equal, differs, count = capsys.readouterr().out.splitlines()
    assert equal.startswith("equal to one process in 1 comparisons")
    assert differs == "differs first: layers.1, by nan of 1.0e+00"
    assert count == "1 of 2 comparisons differ"
