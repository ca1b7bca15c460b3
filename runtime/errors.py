"""The base of every error that a user can cause."""


class UserError(ValueError):
    """An error that the user can fix; its message is one line: what was found, where, and the fix.

    Entries and tools print it and exit with its ``status``. Any other exception is a bug and keeps its traceback.
    """

    status = 1


class LaunchError(UserError):
    """Processes cannot join: the launcher's variables are wrong, or the store cannot be reached."""


class DataError(UserError):
    """A file, corpus or setting of data that cannot be used; the message names it and the fix."""


class StoppedError(DataError):
    """The machine, not the input, stopped the work: what is done holds."""
