"""Helpers for command lines: a parser, argument types, and a clean end on signals."""

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

P = ParamSpec("P")


class UsageError(UserError):
    """Arguments that a command does not take; one of a launcher's ranks tells them, as it does
    other errors.
    """

    status = 2


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, for whoever called the command to print one line and exit."""

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.endswith(
                f"required: {action.dest}"
            ):
                message = f"a command is missing; give one of {', '.join(action.choices)}"
        raise UsageError(f"{message}; --help lists the arguments")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and ask for the nearest flag where one is unknown, or misspelt
        and so missing.
        """
        words = sys.argv[1:] if args is None else [*args]
        try:
            found, unknown = self.parse_known_args(words, namespace)
            known = _flags(self, words)
        except UsageError as error:
            message, _, _ = str(error).partition(";")
            known = (
                re.findall(r"--[\w-]+", message)
                if message.endswith("required") or "required: " in message
                else []
            )
            given = {word: word.partition("=")[0] for word in words if word.startswith("--")}
            others = {*given.values()} - {*_flags(self, words)}
            unknown = [
                word for word, flag in given.items() if flag in others and did_you_mean(flag, known)
            ]
            if not unknown:
                raise
        if unknown:
            raise UsageError(unknown_argument(unknown[0], lambda flag: did_you_mean(flag, known)))
        return found


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the flags of a parser and of its commands that are among the words."""
    flags = list(parser._option_string_actions)
    for action in parser._actions:
        for name, command in (
            action.choices.items() if isinstance(action, argparse._SubParsersAction) else ()
        ):
            flags += _flags(command, words) if name in words else []
    return flags


def parser_for(prog: str, description: str | None) -> Parser:
    """Return a parser that knows ``--version``, refuses abbreviated flags and keeps the
    description's line breaks.
    """
    parser = Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longmesh {__version__}")
    return parser


def at_least(least: int | float) -> Callable[[str], Any]:
    """Return an argparse type: a number of ``least``'s type that is not below it, in 64 bits."""
    kind = "an integer" if isinstance(least, int) else "a number"

    def number(text: str) -> int | float:
        with suppress(ValueError):
            value = type(least)(text)
            if least <= value < 1 << 63:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} of {least} or more")

    return number


positive = at_least(1)


def refuse_folder(flag: str, path: Path | None, fix: str = "give a file") -> None:
    """Raise UserError if what a flag names, where a file is to be, is a folder."""
    if path is not None and path.is_dir():
        raise UserError(f"{flag} is {path}, which is a folder; {fix}")


def one_line_errors(main: Callable[P, int | None]) -> Callable[P, int]:
    """Let a command return its status, 0 for None; a user's error, or the system's, is one line and
    its status.
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
            print(
                end="", flush=True
            )  # or the interpreter would, and tell of a reader that has gone
    except BrokenPipeError:  # whoever reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        sys.exit(130)
