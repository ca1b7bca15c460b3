"""The error of this package."""


class ContextError(ValueError):
    """A context-parallel configuration that cannot work; the message says why and what would."""
