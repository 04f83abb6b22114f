"""Sizes as people write them: ``80GiB`` to bytes, and bytes to ``12.3 GiB``."""

from __future__ import annotations

import re

from megatron_zb.errors import UsageError

GIB = 2**30

_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", flags=re.ASCII)


def size_in_bytes(text: str, what: str) -> float:
    """Read a size such as ``80GiB``, ``80GB`` or ``85899345920B``.

    Raises:
        UsageError: the text is no size, it has no unit, or the size is zero.
    """
    found = _SIZE.fullmatch(text)
    if found and not found.group(2):
        number = found.group(1)
        raise UsageError(f"{what} '{text}' has no unit: give {number}GiB, or {number}B for bytes")
    factor = _FACTORS.get(found.group(2).lower()) if found else None
    if found is None or factor is None or not float(found.group(1)) > 0:
        raise UsageError(f"{what} '{text}' is not a size of memory: give, for example, 80GiB")
    return float(found.group(1)) * factor


def gib(size: float) -> str:
    """Format bytes as GiB, with one digit after the point."""
    return f"{size / GIB:.1f} GiB"
