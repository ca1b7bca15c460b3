"""Types of the tools' command-line arguments."""

import argparse


def positive(text: str) -> int:
    """An integer of 1 or more; argparse names the argument before the message."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return value
