"""The error of this package."""

from runtime.errors import UserError


class DataError(UserError):
    """A file, corpus or data setting that cannot be trained on; the message names it and what to do."""
