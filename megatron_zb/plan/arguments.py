"""Numbers of the command line of ``megatron-zb plan``."""

from __future__ import annotations

from megatron_zb.errors import UsageError


def whole_number(flag: str, value: int, example: int, most: int = 10_000_000) -> int:
    """Check one number.

    Raises:
        UsageError: it is below 1 or too large.
    """
    if not 1 <= value <= most:
        raise UsageError(
            f"{flag} {value} is not between 1 and {most}: give, for example, {flag} {example}"
        )
    return value


def numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    """Read sizes that are separated by commas, None if there is no text.

    Raises:
        UsageError: one is no whole number above 0.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdecimal() and 0 < len(p) < 8 and int(p) > 0 for p in parts):
        raise UsageError(f"{flag} '{text}' is no list of sizes: give, for example, {flag} 2,4")
    return tuple(sorted({int(part) for part in parts}))
