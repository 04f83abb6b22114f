"""The pattern of a hybrid model: a letter for each layer, ``|`` between stages.

``/`` stands before the layers of each depth of multi-token prediction.
"""

from __future__ import annotations

import argparse
from itertools import islice

from megatron_zb.megatron_core.versions import HYBRID_PATTERNS
from megatron_zb.parsing import flag_of
from megatron_zb.schedules.layout import Letters

_NEW = HYBRID_PATTERNS[0]
SEGMENTS = f"'|' in {flag_of(_NEW)}"


def of_arguments(args: argparse.Namespace) -> str | None:
    """Return the pattern, under the name of any version."""
    return next(filter(None, (getattr(args, name, None) for name in HYBRID_PATTERNS)), None)


def is_placed(args: argparse.Namespace) -> bool:
    """Return whether there is a pattern, and it can say the layers of every chunk."""
    return hasattr(args, _NEW) and of_arguments(args) is not None


def main_part(pattern: str) -> str:
    """Return the pattern without multi-token prediction, such as ``M*|ME``."""
    return pattern.split("/")[0]


def segments(args: argparse.Namespace) -> str | None:
    """Return the main part of the pattern if it says the layers of each stage."""
    written = main_part(of_arguments(args) or "")
    return written if "|" in written else None


def depths(pattern: str) -> int:
    """Count the depths of multi-token prediction."""
    return sum(map(bool, pattern.split("/")[1:]))


def kinds(pattern: str) -> str:
    """Return the kinds of all layers but those of multi-token prediction."""
    return main_part(pattern).replace("|", "")


def place(args: argparse.Namespace, letters: Letters) -> None:
    """Write the layers of each stage into the pattern of the arguments."""
    pattern = of_arguments(args) or ""
    layers = iter(kinds(pattern))
    written = "|".join("".join(islice(layers, stage.count("t"))) for stage in letters)
    for name in HYBRID_PATTERNS:
        setattr(args, name, None)
    setattr(args, _NEW, written + pattern[len(main_part(pattern)) :])
