"""Counts in sentences."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 process", "2 processes", "1,024 tokens"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"
