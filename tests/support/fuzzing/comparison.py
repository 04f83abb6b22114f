"""What two runs have logged, side by side, and how far their numbers may be apart.

Losses are equal to the last digit: a stage's sums do not depend on the order of its passes. What
does differ is fp32 rounding of sums over ranks, where a schedule has placed layers on other ranks:

- norms are summed over the layers of a rank first, so their last bits differ, and with
  post-validation along the pipeline, rank by rank;
- where the norm clips gradients, its last bit is in every weight, and so in later losses and norms;
- upstream's learning rate has been rounded to fp32, which that of post-validation has not;
- logits of a vocabulary-parallel output layer are normalized over the ranks that hold parts of the
vocabulary;
- attention, losses and weight gradients of token slices are summed slice by slice;
- with sequence parallelism, upstream logs the z-loss of one rank's tokens, a part of every slice
  where it is one of the sequence. Its gradients are in the norms;
- a router's z-loss has been rounded to the precision of its layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fuzzing.space import Combination

Log = Mapping[str, str]
"""Numbers by iteration and name, as they were printed."""

_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|(.*elapsed time.*)")
_EVALUATION = re.compile(r"^ ?(validation loss at .*?) \| (.*)")
# Of losses and of norms, where parts of logits or of a sequence are summed that have been rounded.
_CUT = {"fp32": (1e-6, 1e-6), "bf16": (1e-3, 1e-2), "fp16": (1e-3, 1e-2)}
# Adam's first steps are as long for a gradient that is but rounding: more of them are with slices.
_SLICED = _CUT | {"fp32": (1e-5, 1e-4)}
_Z_LOSS = {"fp32": 0.0, "bf16": 2**-7, "fp16": 2**-10}
_ONE_CHUNK = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-1p", "zb-2p")


def logged(printed: str) -> dict[str, str]:
    """Read all numbers of the iterations and the evaluations but times."""
    log: dict[str, str] = {}
    for line in printed.splitlines():
        if found := _ITERATION.search(line) or _EVALUATION.search(line):
            for part in found[2].split("|"):
                name, _, number = part.strip().rpartition(":")
                if name and not name.startswith("elapsed time"):
                    log[f"{found[1]} {name}"] = number.strip()
    return log


@dataclass(frozen=True)
class Difference:
    """The first number that differs by more than it may, and the widest relative differences."""

    first: str
    losses: float
    norms: float


def compare(upstream: Log, ours: Log, *combinations: Combination) -> Difference:
    """Compare all numbers; the first difference is empty if there is none beyond rounding.

    A run that goes on from another is given both combinations: each has rounded its sums.
    """
    first, widest = "", {"norm": 0.0, "loss": 0.0}
    if not upstream or upstream.keys() != ours.keys():
        first = f"logged by one alone: {sorted(upstream.keys() ^ ours.keys())[:3] or 'nothing'}"
    for key in sorted(upstream.keys() & ours.keys(), key=_iteration):
        apart = _apart(upstream[key], ours[key])
        kind = "norm" if key.endswith("norm") else "loss"
        widest[kind] = max(widest[kind], apart)
        if apart > max(width(key, each) for each in combinations) and not first:
            first = f"{key}: {upstream[key]}, {ours[key]}"
    return Difference(first, widest["loss"], widest["norm"])


def width(key: str, combination: Combination) -> float:
    """How far apart a number may be, as a share of itself."""
    is_norm, precision = key.endswith("norm"), combination["precision"].partition("-")[0]
    if key.endswith("learning rate"):
        return 1e-7  # upstream's has been through an fp32 tensor
    if combination["vocabulary"] != "whole" or combination["slices"] != "without":
        if key.endswith("num zeros"):
            return math.inf  # what one rounds to zero, the other may not
        if key.endswith("z_loss") and combination["sequence-parallel"] == "with":
            return math.inf
        losses, norms = (_CUT if combination["slices"] == "without" else _SLICED)[precision]
        if key.endswith("z_loss"):
            return max(losses, _Z_LOSS[precision])
        return norms if is_norm else losses
    if not places_elsewhere(combination):
        return 5e-7 if is_norm and combination["post-validation"] == "with" else 0.0
    if combination["clip"] == "0.3" and (is_norm or "loss" in key):
        return 1e-6 if precision == "fp32" else 1e-4
    return 5e-7 if is_norm else 0.0


def places_elsewhere(combination: Combination) -> bool:
    """Whether ranks hold other layers than under upstream's schedule."""
    is_even = combination["layers"] != "uneven" and combination["balanced"] == "without"
    return combination["schedule"] not in _ONE_CHUNK or not is_even


def _apart(one: str, other: str) -> float:
    if one == other:
        return 0.0
    try:
        a, b = float(one), float(other)
    except ValueError:
        return math.inf
    apart = abs(a - b) / max(abs(a), abs(b), 1e-30)
    return apart if math.isfinite(apart) else math.inf


def _iteration(key: str) -> tuple[int, str]:
    number = key.partition(" ")[0]
    return (int(number) if number.isdigit() else 10**9, key)
