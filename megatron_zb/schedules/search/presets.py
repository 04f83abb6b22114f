"""Starting points of the search: vectors of numbers that steer the list scheduler well.

They stand in ``presets.csv``, and were found by climbing on V placements of 4 to 16 ranks at limits
of 3/8 to 1 of 1F1B. Each is, for the kinds F0, F1, B0, B1, W: bias, slope along the ranks, bias
once every F of chunk 0 has been started; then the quota of chunk 0 on the first rank and its fall
to the last (as shares of the slots), the weight of inputs that have long been ready, the weight of
pending W, and the share of the slots that pending W may take (0: any). Biases and slopes are in
mean pass times.
"""

from __future__ import annotations

import csv
from pathlib import Path

_FILE = Path(__file__).with_name("presets.csv")


def _read() -> tuple[tuple[float, ...], ...]:
    with _FILE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return tuple(tuple(map(float, row)) for row in rows)


PRESETS = _read()
