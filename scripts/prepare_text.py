#!/usr/bin/env python3
"""Turn text into a data set that Megatron trains on, one token per byte."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_zb.train.prepare_text import main

if __name__ == "__main__":
    sys.exit(main())
