"""The end of a command: by a reader who has enough, and by arguments that it does not take."""

import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, suppress
from io import StringIO

import pytest

from runtime import __version__
from runtime.ranks import run_ranks
from tests.starts import PATIENCE, ended, interruptible
from tools import fit, plan
from tools.common.arguments import UsageError, parser_for
from tools.ruler import __main__ as ruler
from tools.sample import main
from train.config import diffusion, language
from train.run import exit_status

COMMAND = (
    "from tools.common.arguments import one_line_errors, run_command; "
    "run_command(one_line_errors({}))"
)
ENTRY = "from train.run import run_entry; run_entry(lambda argv: print('x' * (1 << 20)))"


@pytest.mark.parametrize(
    "code",
    [
        COMMAND.format("lambda: print('what fits the buffer')"),
        pytest.param(ENTRY, marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_went_away_ends_a_command_without_a_word(code):
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=PATIENCE,
        env=env,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")],
)
def test_a_signal_ends_a_command_as_an_exception_without_a_traceback(number, status, message):
    code = (
        "import os, sys\ndef main():\n    try:\n        os.kill(os.getpid(), "
        "int(sys.argv[1]))\n    finally:\n"
    )
    code += "        print('cleaned')\n" + COMMAND.format("main")
    with interruptible():
        done = ended([sys.executable, "-c", code, str(int(number))])
    assert (done.returncode, done.stdout, done.stderr) == (status, "cleaned\n", message)


@pytest.mark.parametrize(
    "main", [language.parse_args, diffusion.parse_args, plan.main, fit.main, main]
)
def test_every_program_says_its_version(main, capsys):
    with suppress(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"longmesh {__version__}\n"


def _asked(rank, size):
    with redirect_stderr(StringIO()) as errors:
        return exit_status(main, ["--load", "x", "--fast"]), errors.getvalue()


def test_one_rank_tells_of_an_argument_that_none_takes():
    statuses, errors = zip(*run_ranks(_asked, 2), strict=True)
    assert statuses == (2, 2)
    assert "".join(errors) == "error: unknown argument --fast; --help lists them all\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load x --promt y", "unknown argument --promt; did you mean --prompt?"),
        ("--load x --cp=2", "unknown argument --cp=2; did you mean --context-parallel-size?"),
        ("--laod x", "unknown argument --laod; did you mean --load?"),
        ("--prompt x", "the following arguments are required: --load; --help lists the arguments"),
        ("--load x y", "unknown argument y; a value follows the flag it belongs to"),
    ],
)
def test_the_nearest_flag_is_asked_for(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        main(words.split())


def test_choices_that_are_a_table_are_no_commands():
    parser = parser_for("program", "")
    parser.add_argument("--links", nargs="+", choices={"fast": 1, "slow": 2})
    with pytest.raises(UsageError, match=r"unknown argument --lniks; did you mean --links\?"):
        parser.parse_args(["--links", "fast", "--lniks", "slow"])


def test_a_command_of_a_program_is_asked_for_flags_of_its_own(capsys):
    assert ruler.main(["model", "x", "--hiden-size", "8"]) == 2
    assert ruler.main(["model", "x", "--sample", "8"]) == 2
    refusal = "error: unknown argument --hiden-size; did you mean --hidden-size?\n"
    assert (
        capsys.readouterr().err
        == f"{refusal}error: unknown argument --sample; --help lists them all\n"
    )
    assert ruler.main([]) == 2
    refusal = (
        "error: a command is missing; give one of score, make, model, repeat; --help lists the "
        "arguments\n"
    )
    assert capsys.readouterr().err == refusal
    assert ruler.main(["make", "x.jsonl", "--lengths", "1024", "--tokeniser-model", "x"]) == 2
    assert (
        capsys.readouterr().err
        == "error: unknown argument --tokeniser-model; did you mean --tokenizer-model?\n"
    )
