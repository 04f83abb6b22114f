"""Start the launcher with other arguments on one rank: run_and_differ.py SCRIPT ARGUMENTS.

The variable OTHER_ARGUMENTS holds, as JSON, the rank and its further arguments.
"""

from __future__ import annotations

import json
import os
import sys

from megatron_zb.launch import main

if __name__ == "__main__":
    rank, arguments = json.loads(os.environ["OTHER_ARGUMENTS"])
    main([*sys.argv[1:], *(arguments if os.environ["RANK"] == str(rank) else [])])
