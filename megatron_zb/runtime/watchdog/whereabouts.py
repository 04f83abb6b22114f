"""Position of a thread, read from its stack by another one, without its cooperation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import FrameType

_COLLECTIVES = "torch.distributed.distributed_c10d"
_DEPTH = 5  # frames that are told

Phases = Mapping[tuple[str, str], str]
"""Phrases such as ``in the optimizer step``, by the start of a module's name and a function."""


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; empty where it has ended."""
    frame = sys._current_frames().get(thread)
    return list(_outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def phase_of(frames: list[FrameType], phases: Phases) -> str | None:
    """Return the phrase of the innermost function that has one, None if none has."""
    for frame in frames:
        for (module, function), phrase in phases.items():
            if frame.f_code.co_name == function and _module(frame).startswith(module):
                return phrase
    return None


def collective_of(frames: list[FrameType]) -> str | None:
    """Return the function of torch.distributed in which the thread waits for others, or None."""
    found = None
    for frame in frames:
        name = frame.f_code.co_name
        if _module(frame) == _COLLECTIVES and not name.startswith("_"):
            found = name
    return found


def place_of(frames: list[FrameType]) -> str:
    """Describe the innermost functions outside of torch.

    For example ``step (optimizer.py:120), called by ...``.
    """
    own = [f for f in frames if not _module(f).startswith(("torch.", "contextlib"))]
    said = [
        f"{f.f_code.co_name} ({PurePath(f.f_code.co_filename).name}:{f.f_lineno})"
        for f in own[:_DEPTH]
    ]
    return ", called by ".join(said) or "nowhere: its thread has ended"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
