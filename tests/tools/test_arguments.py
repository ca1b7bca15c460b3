"""The end of a command: by a reader who has enough."""

import subprocess
import sys

from tests.starts import PATIENCE

COMMAND = """
from tools.arguments import one_line_errors, run_command
run_command(one_line_errors(lambda: print("x" * (1 << 20))))
"""


def test_a_reader_that_goes_away_ends_a_command_without_a_word() -> None:
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.read(1) == b"x"
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(PATIENCE) == 141
