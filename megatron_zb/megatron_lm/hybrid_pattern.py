"""The pattern of a hybrid model in Megatron-LM's arguments."""

from __future__ import annotations

import argparse

from megatron_zb.megatron_core.versions import HYBRID_PATTERNS
from megatron_zb.parsing import flag_of
from megatron_zb.schedules.hybrid_pattern import main_part, placed
from megatron_zb.schedules.layout import Letters

_NEW = HYBRID_PATTERNS[0]
SEGMENTS = f"'|' in {flag_of(_NEW)}"


def of_arguments(args: argparse.Namespace) -> str | None:
    """Return the pattern, under the name of any version."""
    return next(filter(None, (getattr(args, name, None) for name in HYBRID_PATTERNS)), None)


def is_placed(args: argparse.Namespace) -> bool:
    """Return whether there is a pattern, and it can say the layers of every chunk."""
    return hasattr(args, _NEW) and of_arguments(args) is not None


def segments(args: argparse.Namespace) -> str | None:
    """Return the main part of the pattern if it says the layers of each stage."""
    written = main_part(of_arguments(args) or "")
    return written if "|" in written else None


def place(args: argparse.Namespace, letters: Letters) -> None:
    """Write the layers of each stage into the pattern of the arguments."""
    written = placed(of_arguments(args) or "", (stage.count("t") for stage in letters))
    for name in HYBRID_PATTERNS:
        setattr(args, name, None)
    setattr(args, _NEW, written)
