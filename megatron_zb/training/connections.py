"""How a rank learns that another one has ended."""

from __future__ import annotations

import re

# As gloo and NCCL say that the other end of a connection is gone.
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|Socket closed"
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error means that another rank has gone, and nothing about this one."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
