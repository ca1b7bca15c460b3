"""Errors of context parallelism."""

from runtime.errors import UserError


class ContextError(UserError):
    """A context-parallel configuration that cannot work; the message gives the reason and the fix."""
