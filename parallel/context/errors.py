"""The error of this package."""

from runtime.errors import UserError


class ContextError(UserError):
    """A context-parallel configuration that cannot work; the message says why and what would."""
