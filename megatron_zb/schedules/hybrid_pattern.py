"""The text of a hybrid model's layers: a letter for each, ``|`` between stages.

``/`` stands before the layers of each depth of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


def main_part(pattern: str) -> str:
    """Return the pattern without multi-token prediction, such as ``M*|ME``."""
    return pattern.split("/")[0]


def predicting_parts(pattern: str) -> list[str]:
    """Return the layers of each depth of multi-token prediction."""
    return list(filter(None, pattern.split("/")[1:]))


def kinds(pattern: str) -> str:
    """Return the kinds of all layers but those of multi-token prediction."""
    return main_part(pattern).replace("|", "")


def placed(pattern: str, counts: Iterable[int]) -> str:
    """Return the pattern with ``|`` between stages that have so many layers."""
    layers = iter(kinds(pattern))
    written = "|".join("".join(islice(layers, count)) for count in counts)
    return written + pattern[len(main_part(pattern)) :]
