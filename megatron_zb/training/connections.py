"""Detection of the end of another rank."""

from __future__ import annotations

import re

# As gloo and NCCL say that the other end of a connection is gone.
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|Socket closed"
)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error means only that another rank has ended."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
