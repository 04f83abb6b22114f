"""The end of a rank whose peer has ended: one sentence in place of gloo's or NCCL's error."""

from __future__ import annotations

_SAID = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
"""What gloo says where another rank has ended."""


def describe(error: BaseException, rank: int) -> str | None:
    """Return one sentence for an error that follows from the end of another rank, else None."""
    if not isinstance(error, RuntimeError) or not any(said in str(error) for said in _SAID):
        return None
    return (
        f"megatron_zb: error: rank {rank} has lost the connection to another rank, which has "
        "ended: what that one said, or torchrun's report, tells why"
    )
