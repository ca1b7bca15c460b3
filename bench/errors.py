"""What ends a bench."""

from runtime.errors import UserError


class MeasureError(UserError):
    """What was to be measured failed, or computes something else than it should; its time would mean nothing."""
