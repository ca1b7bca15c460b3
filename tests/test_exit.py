"""An entry reads its command line before heavy imports.

It leaves nothing that can still abort its process.

A thread of gloo's lets go of a collective's tensors after the collective has ended. If the
interpreter is being taken down by then, the process aborts. How often depends on the machine, so
the test is that none is taken down.
"""

import json
import sys
from subprocess import CompletedProcess

import pytest

from tests import starts
from tests.pretraining import DIT, TINY
from tests.starts import ROOT

DRIVER = f"""
import atexit, json, os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import train.run
class Witness:
    def __del__(self, write=os.write):
        write(1, b"taken down\\n")
def run(module, *arguments):
    sys.witness = Witness()
    atexit.register(print, "exit handlers were called", flush=True)
    sys.argv = [module, *arguments]
    print("not flushed", end=" ")
    runpy.run_module(module, run_name="__main__")
def forked(number, case):
    if not (child := os.fork()):
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{number}}.{{name}}", os.O_CREAT | os.O_WRONLY), stream)
        sys.exit(run(*case))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if sys.argv[1] == "--cases":
    print(json.dumps([forked(*case) for case in enumerate(json.loads(sys.argv[2]))]))
else:
    run(*sys.argv[1:])
"""
LEFT = """
import sys
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
SOURCES = {
    "plain": "pass\n",
    "broken": (
        "import train.run\ndef main(argv):\n    raise "
        "RuntimeError('broken')\ntrain.run.run_entry(main)\n"
    ),
    "left": LEFT.replace("END", "run_entry(main)"),
    "left_to_python": LEFT.replace("END", "sys.exit(exit_status(main, []))"),
}
TRAINING = ["pretrain_gpt", *TINY, "--train-iters", "2"]
CASES = {
    **{name: [name] for name in SOURCES},
    "a bad flag": [*TRAINING, "--lr", "-1"],
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The end of each case, in processes forked from one that has imported what they need."""
    folder = tmp_path_factory.mktemp("exit")
    for name, text in {**SOURCES, "driver": DRIVER}.items():
        (folder / f"{name}.py").write_text(text)
    process = starts.ended(
        [sys.executable, "driver.py", "--cases", json.dumps([*CASES.values()])], folder
    )
    assert process.returncode == 0, process.stderr
    results = {}
    for number, (name, status) in enumerate(zip(CASES, json.loads(process.stdout), strict=True)):
        outputs = ((folder / f"{number}.{stream}").read_text() for stream in ("out", "err"))
        results[name] = CompletedProcess(CASES[name], status, *outputs)
    return results


def test_the_driver_sees_an_interpreter_that_is_taken_down(ends):
    """The control: a module that ends as Python does by itself."""
    assert ends["plain"].stdout.count("taken down") == 1


@pytest.mark.slow
def test_training_and_drawing(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)

    def ended(python, *arguments):
        return starts.ended([*python, str(tmp_path / "driver.py"), *arguments])

    run = str(tmp_path / "run")
    trained = ended(starts.torchrun(2), "pretrain_dit", *DIT, "--train-iters", "2", "--save", run)
    drawing = (
        "tools.sample_dit",
        "--load",
        run,
        "--classes",
        "3",
        "--num-samples",
        "2",
        "--steps",
        "2",
    )
    for process, ranks in ((trained, 2), (ended([sys.executable], *drawing), 1)):
        assert process.returncode == 0, process.stderr
        assert "taken down" not in process.stdout
        assert process.stdout.count("exit handlers were called") == ranks
        assert process.stdout.count("not flushed") == ranks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a bad flag", "error: lr"),
        ("broken", "Traceback"),
        ("left", "error: a sample is broken"),
    ],
)
def test_an_error_has_its_status(name, message, ends):
    """A defect keeps its traceback."""
    assert ends[name].returncode == 1
    assert ends[name].stderr.startswith(message)
    assert name != "broken" or ends[name].stderr.endswith("RuntimeError: broken\n")
    assert "taken down" not in ends[name].stdout
    assert name != "left" or ends[name].stderr == "error: a sample is broken\n"
    assert ends["left_to_python"].returncode == 1


@pytest.mark.parametrize(
    ("redirection", "status"),
    [(">/dev/full", 120), *(pytest.param(f"{n}>&-", 0, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_streams_that_are_closed_or_full(redirection, status):
    """Output that cannot be written gives the status that Python itself ends with then."""
    code = "from train.run import run_entry; run_entry(lambda argv: print('done'))"
    shell = [
        "env",
        "-u",
        "PYTHONUNBUFFERED",
        "bash",
        "-c",
        f'exec "$0" -c "$1" {redirection}',
        sys.executable,
        code,
    ]
    assert starts.ended(shell).returncode == status


LAZY = """
    PIL datasets diffusers matplotlib megatron sentencepiece sklearn tensorboard tokenizers
    torch._dynamo
    torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.pipelining
    torch.distributed.tensor
    transformers wandb
""".split()
READING = """
import runpy, sys
def tell():
    print("LOADED", *sys.modules)
for command in (
    "pretrain_gpt.py --help", "pretrain_dit.py --help", "pretrain_gpt.py --no-such-flag"
):
    sys.argv = command.split()
    try:
        runpy.run_path(sys.argv[0])["main"](sys.argv[1:])
    except (SystemExit, ValueError):
        tell()
import sentencepiece
tell()
"""


def test_a_command_line_is_read_before_anything_heavy_is_loaded():
    """--help of both entries, and a flag that is refused, which a person waits for.

    That goes for the entries' own imports too.
    """
    done = starts.ended([sys.executable, "-c", READING], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    *read, control = [
        line.split() for line in done.stdout.splitlines() if line.startswith("LOADED")
    ]
    assert len(read) == 3
    for modules in read:
        assert "train.config.flags" in modules
        assert not ({name.split(".")[0] for name in modules} | set(modules)) & set(LAZY)
    assert "sentencepiece" in control, "a heavy import is seen"
