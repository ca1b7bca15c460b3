"""The command line of tools/prepare_data.py, started as a user does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.starts import PATIENCE, interruptible, wait_until
from tools.prepare_data import main

ROOT = Path(__file__).parents[2]


def write_text(folder: Path, documents: int = 20) -> Path:
    folder.mkdir()
    for i in range(documents):
        (folder / f"{i}.txt").write_text(f"It was the {i}th of many short stories about tokens.\n" * 30)
    return folder


def test_writes_then_keeps_then_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text")
    flags = ["--input", str(text), "--output-prefix", str(tmp_path / "d")]
    assert main([*flags, "--vocab-size", "320"]) == 0
    wrote = capsys.readouterr().out
    assert "20 documents" in wrote
    assert "bytes per token, unigram entropy" in wrote
    assert f"--tokenizer-model {tmp_path / 'd'}.model" in wrote
    assert main([*flags, "--vocab-size", "320"]) == 0
    assert capsys.readouterr().out == wrote.replace("wrote", "kept")
    assert main([*flags, "--vocab-size", "330"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "--overwrite" in error
    assert main([*flags, "--vocab-size", "330", "--overwrite"]) == 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "tools/prepare_data.py", "--input", tmp_path / "none", "--output-prefix", tmp_path / "d"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr == f"error: input {tmp_path / 'none'} does not exist; check the path\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--input", "x"],
        ["--stdlib", "--input", "x"],
        ["--tokenizer-model", "t.model", "--vocab-size", "300"],
        ["--max-bytes", "0"],
        ["--vocab-size", "-3"],
    ],
)
def test_contradicting_flags(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_leaves_nothing(
    tmp_path: Path, default_data: Path, number: signal.Signals, status: int
) -> None:
    out, tokenizer = tmp_path / "out", default_data.with_suffix(".model")
    with interruptible():
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.prepare_data", "--output-prefix", out / "d", "--tokenizer-model", tokenizer],
            cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        # The .bin is under its temporary name while documents are tokenised.
        wait_until(lambda: list(out.glob(".d.*.bin")) or process.poll() is not None)
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert "Traceback" not in errors
    assert not out.exists()


def test_help_waits_for_nothing_large() -> None:
    """What makes the help slow are these imports, on any machine."""
    code = (
        "import runpy, sys; sys.argv = ['prepare_data', '--help']\n"
        "try:\n    runpy.run_module('tools.prepare_data', run_name='__main__')\n"
        "finally:\n    print('LOADED', {'torch', 'numpy', 'sentencepiece'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert "--output-prefix" in run.stdout
    assert run.stdout.endswith("LOADED set()\n")
