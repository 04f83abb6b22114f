"""Run megatron-zb as the script of a forked process."""

from __future__ import annotations

import sys

from megatron_zb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
