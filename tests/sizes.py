"""Sizes that tests draw from: small ones, and large ones with scripts/test.sh --full."""

from __future__ import annotations

import os

FULL = "TESTS_FULL"
"""In the environment: set where everything is asked for."""
IS_FULL = bool(os.environ.get(FULL))

RANKS = 16 if IS_FULL else 8
MICROBATCHES = 64 if IS_FULL else 24
EXAMPLES = 15 if IS_FULL else 8
"""Of a search, which takes from tenths of a second to seconds."""
SEARCHES = 5 if IS_FULL else 3
"""Examples of a search of all placements."""
