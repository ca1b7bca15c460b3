"""An entry that has done its work leaves nothing that can still abort its process.

A thread of gloo's lets go of a collective's tensors after the collective has ended. If the interpreter is being taken
down by then, the process aborts. How often depends on the machine, so the test is that none is taken down.
"""

import sys

import pytest

from tests import starts
from tests.pretraining import DIT, TINY
from tests.starts import ROOT

DRIVER = f"""
import atexit, os, runpy, sys
class Witness:
    def __del__(self, write=os.write):
        write(1, b"taken down\\n")
sys.witness = Witness()
atexit.register(print, "exit handlers were called", flush=True)
sys.path.insert(0, {str(ROOT)!r})
sys.argv = sys.argv[1:]
print("not flushed", end=" ")
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def ended(folder, entry, *arguments, ranks=1):
    """An entry in a process of its own, or in two, as a launcher starts them."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    python = starts.torchrun(ranks) if ranks > 1 else [sys.executable]
    return starts.ended([*python, str(driver), entry, *arguments])


def test_the_driver_sees_an_interpreter_that_is_taken_down(tmp_path):
    """The control: a module that ends as Python does by itself."""
    (tmp_path / "plain.py").write_text("pass\n")
    process = ended(tmp_path, "plain")
    assert process.stdout.count("taken down") == 1


@pytest.mark.slow
def test_training_and_drawing(tmp_path):
    run = str(tmp_path / "run")
    trained = ended(tmp_path, "pretrain_dit", *DIT, "--train-iters", "2", "--save", run, ranks=2)
    drawn = ended(tmp_path, "tools.sample_dit", "--load", run, "--classes", "3", "--num-samples", "2", "--steps", "2")
    for process, ranks in ((trained, 2), (drawn, 1)):
        assert process.returncode == 0, process.stderr
        assert "taken down" not in process.stdout
        assert process.stdout.count("exit handlers were called") == ranks
        assert process.stdout.count("not flushed") == ranks


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", "-1"], "error: lr"),
        pytest.param(["--data-path", "none", "--tokenizer-model", "none"], "error: ", marks=pytest.mark.slow),
    ],
)
def test_an_error(flags, words, tmp_path):
    process = ended(tmp_path, "pretrain_gpt", *TINY, "--train-iters", "2", *flags)
    assert process.returncode == 1
    assert words in process.stderr
    assert "taken down" not in process.stdout


def test_a_defect_keeps_its_traceback_and_its_status(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from train.run import run_entry\ndef main(argv):\n    raise RuntimeError('broken')\nrun_entry(main)\n"
    )
    process = ended(tmp_path, "broken")
    assert process.returncode == 1
    assert "RuntimeError: broken" in process.stderr
    assert "taken down" not in process.stdout


@pytest.mark.parametrize(
    ("redirection", "status"), [pytest.param(">&-", 0, marks=pytest.mark.slow), ("2>&-", 0), (">/dev/full", 120)]
)
def test_streams_that_are_closed_or_full(redirection, status):
    """Output that cannot be written gives the status that Python itself ends with then."""
    code = "from train.run import run_entry; run_entry(lambda argv: print('done'))"
    shell = ["env", "-u", "PYTHONUNBUFFERED", "bash", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code]
    assert starts.ended(shell).returncode == status


LEFT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from data.loader import Batching, batches
from runtime.errors import UserError
from train.run import exit_status, run_entry

class Zeros:
    def __getitem__(self, index):
        return dict.fromkeys(("tokens", "labels", "loss_mask"), torch.zeros(4))

def main(arguments):
    reader = batches(Zeros(), Batching(global_batch_size=1, micro_batch_size=1, num_workers=1), 0)
    next(reader)
    sys.kept = reader  # as the frames of an error keep it
    raise UserError("a sample is broken")

END
"""


@pytest.mark.parametrize(
    "end", ["run_entry(main)", pytest.param("sys.exit(exit_status(main, []))", marks=pytest.mark.slow)]
)
def test_an_error_beside_data_loaders_ends_the_process(tmp_path, end):
    (tmp_path / "left.py").write_text(LEFT.replace("END", end))
    process = starts.ended([sys.executable, "left.py"], tmp_path)
    assert (process.returncode, process.stderr) == (1, "error: a sample is broken\n")
