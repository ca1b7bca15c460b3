"""The end of a command: by a reader who has enough, and by arguments that it does not take."""

import subprocess
import sys
from contextlib import redirect_stderr, suppress
from io import StringIO

import pytest

from runtime import __version__
from runtime.ranks import run_ranks
from tests.starts import PATIENCE
from tools import fit, plan
from tools.sample import main
from train.config import diffusion, language
from train.run import exit_status

COMMAND = """
from tools.common.arguments import one_line_errors, run_command
run_command(one_line_errors(lambda: print("x" * (1 << 20))))
"""


def test_a_reader_that_goes_away_ends_a_command_without_a_word():
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout.read(1) == b"x"
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(PATIENCE) == 141


@pytest.mark.parametrize("main", [language.parse_args, diffusion.parse_args, plan.main, fit.main, main])
def test_every_program_says_its_version(main, capsys):
    with suppress(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"longmesh {__version__}\n"


def _asked(rank, size):
    with redirect_stderr(StringIO()) as said:
        return exit_status(main, ["--load", "x", "--fast"]), said.getvalue()


def test_one_rank_tells_of_an_argument_that_none_takes():
    statuses, said = zip(*run_ranks(_asked, 2), strict=True)
    assert statuses == (2, 2)
    assert "".join(said) == "error: unrecognized arguments: --fast; --help lists the arguments\n"
