"""Start a script of Megatron-LM on a CPU rank without the launcher: run_on_cpu.py SCRIPT ARGUMENTS.

A patched checkout hooks itself; only the calls to CUDA are redirected here.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_zb.cpu_ranks import run_on_cpu

if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(script.parent))
    run_on_cpu(training_loop=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(str(script), run_name="__main__")
