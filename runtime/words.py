"""Counts, bytes and durations in sentences."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 process", "2 processes", "1,024 tokens"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def amount(count: float) -> str:
    """Return bytes in GB or, where they are few, MB, such as "23.4 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Return seconds with four digits in the unit that suits them, such as 610.8 ms, 22.40 s, 35.21 min or 2.395 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (1 if unit == "s" else 2) * size:
            return f"{_four_digits(seconds / size)} {unit}"
    return f"{_four_digits(1e3 * seconds)} ms"


def _four_digits(number: float) -> str:
    return f"{number:#.4g}".rstrip(".") if number < 9999.5 else f"{number:,.0f}"
