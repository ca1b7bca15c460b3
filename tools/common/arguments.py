"""Helpers for command-line programs: a parser, argument types, and a clean exit on signals."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from runtime import __version__
from runtime.errors import UserError, did_you_mean, printable, unknown_argument
from runtime.files import unwritable

P = ParamSpec("P")


class UsageError(UserError):
    """An invalid command line; only one rank prints the error, as with other user errors."""

    status = 2


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors, so that the command prints one line and exits."""

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            is_command = isinstance(action, argparse._SubParsersAction)
            if is_command and message.endswith(f"required: {action.dest}"):
                message = f"a command is missing; give one of {', '.join(action.choices or ())}"
        raise UsageError(f"{message}; --help lists the arguments")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and suggest the nearest flag for an unknown one.

        argparse reports a misspelt required flag as a missing argument. So if parsing fails, the
        error names an unknown word that resembles a missing flag instead.
        """
        words = sys.argv[1:] if args is None else [*args]
        try:
            parsed, unknown = self.parse_known_args(words, namespace)
            candidates = _flags(self, words)
        except UsageError as error:
            candidates = _missing_flags(str(error))
            unknown = self._misspelt(words, candidates)
            if not unknown:
                raise

        if unknown:
            raise UsageError(
                unknown_argument(unknown[0], lambda flag: did_you_mean(flag, candidates))
            )

        return parsed

    def _misspelt(self, words: Sequence[str], missing: Sequence[str]) -> list[str]:
        """Return the words that are not flags of this parser but resemble a missing flag."""
        accepted = _flags(self, words)
        misspelt = []
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in accepted and did_you_mean(flag, missing):
                misspelt.append(word)
        return misspelt


def _missing_flags(error: str) -> list[str]:
    """Return the flags that argparse's message says are required."""
    message, _, _ = error.partition(";")
    if message.endswith("required") or "required: " in message:
        return re.findall(r"--[\w-]+", message)
    return []


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the flags of a parser, and of the subcommands that the words name."""
    flags = list(parser._option_string_actions)
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for name, command in action.choices.items():
            if name in words:
                flags += _flags(command, words)

    return flags


def parser_for(prog: str, description: str | None) -> Parser:
    """Return a parser with ``--version``, without abbreviated flags.

    The description is a program's docstring; its line breaks are kept.
    """
    parser = Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longmesh {__version__}")
    return parser


def at_least(minimum: int | float) -> Callable[[str], Any]:
    """Return an argparse type for numbers of ``minimum`` or more.

    They have the type of ``minimum`` (int or float), and are below 2^63.
    """
    kind = "an integer" if isinstance(minimum, int) else "a number"

    def number(text: str) -> int | float:
        with suppress(ValueError):
            value = type(minimum)(text)
            if minimum <= value < 1 << 63:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} of {minimum} or more")

    return number


positive = at_least(1)


def refuse_folder(flag: str, path: Path | None, fix: str = "give a file") -> None:
    """Raise UserError if ``path``, the value of a flag that expects a file, is a folder."""
    if path is not None and path.is_dir():
        raise UserError(f"{flag} is {path}, but that is a folder; {fix}")


def refuse_unwritable(flag: str, path: Path) -> None:
    """Raise UserError if no file can be written in the folder of ``path``, the value of a flag."""
    why = unwritable(path.parent, f"give another {flag}")
    if why:
        raise UserError(f"{flag} is {path}, in {path.parent}, {why}")


def one_line_errors(main: Callable[P, int | None]) -> Callable[P, int]:
    """Wrap ``main`` so that user errors and system errors are printed as one line.

    The exit status is main's result (0 for None); after an error, the error's ``status``, or 1.
    """

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except BrokenPipeError:
            raise
        except (UserError, OSError) as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            return getattr(error, "status", 1)

    return command


def run_command(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with its status; SIGTERM and Ctrl-C exit without a traceback.

    SIGTERM is raised as an exception too, so that half-written files are removed and processes
    ended on the way out.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        try:
            sys.exit(main())
        finally:
            # Flush here: if the output's reader is gone, a flush at exit would print an error.
            print(end="", flush=True)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        sys.exit(130)
