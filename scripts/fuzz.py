#!/usr/bin/env python
"""Train combinations of settings with the real pretrain_gpt.py on CPU ranks: upstream against ours.

The environment needs what scripts/test.sh installs with MEGATRON_LM_PATH set. The program is
tests/support/fuzzing/program.py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    sys.exit(import_module("fuzzing.program").main())
