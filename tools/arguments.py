"""What command lines share: their parser and types of their arguments."""

import argparse


def parser_for(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that takes flags in full alone, and whose help keeps the lines of the description."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """An integer of 1 or more; argparse names the argument before the message."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return value
