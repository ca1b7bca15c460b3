"""The error of this package."""


class DataError(ValueError):
    """A file, corpus or data setting that cannot be trained on; the message names it and what to do."""
