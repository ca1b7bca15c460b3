"""The base of every error that a user can cause."""


class UserError(ValueError):
    """What a user can set right; the message is one line that names what was found, where, and the fix.

    Entries and tools print it and exit with status 1. Every other exception is a defect and keeps its traceback.
    """
