#!/usr/bin/env python3
"""Make drawing/html_parts/orders.json: the orders that the explorer of a page starts from.

Run it when the search of a named schedule has changed; tests/drawing/test_report.py says when that
is. It takes some minutes, and numba.
"""

from __future__ import annotations

import json
import sys

from megatron_zb import files
from megatron_zb.cli.ending import ended
from megatron_zb.drawing.html_drawing import ORDER_SIZES, ORDERS_FILE, build_order, order_names
from megatron_zb.parsing import Parser
from megatron_zb.schedules.search import kernels


def main() -> int:
    return ended("make_orders.py", _run)


def _run() -> int:
    Parser(prog="make_orders.py", description=__doc__).parse_args()
    if not kernels.available():
        print("make_orders.py: without numba the search finds less: install it", file=sys.stderr)
        return 2
    orders = []
    for p, m in ORDER_SIZES:
        for name in order_names():
            orders.append(json.dumps(build_order(name, p, m), separators=(",", ":")))
            print(f"{name}: {p} ranks, {m} microbatches", flush=True)
    files.write_text(ORDERS_FILE, "[\n" + ",\n".join(orders) + "\n]\n")
    print(ORDERS_FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
