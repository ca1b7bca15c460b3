"""The error class of data/."""

from runtime.errors import UserError


class DataError(UserError):
    """A file, corpus or setting cannot be used for training; the message names it and the fix."""


class StoppedError(DataError):
    """The machine, not the input, stopped the work: what is done holds."""
