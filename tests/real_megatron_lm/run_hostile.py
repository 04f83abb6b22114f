"""The launcher on ranks whose messages obey the rules of a GPU; SENT is a folder that all share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import hostile

from megatron_zb.launch import main

if __name__ == "__main__":
    hostile.install(Path(os.environ["SENT"]))
    main(sys.argv[1:])
